"""Claims that activations leave the GPU at no visible cost, and measures it beside the other ways to do it.

Runs training steps (forward, loss, backward) of a stack of plain DiT blocks under every way to keep or move what a
block's backward starts from. Before anything is timed, the gradients of every scheme must equal those of "full", which
is checkpointing alone, bit for bit (exit status 1).

Claim, on a GPU and for sequences of tens of thousands of tokens: moving the inputs of all blocks but the last to
host memory takes at most 1.02 times the step of checkpointing alone, at least 95 % of the copies' time lies beside
compute, at least 99 % of the bytes that theory names are moved, and no other scheme that offloads is faster or has a
lower peak. On a CPU only the accounting can be checked: bytes moved, bytes that stay after the forward, and peaks.

The last part fails by accounting for peers that fetch only when backward waits: two slots and the last block's input
cost two block inputs more at the peak than `save_on_cpu` needs. The run prints and stores that as a failed claim.

How to read the table:

    step ms    median over the rounds and its quartiles; the schemes take turns, in an order that changes
    vs full    step time over that of checkpointing alone in the same round; 1.02 is two percent slower
    resident   on the device after the forward, above weights, gradients and data, the engine's slots included
    peak       the most within the step, counted likewise. CUDA: by the allocator; CPU: by counting storages
    slots      of it, the two places where our engine fetches blocks to; they stay between steps
    out, in    bytes copied in one step; theory is what the scheme has to copy each way
    hidden     of the time that copies took, how much lay beside compute kernels (CUDA only, from a profiler trace)

    python tools/bench/offload.py --hidden 3072 --tokens 30000 75000 --only offload
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import harness
import torch
from dit_step import Case, Forward, Workload
from harness import make_claim
from peers.offloaders import SaveOnCpu, SynchronousStack, TorchtuneOffload, Traffic, why_no_torchtune
from pictures import OFFLOADED, REFERENCE, draw_offload
from queues import hidden_share, queues_to_draw, record_on_host, split_by_queue
from torch import Tensor

from opensora_accel.checkpoint import GLOBAL_ACTIVATION_MANAGER as MANAGER
from opensora_accel.checkpoint import checkpoint_blocks
from opensora_accel.profiler import LiveBytes

CPU_ONLY = "accounting only: on a CPU host and device memory are one, so step times say nothing about hiding"
PEERS: dict[str, Any] = {
    "save_on_cpu": SaveOnCpu,
    "synchronous stack": SynchronousStack,
    "torchtune": TorchtuneOffload,
}
NAMES = ("none", REFERENCE, OFFLOADED, "selective", "selective+offload", *PEERS)


class Scheme:
    """One way to run the blocks of a case: ours in a setting ("mode+offload"), or a peer's."""

    def __init__(self, name: str, workload: Workload) -> None:
        case = workload.case
        self.name, self.workload, self.blocks = name, workload, workload.twin_blocks()
        self.traffic, self.uses_arena = Traffic(), name.endswith("+offload")
        self.forward: Forward = self._in_turn
        # What a block that moves has to copy out in one step, or keeps where it stays; and how many blocks move.
        self.each_bytes, self.moved = case.input_bytes, 0
        if name == "none":
            self.each_bytes = 0
        elif name in PEERS:
            self.moved, self.forward = case.blocks, PEERS[name](self.blocks, self.traffic)
        else:
            mode: Any = name.removesuffix("+offload")
            checkpoint_blocks(self.blocks, mode, 1.0 if self.uses_arena else 0.0, keep_last=1)
            self.moved = case.blocks - 1 if self.uses_arena else 0
            if mode == "selective":
                self.each_bytes += case.input_bytes + case.log_sum_exp_bytes

    def _in_turn(self, hidden: Tensor, timestep: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden, timestep)
        return hidden

    def run(self, after_forward: Callable[[], None] = lambda: None) -> None:
        MANAGER.enable = self.uses_arena
        MANAGER.reset_counters()
        self.traffic.out_bytes = self.traffic.in_bytes = 0
        self.workload.step(self.forward, after_forward)


