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

PROGRAM = "python tools/bench/offload.py"
CPU_ONLY = "accounting only: on a CPU host and device memory are one, so step times say nothing about hiding"
AUTOMATIC = "full+auto"
PEERS = ("save_on_cpu", "synchronous stack", "torchtune")
NAMES = ("none", REFERENCE, OFFLOADED, AUTOMATIC, "selective", "selective+offload", *PEERS)
# Share of the extrapolated length at which it is run.
VERIFIED_SHARE = 0.98
EXAMPLES = f"""\
schemes: {", ".join(NAMES)}

examples:
  {PROGRAM}                          small on a CPU (accounting only), large on a GPU
  {PROGRAM} --only offload           only the schemes whose name holds this text, and "full"
  {PROGRAM} --hidden 3072 --tokens 30000 75000 --budget-gib 80 --verify-longest
  {PROGRAM} --blocks 16 --output result.json --picture result.png

how to read the table:
  step ms    median over the rounds and its quartiles; the schemes take turns, in an order that changes
  vs full    step time over that of checkpointing alone in the same round; 1.02 is two percent slower
  resident   on the device after the forward, above weights, gradients and data, the engine's slots included
  peak       the most within the step, counted likewise. CUDA: by the allocator; CPU: by counting storages
  slots      of it, the two places where our engine fetches blocks to; they stay between steps
  out, in    bytes copied in one step; theory is what the scheme has to copy each way
  hidden     of the time that copies took, how much lay beside compute kernels (CUDA only, from a profiler trace)
  longest    tokens at which weights, gradients and peak fill --budget-gib. Extrapolated: a straight line through
             this length and half of it. "ok": --verify-longest ran {VERIFIED_SHARE:.0%} of it within the budget"""


class Scheme:
    """One way to run the blocks of a case: ours in a setting ("mode+offload"), or a peer's."""

    def __init__(self, name: str, workload: Workload) -> None:
        case = workload.case
        self.name, self.workload, self.blocks = name, workload, workload.twin_blocks()
        self.traffic, self.host_memory = Traffic(), list[Tensor]()
        # What a block that moves has to copy out in one step, or keeps where it stays.
        self.each_bytes = case.input_bytes
        # Blocks that move; None where the engine decides.
        self.moved: int | None = 0
        self.uses_arena = False
        self.forward: Forward = self._in_turn
        mode, _, setting = name.partition("+")
        if name == "none":
            self.each_bytes = 0
        elif name in PEERS:
            self.moved = case.blocks
            if name == "synchronous stack":
                num_elements = case.blocks * case.input_bytes // case.dtype.itemsize
                stack = SynchronousStack(self.blocks, self.traffic, num_elements, case.dtype)
                self.forward, self.host_memory = stack, [stack.buffer]
            else:
                peer = SaveOnCpu if name == "save_on_cpu" else TorchtuneOffload
                self.forward = peer(self.blocks, self.traffic)
        else:
            offload: Any = {"": 0.0, "offload": 1.0, "auto": "auto"}[setting]
            checkpoint_blocks(self.blocks, mode, offload, keep_last=case.keep_last)  # type: ignore[arg-type]
            self.uses_arena = setting != ""
            self.moved = {"": 0, "offload": max(0, case.blocks - case.keep_last)}.get(setting)
            if mode == "selective":
                self.each_bytes += case.input_bytes + case.log_sum_exp_bytes
        # The first of the engine's decisions that can be about this scheme.
        self.first_decision = len(MANAGER.decisions)

    def _in_turn(self, hidden: Tensor, timestep: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden, timestep)
        return hidden

    def run(self, after_forward: Callable[[], None] = lambda: None) -> None:
        MANAGER.enable = self.uses_arena
        MANAGER.reset_counters()
        self.traffic.out_bytes = self.traffic.in_bytes = 0
        self.workload.step(self.forward, after_forward)

    def decision(self) -> Any:
        """The engine's last one about this scheme; None where it made none."""
        made = MANAGER.decisions[self.first_decision :]
        return made[-1] if made else None

    def theory_bytes(self) -> int:
        """What one step has to copy each way."""
        if self.moved is not None:
            return self.moved * self.each_bytes
        decision = self.decision()
        return self.each_bytes * (len(self.blocks) - 1 if decision is None else decision.moved)