def set_up_arena(case: Case) -> None:
    """Host memory for all blocks of the scheme that moves most; slots from before are gone."""
    each = 2 * case.input_bytes + case.log_sum_exp_bytes + 3 * 4096
    # Some kernels round the length of their log-sum-exp up.
    MANAGER.setup_arena(case.blocks * (each + each // 50))


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# ---- gradients


class GradientsDiffer(Exception):
    """A scheme's gradients are not those of checkpointing alone."""

    def __init__(self, num_different: int, message: str):
        super().__init__(message)
        self.num_different = num_different


def check_gradients(scheme: Scheme, expected: dict[str, Tensor]) -> None:
    """Every scheme's gradients are the reference's, which comes first, bit for bit."""
    before = torch.are_deterministic_algorithms_enabled()
    # CUDA's flash attention adds up its gradients in any order otherwise.
    torch.use_deterministic_algorithms(before or scheme.workload.case.device.type == "cuda")
    try:
        scheme.run()
    finally:
        torch.use_deterministic_algorithms(before)
    differences = {}
    for name, gradient in scheme.workload.gradients.items():
        wanted = expected[name] if name in expected else expected.setdefault(name, gradient.clone())
        if not torch.equal(gradient, wanted):
            differences[name] = float((gradient.double() - wanted.double()).abs().max())
    if differences:
        # A NaN is worse than any number.
        worst = max(differences, key=lambda name: (math.isnan(differences[name]), differences[name]))
        raise GradientsDiffer(
            len(differences),
            f"{scheme.name}: {len(differences)} of {len(expected)} gradients are not those of {REFERENCE} bit for "
            f"bit; the largest difference is {differences[worst]:g}, in {worst}. Nothing was measured: a scheme "
            "that computes something else has no step time to compare",
        )


# ---- memory and queues of one step


class StepMemory(LiveBytes):
    """Live bytes of one device type, without those that lie on it between steps."""

    def __init__(self, device: torch.device):
        super().__init__()
        self._device, self._is_paused = device, False

    @contextlib.contextmanager
    def on_host(self) -> Iterator[None]:
        """What is made within it stands for host memory."""
        self._is_paused = True
        yield
        self._is_paused = False

    def _count(self, storage: torch.UntypedStorage) -> None:
        if not self._is_paused and storage.device.type == self._device.type:
            super()._count(storage)


def measure_memory(scheme: Scheme) -> dict[str, Any]:
    """Bytes on the device above weights, gradients and data, in a step after one that has settled the scheme."""
    device = scheme.workload.case.device
    if scheme.uses_arena:
        set_up_arena(scheme.workload.case)
    else:
        MANAGER.close()
    # By counting storages: exact bytes, and one value for each operation.
    live, at_turn = StepMemory(device), list[int]()
    for tensor in (*scheme.workload.held(), *(MANAGER.arena.memory if MANAGER.arena is not None else ())):
        live.ignore(tensor)
    scheme.traffic.on_host = live.on_host
    with live:
        scheme.run()  # the slots are made here, and so counted
        gc.collect()
        live.peak_bytes = live.now_bytes
        live.timeline.clear()
        scheme.run(lambda: at_turn.extend((live.now_bytes, len(live.timeline))))
    scheme.traffic.on_host = contextlib.nullcontext
    peak_bytes, (resident_bytes, turn) = live.peak_bytes, at_turn
    halves = {"forward_bytes": live.timeline[:turn], "backward_bytes": live.timeline[turn:]}
    if device.type == "cuda":
        # CUDA's allocator rounds up and knows what operations take within.
        free(device)
        baseline_bytes = torch.cuda.memory_allocated(device) - MANAGER.slot_bytes
        torch.cuda.reset_peak_memory_stats(device)
        scheme.run(lambda: at_turn.append(torch.cuda.memory_allocated(device)))
        resident_bytes = at_turn[-1] - baseline_bytes
        peak_bytes = torch.cuda.max_memory_allocated(device) - baseline_bytes
    moved = scheme.traffic.out_bytes, scheme.traffic.in_bytes
    if scheme.uses_arena:
        moved = MANAGER.counters.moved_bytes, MANAGER.counters.fetched_bytes
    return {
        "resident_bytes": resident_bytes,
        "peak_bytes": peak_bytes,
        "slot_bytes": MANAGER.slot_bytes,
        "out_bytes": moved[0],
        "in_bytes": moved[1],
        "timeline": {half: thin(values) for half, values in halves.items()},
    }


def thin(values: Sequence[int], most: int = 240) -> list[int]:
    """Few enough to draw: the greatest of each stretch, so that no peak is lost."""
    num = min(most, len(values))
    bounds = [len(values) * index // num for index in range(num + 1)] if num else [0]
    return [max(values[start:end]) for start, end in itertools.pairwise(bounds)]


def look_inside(scheme: Scheme) -> dict[str, Any]:
    """Bytes of one step, in practice and in theory, and what ran when."""
    result, device = measure_memory(scheme), scheme.workload.case.device
    result |= {"theory_bytes": scheme.moved * scheme.each_bytes, "copy_time_hidden_share": None}
    if scheme.name != "none":
        result["kept_bytes"] = (len(scheme.blocks) - scheme.moved) * scheme.each_bytes
    found, labels = None, list[str]()
    if device.type == "cuda":
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            scheme.run()
            torch.cuda.synchronize(device)
        found = split_by_queue(profile.events())
        result["copy_time_hidden_share"] = hidden_share(found)
    elif scheme.name == OFFLOADED:
        found, labels = record_on_host(scheme.blocks, device, scheme.run)
    if found and scheme.name == OFFLOADED:
        result["queues"] = queues_to_draw(found, labels)
    return result


# ---- one case


def measure(
    case: Case, only: str, rounds: int, results: dict[str, dict[str, Any]], keep: Callable[[], None]
) -> None:
    """Fills `results` by scheme: gradients, then times in turns, then memory and queues.

    Args:
        keep: saves what there is, after each part: whoever started this may end it before the last.

    Raises:
        GradientsDiffer: a scheme computes something else than checkpointing alone.
    """
    names = [name for name in NAMES if only in name or name == REFERENCE]
    results |= {name: {"status": "measured", "reason": ""} for name in names}
    reason = why_no_torchtune(case.device)
    if reason and "torchtune" in results:
        results["torchtune"] = {"status": "skipped", "reason": reason}

    def attempt(name: str, run: Callable[..., Any], *arguments: Any) -> Any:
        """What `run` returns. A scheme for which the device is too small is out of the case from here on."""
        if results[name]["status"] != "measured":
            return None
        try:
            return run(*arguments)
        except torch.OutOfMemoryError:
            results[name] = {"status": "out of memory", "reason": ""}
        # After `except`: the traceback holds what the step had made.
        free(case.device)
        return None

    try:
        workload, expected = Workload(case), dict[str, Tensor]()
        usable = [name for name, result in results.items() if result["status"] == "measured"]
        schemes = {name: Scheme(name, workload) for name in usable}
        set_up_arena(case)
        for name in sorted(schemes, key=lambda name: name != REFERENCE):
            harness.say(f"{case.name}: gradients of {name}")
            attempt(name, check_gradients, schemes[name], expected)
        expected.clear()  # nothing that is measured has it beside it
        harness.say(f"{case.name}: times")
        turns = {
            name: partial(attempt, name, harness.time_ms, scheme.run, case.device)
            for name, scheme in schemes.items()
        }
        times = harness.take_turns(turns, rounds)
        for name in (name for name in schemes if results[name]["status"] == "measured"):
            # The reference may have run out of memory on its way.
            comparable = len(times[REFERENCE]) == len(times[name])
            ratio = harness.ratios(times[name], times[REFERENCE])["median"] if comparable else None
            step = {"step_time_ms": harness.spread(times[name]), "step_time_ratio": ratio}
            results[name] |= {"gradients_equal": True, **step}
        keep()
        for name, scheme in schemes.items():
            harness.say(f"{case.name}: memory of {name}")
            results[name] |= attempt(name, look_inside, scheme) or {}
            keep()
    finally:
        MANAGER.close()
        free(case.device)


# ---- claims and table


def claims(case: Case, results: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What one case says of each claim; time is not measured on a CPU."""
    on_device = case.device.type == "cuda"
    ours, found = results.get(OFFLOADED, {}), list[dict[str, Any]]()

    def claim(what: str, value: float | None, comparison: str, threshold: float) -> None:
        found.append({"case": case.name, **make_claim(what, value, comparison, threshold)})

    def over(above: float | None, below: float | None) -> float | None:
        return None if above is None or not below else above / below

    def step_ms(result: Mapping[str, Any]) -> float | None:
        return harness.look_up(result, "step_time_ms.median") if on_device else None

    ratio = ours.get("step_time_ratio") if on_device else None
    claim(f"step time of {OFFLOADED} over that of {REFERENCE}", ratio, "at most", 1.02)
    hidden = ours.get("copy_time_hidden_share")
    claim(f"share of copy time that {OFFLOADED} hides behind compute", hidden, "at least", 0.95)
    for name in (name for name in (OFFLOADED, "selective+offload") if "peak_bytes" in results.get(name, {})):
        mine, alone = results[name], results.get(name.partition("+")[0], {})
        moved = over(min(mine["out_bytes"], mine["in_bytes"]), mine["theory_bytes"])
        limits = ("at least", 0.99) if on_device else ("1, to within", 0.01)
        claim(f"bytes that {name} moves each way, over theory", moved, *limits)
        kept = None
        if "peak_bytes" in alone:
            # What lies on the device beside the blocks' boundaries (the loss's own, say) is the same without offload.
            others = alone["resident_bytes"] - alone["kept_bytes"]
            kept = over(mine["resident_bytes"] - others, mine["slot_bytes"] + mine["kept_bytes"])
        what = f"bytes that {name} keeps for the blocks after the forward, over two slots and the blocks that stay"
        claim(what, kept, "1, to within", 0.01)
    for name in (name for name in PEERS if name in results):
        peer, beside = results[name], f"{name} over that of {OFFLOADED}"
        claim(f"step time of {beside}", over(step_ms(peer), step_ms(ours)), "above", 1.0)
        claim(f"peak of {beside}", over(peer.get("peak_bytes"), ours.get("peak_bytes")), "above", 1.0)
    return found


def equal_gradients(case: Case, num_different: int) -> dict[str, Any]:
    """Says for all schemes of a case what was checked before anything was timed."""
    what = f"gradients of a scheme that are not those of {REFERENCE} bit for bit"
    return {"case": case.name, **make_claim(what, num_different, "exactly", 0)}


COLUMNS = {
    "scheme": "scheme",
    "": "status",
    "step ms": "step_time_ms",
    "vs full": "step_time_ratio",
    "resident": "resident_bytes",
    "peak": "peak_bytes",
    "slots": "slot_bytes",
    "out": "out_bytes",
    "in": "in_bytes",
    "theory": "theory_bytes",
    "hidden": "copy_time_hidden_share",
}


def make_table(case: Mapping[str, Any]) -> str:
    title = f"{case['name']} (one block input: {case['block_input_bytes'] / 2**20:.2f} MiB; sizes in MiB)"
    rows = [{"scheme": name, **result} for name, result in case["schemes"].items()]
    notes = [f"{row['scheme']}: {row['reason']}" for row in rows if row["reason"]]
    return harness.make_table(title, COLUMNS, rows, notes)


# ---- the command


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, with what was left out filled in for the device. Exits on what cannot be."""
    parser = harness.make_parser("offload", __doc__, rounds=7)
    add = parser.add_argument
    add("--hidden", type=int, nargs="+", help="channels; several make several cases (128; 3072 5120 on CUDA)")
    add("--tokens", type=int, nargs="+", help="length of the sequence (512; 30000 75000 on CUDA)")
    add("--blocks", type=int, help="default: 6; 8 on CUDA")
    usual: Mapping[str, Mapping[str, Any]] = {
        "cpu": {"hidden": [128], "tokens": [512], "blocks": 6},
        "cuda": {"hidden": [3072, 5120], "tokens": [30_000, 75_000], "blocks": 8},
        "quick": {"hidden": [32], "tokens": [40], "blocks": 4, "rounds": 2},
    }
    options = harness.parse_options(parser, arguments, usual)
    options.head_dim = 128 if options.device == "cuda" else 32
    for hidden in options.hidden:
        if hidden < 1 or hidden % options.head_dim:
            parser.error(f"--hidden must be a multiple of the head dim, {options.head_dim}; got {hidden}")
    if not any(options.only in name for name in NAMES):
        parser.error(f"--only {options.only!r} is in no scheme's name; they are {', '.join(NAMES)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 1 when a scheme's gradients differ. Claims that do not hold are printed and stored."""
    # Read when CUDA starts. cuBLAS needs the first to be deterministic, which the check of gradients asks for; the
    # second keeps one scheme's freed memory usable for the next.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    options = parse(arguments)
    on_cpu = options.device == "cpu"
    report = harness.Report(options, note=CPU_ONLY if on_cpu else None, cases=[])
    print(report.result["note"] or "")
    for hidden, tokens in itertools.product(options.hidden, options.tokens):
        dtype, device = torch.float32 if on_cpu else torch.bfloat16, torch.device(options.device)
        case = Case(hidden, hidden // options.head_dim, tokens, options.blocks, dtype, device)
        shown = {"dtype": str(dtype).removeprefix("torch."), "device": options.device}
        results, before = dict[str, dict[str, Any]](), report.result["claims"]
        row = {"name": case.name, **dataclasses.asdict(case), **shown}
        row |= {"block_input_bytes": case.input_bytes, "schemes": results}

        def keep(before: Any = before, case: Case = case, results: Any = results) -> None:
            report.result["claims"] = [*before, equal_gradients(case, 0), *claims(case, results)]
            report.save()

        report.result["cases"].append(row)
        try:
            measure(case, options.only, options.rounds, results, keep)
        except GradientsDiffer as error:
            report.result["cases"].pop()
            report.result["claims"].append(equal_gradients(case, error.num_different))
            report.show("")
            print(f"error: {error}", file=sys.stderr)
            return 1
        report.show(make_table(row))
    report.finish(draw_offload)
    return 0


if __name__ == "__main__":
    sys.exit(main())