def set_up_arena(case: Case) -> None:
    """Host memory for all blocks of the scheme that moves most; slots from before are gone."""
    each = 2 * case.input_bytes + case.log_sum_exp_bytes + 3 * 4096
    # Some kernels round the length of their log-sum-exp up.
    MANAGER.setup_arena(case.blocks * (each + each // 50))


# ---- memory of one step


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
    held, device = scheme.workload.held(), scheme.workload.case.device
    if scheme.uses_arena:
        set_up_arena(scheme.workload.case)
    else:
        MANAGER.close()
    # By counting storages: exact bytes, and one value for each operation.
    live, at_turn = StepMemory(device), list[int]()
    for tensor in [*held, *scheme.host_memory, *(MANAGER.arena.memory if MANAGER.arena is not None else ())]:
        live.ignore(tensor)
    scheme.traffic.on_host = live.on_host
    try:
        with live:
            scheme.run()  # the slots are made here, and so counted
            gc.collect()
            live.peak_bytes = live.now_bytes
            live.timeline.clear()
            scheme.run(lambda: at_turn.extend((live.now_bytes, len(live.timeline))))
    finally:
        scheme.traffic.on_host = contextlib.nullcontext
    baseline_bytes, peak_bytes = sum(tensor.nbytes for tensor in held), live.peak_bytes
    resident_bytes, turn = at_turn
    halves = {"forward_bytes": live.timeline[:turn], "backward_bytes": live.timeline[turn:]}
    if device.type == "cuda":
        # CUDA's allocator rounds up and knows what operations take within.
        gc.collect()
        torch.cuda.synchronize(device)
        baseline_bytes = torch.cuda.memory_allocated(device) - MANAGER.slot_bytes
        torch.cuda.reset_peak_memory_stats(device)
        scheme.run(lambda: at_turn.append(torch.cuda.memory_allocated(device)))
        torch.cuda.synchronize(device)
        resident_bytes = at_turn[-1] - baseline_bytes
        peak_bytes = torch.cuda.max_memory_allocated(device) - baseline_bytes
    moved = scheme.traffic.out_bytes, scheme.traffic.in_bytes
    if scheme.uses_arena:
        moved = MANAGER.counters.moved_bytes, MANAGER.counters.fetched_bytes
    return {
        "baseline_bytes": baseline_bytes,
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


def longest_tokens(tokens: tuple[int, int], total_bytes: tuple[int, int], budget_bytes: int) -> int | None:
    """By a straight line through two lengths: the most tokens within the budget; None where it does not rise."""
    slope = (total_bytes[1] - total_bytes[0]) / (tokens[1] - tokens[0])
    return None if slope <= 0 else max(0, int(tokens[0] + (budget_bytes - total_bytes[0]) / slope))


# ---- measuring one case


class GradientsDiffer(Exception):
    """A scheme's gradients are not those of checkpointing alone."""


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class CaseRun:
    """All schemes of one case. `results` has each by name, as it is stored."""

    def __init__(self, case: Case, options: argparse.Namespace) -> None:
        self.case, self.options = case, options
        self.results: dict[str, dict[str, Any]] = {}

    def measure(self) -> dict[str, dict[str, Any]]:
        """Gradients, then times in turns, then memory and queues; what runs out of memory says so, the others go on."""
        MANAGER.memory_target_bytes = self.options.budget_bytes
        names = [name for name in NAMES if self.options.only in name or name == REFERENCE]
        reason = why_no_torchtune(self.case.device)
        for name in names:
            self.results[name] = {"status": "measured", "reason": "", "gradients_equal": True}
            if name == "torchtune" and reason:
                self.results[name] = {"status": "skipped", "reason": reason}
        try:
            try:
                self._full_length()
            except torch.OutOfMemoryError:  # outside of any scheme: the weights alone
                self.results = {name: {"status": "out of memory", "reason": ""} for name in names}
            free(self.case.device)
            # After the full length: its weights are gone.
            for name, result in self.results.items():
                keys = ("longest_tokens_extrapolated", "longest_verified", "longest_verified_total_bytes")
                result |= dict.fromkeys(keys, None)
                # "auto" decides anew for every length.
                if "peak_bytes" in result and name != AUTOMATIC:
                    harness.say(f"{self.case.name}: memory of {name} at half the length")
                    self._attempt(name, self._extrapolate, name, result)
        finally:
            MANAGER.close()
            MANAGER.memory_target_bytes = None
            free(self.case.device)
        return self.results

    def _attempt(self, name: str, run: Callable[..., Any], *arguments: Any) -> Any:
        """What `run` returns. A scheme for which the device is too small is out of the case from here on."""
        if self.results[name]["status"] != "measured":
            return None
        try:
            return run(*arguments)
        except torch.OutOfMemoryError:
            self.results[name] = {"status": "out of memory", "reason": ""}
        # After `except`: the traceback holds what the step had made.
        free(self.case.device)
        return None

    def _full_length(self) -> None:
        workload = Workload(self.case)
        usable = [name for name, result in self.results.items() if result["status"] == "measured"]
        schemes = {name: Scheme(name, workload) for name in usable}
        set_up_arena(self.case)
        expected: dict[str, Tensor] = {}
        for name in sorted(schemes, key=lambda name: name != REFERENCE):
            harness.say(f"{self.case.name}: gradients of {name}")
            self._attempt(name, self._check, schemes[name], expected)
        if AUTOMATIC in schemes:
            # It measures a pass after an optimizer's first step, which nothing here would make, and then decides.
            set_up_arena(self.case)  # the slots of the others would count
            free(self.case.device)
            torch.optim.SGD([torch.zeros(1)]).step()
            for _ in range(2):  # the gradient check was the first pass
                self._attempt(AUTOMATIC, schemes[AUTOMATIC].run)
        harness.say(f"{self.case.name}: times")
        turns = {
            name: partial(self._attempt, name, harness.time_ms, scheme.run, self.case.device)
            for name, scheme in schemes.items()
        }
        times = harness.take_turns(turns, self.options.rounds)
        for name, values in times.items():
            if self.results[name]["status"] == "measured":
                step_ms, reference = harness.spread(values), times[REFERENCE]
                # The reference may have run out of memory on its way.
                comparable = len(reference) == len(values)
                self.results[name] |= {
                    "step_time_ms": step_ms,
                    "tokens_per_s": self.case.batch * self.case.tokens / step_ms["median"] * 1000,
                    "step_time_ratio": harness.ratios(values, reference)["median"] if comparable else None,
                }
        for name, scheme in schemes.items():
            harness.say(f"{self.case.name}: memory of {name}")
            self._attempt(name, self._look_inside, scheme)

    def _check(self, scheme: Scheme, expected: dict[str, Tensor]) -> None:
        """Every scheme's gradients are the reference's, which comes first, bit for bit."""
        before = torch.are_deterministic_algorithms_enabled()
        # CUDA's flash attention adds up its gradients in any order otherwise.
        torch.use_deterministic_algorithms(before or self.case.device.type == "cuda")
        try:
            scheme.run()
        finally:
            torch.use_deterministic_algorithms(before)
        differences = {}
        for name, gradient in scheme.workload.gradients.items():
            found = gradient.to("cpu", copy=True)
            wanted = expected.setdefault(name, found)
            if not torch.equal(found, wanted):
                differences[name] = float((found.double() - wanted.double()).abs().max())
        if differences:
            # A NaN is worse than any number.
            worst = max(differences, key=lambda name: (math.isnan(differences[name]), differences[name]))
            raise GradientsDiffer(
                f"{scheme.name}: {len(differences)} of {len(expected)} gradients are not those of {REFERENCE} bit for "
                f"bit; the largest difference is {differences[worst]:g}, in {worst}. Nothing was measured: a scheme "
                "that computes something else has no step time to compare"
            )

    def _look_inside(self, scheme: Scheme) -> None:
        result, device = self.results[scheme.name], self.case.device
        result |= measure_memory(scheme)
        result["theory_bytes"] = scheme.theory_bytes()
        if scheme.moved is not None and scheme.each_bytes:
            result["kept_bytes"] = (self.case.blocks - scheme.moved) * scheme.each_bytes
        result |= {"copy_time_hidden_share": None, "decision": None}
        if scheme.name == AUTOMATIC:
            decision = scheme.decision()
            none = "no pass was measured to its end, so all blocks move"
            result["decision"] = none if decision is None else decision.reason
        if device.type == "cuda":
            activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=activities) as profile:
                scheme.run()
                torch.cuda.synchronize(device)
            found, labels = split_by_queue(profile.events()), list[str]()
            result["copy_time_hidden_share"] = hidden_share(found["compute"], found["out"], found["in"])
        elif scheme.name == OFFLOADED:
            found, labels = record_on_host(scheme.blocks, device, scheme.run)
        if scheme.name == OFFLOADED:
            result["queues"] = queues_to_draw(found, labels)

    def _extrapolate(self, name: str, result: dict[str, Any]) -> None:
        """The longest sequence, by a second point of the line."""

        def total_bytes(tokens: int) -> int:
            workload = Workload(dataclasses.replace(self.case, tokens=tokens))
            found = measure_memory(Scheme(name, workload))
            return int(found["baseline_bytes"] + found["peak_bytes"])

        half, budget_bytes = max(1, self.case.tokens // 2), self.options.budget_bytes
        totals = (total_bytes(half), result["baseline_bytes"] + result["peak_bytes"])
        longest = longest_tokens((half, self.case.tokens), totals, budget_bytes)
        result["longest_tokens_extrapolated"] = longest
        tokens = int((longest or 0) * VERIFIED_SHARE)
        if self.options.verify_longest and tokens:
            harness.say(f"{self.case.name}: verifying {name} at {tokens} tokens")
            result["longest_verified"] = False
            with contextlib.suppress(torch.OutOfMemoryError):
                result["longest_verified_total_bytes"] = total_bytes(tokens)
                result["longest_verified"] = result["longest_verified_total_bytes"] <= budget_bytes
            free(self.case.device)


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
    hidden = ours.get("copy_time_hidden_share") if on_device else None
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


COLUMNS = {
    "scheme": "scheme",
    "": "status",
    "step ms": "step_time_ms",
    "tokens/s": "tokens_per_s",
    "vs full": "step_time_ratio",
    "resident": "resident_bytes",
    "peak": "peak_bytes",
    "slots": "slot_bytes",
    "out": "out_bytes",
    "in": "in_bytes",
    "theory": "theory_bytes",
    "hidden": "copy_time_hidden_share",
    "longest": "longest_tokens_extrapolated",
    "ok": "longest_verified",
}


def make_table(case: Mapping[str, Any]) -> harness.Table:
    title = f"{case['name']} (one block input: {case['block_input_bytes'] / 2**20:.2f} MiB; sizes in MiB)"
    rows = [{"scheme": name, **result} for name, result in case["schemes"].items()]
    notes = {row["scheme"]: row.get("decision") or row["reason"] for row in rows}
    return harness.Table.of(title, COLUMNS, rows, [f"{name}: {note}" for name, note in notes.items() if note])


# ---- the command


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, with what was left out filled in for the device. Exits on what cannot be."""
    parser = harness.make_parser(PROGRAM, __doc__, EXAMPLES, rounds=7)
    add, positive = parser.add_argument, harness.positive
    add("--hidden", type=positive, nargs="+", help="channels; several make several cases (128; 3072 5120)")
    add("--tokens", type=positive, nargs="+", help="length of the sequence (512; 30000 75000 on CUDA)")
    add("--blocks", type=positive, help="default: 6; 8 on CUDA")
    add("--heads", type=positive, help="default: heads of 128 channels on CUDA, of 32 on a CPU")
    add("--batch", type=positive, default=1, help="default: 1")
    add("--dtype", choices=("float32", "bfloat16"), help="default: float32; bfloat16 on CUDA")
    add("--keep-last", type=int, default=1, help="last blocks that ours never moves (default: 1)")
    add("--budget-gib", type=float, help="device memory to fill (1; 90 %% of the device on CUDA)")
    add("--verify-longest", action="store_true", help="run the extrapolated lengths too, which takes long")
    options = harness.parse_options(
        parser,
        arguments,
        quick={"rounds": 2, "hidden": [32], "tokens": [40], "blocks": 4},
        cpu={"hidden": [128], "tokens": [512], "blocks": 6, "dtype": "float32"},
        cuda={"hidden": [3072, 5120], "tokens": [30_000, 75_000], "blocks": 8, "dtype": "bfloat16"},
    )
    if options.keep_last < 0:
        parser.error(f"--keep-last is a number of blocks, at least 0; got {options.keep_last}")
    if options.budget_gib is not None and options.budget_gib <= 0:
        parser.error(f"--budget-gib must be above 0; got {options.budget_gib:g}")
    if options.heads and any(hidden % options.heads for hidden in options.hidden):
        parser.error(
            f"--hidden {options.hidden} must be divisible by --heads ({options.heads}); leave --heads out"
        )
    if not any(options.only in name for name in NAMES):
        parser.error(f"--only {options.only!r} is in no scheme's name; they are {', '.join(NAMES)}")
    options.budget_bytes = int((options.budget_gib or 1) * 2**30)
    if options.device == "cuda" and options.budget_gib is None:
        options.budget_bytes = int(0.9 * torch.cuda.get_device_properties(0).total_memory)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 1 when a scheme's gradients differ. Claims that do not hold are printed and stored."""
    # Read when CUDA starts. cuBLAS needs the first to be deterministic, which the check of gradients asks for; the
    # second keeps one scheme's freed memory usable for the next.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    options = parse(arguments)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    note = CPU_ONLY if options.device == "cpu" else None
    facts = {"note": note, "rounds": options.rounds, "budget_bytes": options.budget_bytes, "cases": []}
    report = harness.Report(options, **facts)
    print(note or "")
    for hidden, tokens in itertools.product(options.hidden, options.tokens):
        heads = options.heads or max(1, hidden // (32 if options.device == "cpu" else 128))
        case = Case(hidden, heads, tokens, options.batch, options.blocks, dtype, device, options.keep_last)
        try:
            results = CaseRun(case, options).measure()
        except GradientsDiffer as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        shown = dataclasses.asdict(case) | {"dtype": options.dtype, "device": options.device}
        row = {"name": case.name, **shown, "block_input_bytes": case.input_bytes, "schemes": results}
        report.result["cases"].append(row)
        report.result["claims"] += claims(case, results)
        report.show(make_table(row))
    report.finish(draw_offload)
    return 0


if __name__ == "__main__":
    sys.exit(main())
