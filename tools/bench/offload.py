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
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import harness
import torch
from dit_step import Case, Forward, Workload
from harness import make_claim
from peers.offloaders import SaveOnCpu, SynchronousStack, TorchtuneOffload, Traffic, why_no_torchtune
from pictures import draw_offload
from queues import hidden_share, queues_to_draw, record_on_host, split_by_queue
from torch import Tensor, nn

from opensora_accel.checkpoint import GLOBAL_ACTIVATION_MANAGER as MANAGER
from opensora_accel.checkpoint import checkpoint_blocks
from opensora_accel.profiler import LiveBytes

PROGRAM = "python tools/bench/offload.py"
CPU_ONLY = "accounting only: on a CPU host and device memory are one, so step times say nothing about hiding"
REFERENCE, OFFLOADED, AUTOMATIC = "full", "full+offload", "full+auto"
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

# ---- the schemes: ours in every setting, and the peers


@dataclass
class Scheme:
    """One way to run the blocks of a case."""

    name: str
    forward: Forward
    blocks: Sequence[nn.Module]
    # What a block that moves has to copy out in one step, or keeps where it stays.
    each_bytes: int = 0
    # Blocks that move; None where the engine decides.
    moved: int | None = 0
    # The first of the engine's decisions that can be about this scheme.
    first_decision: int = 0
    uses_arena: bool = False
    traffic: Traffic = field(default_factory=Traffic)
    host_memory: Sequence[Tensor] = ()

    def run(self, workload: Workload, after_forward: Callable[[], None] = lambda: None) -> None:
        MANAGER.enable = self.uses_arena
        MANAGER.reset_counters()
        self.traffic.out_bytes = self.traffic.in_bytes = 0
        workload.step(self.forward, after_forward)

    def moved_bytes(self) -> dict[str, int]:
        """In the last run."""
        if self.uses_arena:
            counters = MANAGER.counters
            return {"out_bytes": counters.moved_bytes, "in_bytes": counters.fetched_bytes}
        return {"out_bytes": self.traffic.out_bytes, "in_bytes": self.traffic.in_bytes}

    def decision(self) -> Any:
        """The engine's last one about this scheme; None where it made none."""
        made = MANAGER.decisions[self.first_decision :]
        return made[-1] if made else None

    def theory_bytes(self) -> int:
        if self.moved is not None:
            return self.moved * self.each_bytes
        decision = self.decision()
        return self.each_bytes * (len(self.blocks) - 1 if decision is None else decision.moved)


def chosen_names(only: str) -> list[str]:
    return [name for name in NAMES if only in name or name == REFERENCE]


def make_scheme(name: str, workload: Workload) -> Scheme:
    case, blocks, traffic = workload.case, workload.twin_blocks(), Traffic()
    if name in PEERS:
        host_memory: list[Tensor] = []
        if name == "synchronous stack":
            stack = SynchronousStack(
                blocks, traffic, case.blocks * case.input_bytes // case.dtype.itemsize, case.dtype
            )
            forward: Forward = stack
            host_memory = [stack.buffer]
        else:
            forward = (SaveOnCpu if name == "save_on_cpu" else TorchtuneOffload)(blocks, traffic)
        sizes: dict[str, Any] = {"each_bytes": case.input_bytes, "moved": case.blocks}
        return Scheme(name, forward, blocks, **sizes, traffic=traffic, host_memory=host_memory)

    def in_turn(hidden: Tensor, timestep: Tensor) -> Tensor:
        for block in blocks:
            hidden = block(hidden, timestep)
        return hidden

    if name == "none":
        return Scheme(name, in_turn, blocks)
    mode, _, setting = name.partition("+")
    offload: Any = {"": 0.0, "offload": 1.0, "auto": "auto"}[setting]
    checkpoint_blocks(blocks, mode, offload, keep_last=case.keep_last)  # type: ignore[arg-type]
    each = case.input_bytes
    if mode == "selective":
        each += case.input_bytes + case.log_sum_exp_bytes
    moved = {"": 0, "offload": max(0, case.blocks - case.keep_last)}.get(setting)
    first_decision = len(MANAGER.decisions)
    return Scheme(name, in_turn, blocks, each, moved, first_decision, uses_arena=offload != 0.0)


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
        try:
            yield
        finally:
            self._is_paused = False

    def _count(self, storage: torch.UntypedStorage) -> None:
        if not self._is_paused and storage.device.type == self._device.type:
            super()._count(storage)


def measure_memory(workload: Workload, scheme: Scheme, *, with_timeline: bool = False) -> dict[str, Any]:
    """Bytes on the device above the baseline, in a step after one that has settled the scheme."""
    device = workload.case.device
    if scheme.uses_arena:
        set_up_arena(workload.case)
    else:
        MANAGER.close()
    if device.type != "cuda":
        return _count_step(workload, scheme)
    # By CUDA's allocator, which rounds up and knows what operations take within.
    scheme.run(workload)
    gc.collect()
    torch.cuda.synchronize(device)
    baseline_bytes = torch.cuda.memory_allocated(device) - MANAGER.slot_bytes
    torch.cuda.reset_peak_memory_stats(device)
    resident: list[int] = []
    scheme.run(workload, lambda: resident.append(torch.cuda.memory_allocated(device)))
    torch.cuda.synchronize(device)
    found = {
        "baseline_bytes": baseline_bytes,
        "resident_bytes": resident[0] - baseline_bytes,
        "peak_bytes": torch.cuda.max_memory_allocated(device) - baseline_bytes,
        "slot_bytes": MANAGER.slot_bytes,
        **scheme.moved_bytes(),
    }
    return found | ({"timeline": _count_step(workload, scheme)["timeline"]} if with_timeline else {})


def _count_step(workload: Workload, scheme: Scheme) -> dict[str, Any]:
    """By counting storages: exact bytes, and one value for each operation."""
    live, at_turn = StepMemory(workload.case.device), list[int]()
    arena = MANAGER.arena
    for tensor in [*workload.held(), *scheme.host_memory, *(arena.memory if arena is not None else ())]:
        live.ignore(tensor)
    scheme.traffic.on_host = live.on_host
    try:
        with live:
            scheme.run(workload)  # the slots are made here, and so counted
            gc.collect()
            live.peak_bytes = live.now_bytes
            live.timeline.clear()
            scheme.run(workload, lambda: at_turn.extend((live.now_bytes, len(live.timeline))))
    finally:
        scheme.traffic.on_host = contextlib.nullcontext
    resident_bytes, turn = at_turn
    return {
        "baseline_bytes": sum(tensor.nbytes for tensor in workload.held()),
        "resident_bytes": resident_bytes,
        "peak_bytes": live.peak_bytes,
        "slot_bytes": MANAGER.slot_bytes,
        **scheme.moved_bytes(),
        "timeline": {
            "forward_bytes": thin(live.timeline[:turn]),
            "backward_bytes": thin(live.timeline[turn:]),
        },
    }


def thin(values: Sequence[int], most: int = 240) -> list[int]:
    """Few enough to draw: the greatest of each stretch, so that no peak is lost."""
    num = min(most, len(values))
    bounds = [len(values) * index // num for index in range(num + 1)] if num else [0]
    return [max(values[start:end]) for start, end in pairwise(bounds)]


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

    def __init__(self, case: Case, options: argparse.Namespace, note: harness.Note) -> None:
        self.case, self.options, self.note = case, options, note
        self.results: dict[str, dict[str, Any]] = {}

    def measure(self) -> dict[str, dict[str, Any]]:
        """Gradients, then times in turns, then memory and queues; what runs out of memory says so, the others go on."""
        MANAGER.memory_target_bytes = self.options.budget_bytes
        names = chosen_names(self.options.only)
        try:
            try:
                self._full_length(names)
            except torch.OutOfMemoryError:  # outside of any scheme: the weights alone
                self.results = {name: {"status": "out of memory", "reason": ""} for name in names}
            free(self.case.device)
            self._extrapolate()
        finally:
            MANAGER.close()
            MANAGER.memory_target_bytes = None
            free(self.case.device)
        return self.results

    def _full_length(self, names: Sequence[str]) -> None:
        workload, reason = Workload(self.case), why_no_torchtune(self.case.device)
        usable = [name for name in names if name != "torchtune" or reason is None]
        schemes = {name: make_scheme(name, workload) for name in usable}
        for name in names:
            measured = {"status": "measured", "reason": "", "gradients_equal": True}
            self.results[name] = measured if name in schemes else {"status": "skipped", "reason": reason}
        set_up_arena(self.case)
        expected: dict[str, Tensor] = {}
        for name in sorted(schemes, key=lambda name: name != REFERENCE):
            self.note("gradients", name)
            self._attempt(name, self._check, workload, schemes[name], expected)
        if AUTOMATIC in schemes:
            # It measures a pass after an optimizer's first step, which nothing here would make, and then decides.
            set_up_arena(self.case)  # the slots of the others would count
            free(self.case.device)
            torch.optim.SGD([torch.zeros(1)]).step()
            for _ in range(2):  # the gradient check was the first pass
                self._attempt(AUTOMATIC, schemes[AUTOMATIC].run, workload)
        self._time(workload, schemes)
        for name, scheme in schemes.items():
            self.note("memory", name)
            self._attempt(name, self._look_inside, workload, scheme)

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

    def _check(self, workload: Workload, scheme: Scheme, expected: dict[str, Tensor]) -> None:
        """Every scheme's gradients are the reference's, which comes first, bit for bit."""
        before = torch.are_deterministic_algorithms_enabled()
        # CUDA's flash attention adds up its gradients in any order otherwise.
        torch.use_deterministic_algorithms(before or self.case.device.type == "cuda")
        try:
            scheme.run(workload)
        finally:
            torch.use_deterministic_algorithms(before)
        found = {name: gradient.to("cpu", copy=True) for name, gradient in workload.gradients.items()}
        expected.update({} if expected else found)
        differing = {name: g for name, g in found.items() if not torch.equal(g, expected[name])}
        if differing:
            # A NaN is worse than any number.
            sizes = {
                name: float((g.double() - expected[name].double()).abs().max())
                for name, g in differing.items()
            }
            worst = max(sizes, key=lambda name: float("inf") if sizes[name] != sizes[name] else sizes[name])
            raise GradientsDiffer(
                f"{scheme.name}: {len(differing)} of {len(expected)} gradients are not those of {REFERENCE} bit for "
                f"bit; the largest difference is {sizes[worst]:g}, in {worst}. Nothing was measured: a scheme that "
                "computes something else has no step time to compare"
            )

    def _time(self, workload: Workload, schemes: Mapping[str, Scheme]) -> None:
        def turn(scheme: Scheme) -> Any:
            step = partial(scheme.run, workload)
            return self._attempt(scheme.name, harness.time_ms, step, self.case.device)

        turns = {name: lambda scheme=scheme: turn(scheme) for name, scheme in schemes.items()}
        times = harness.take_turns(turns, self.options.rounds, self.note)
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

    def _look_inside(self, workload: Workload, scheme: Scheme) -> None:
        result, device = self.results[scheme.name], self.case.device
        result |= measure_memory(workload, scheme, with_timeline=self.options.picture is not None)
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
                scheme.run(workload)
                torch.cuda.synchronize(device)
            found, labels = split_by_queue(profile.events()), list[str]()
            result["copy_time_hidden_share"] = hidden_share(found["compute"], found["out"], found["in"])
        elif scheme.name == OFFLOADED:
            found, labels = record_on_host(scheme.blocks, device, lambda: scheme.run(workload))
        if scheme.name == OFFLOADED:
            result["queues"] = queues_to_draw(found, labels)

    def _extrapolate(self) -> None:
        """The longest sequence by a second point of the line; not of "auto", which decides anew for every length."""
        for name, result in self.results.items():
            keys = ("longest_tokens_extrapolated", "longest_verified", "longest_verified_total_bytes")
            result |= dict.fromkeys(keys, None)
            if "peak_bytes" in result and name != AUTOMATIC:
                self.note("memory at half the length", name)
                self._attempt(name, self._extrapolate_one, name, result)

    def _extrapolate_one(self, name: str, result: dict[str, Any]) -> None:
        half, budget_bytes = max(1, self.case.tokens // 2), self.options.budget_bytes
        totals = (self._total_bytes(name, half), result["baseline_bytes"] + result["peak_bytes"])
        longest = longest_tokens((half, self.case.tokens), totals, budget_bytes)
        result["longest_tokens_extrapolated"] = longest
        tokens = int((longest or 0) * VERIFIED_SHARE)
        if self.options.verify_longest and tokens:
            self.note("verifying", f"{name}: {tokens} tokens")
            result["longest_verified"] = False
            with contextlib.suppress(torch.OutOfMemoryError):
                result["longest_verified_total_bytes"] = self._total_bytes(name, tokens)
                result["longest_verified"] = result["longest_verified_total_bytes"] <= budget_bytes
            free(self.case.device)

    def _total_bytes(self, name: str, tokens: int) -> int:
        workload = Workload(dataclasses.replace(self.case, tokens=tokens))
        found = measure_memory(workload, make_scheme(name, workload))
        return int(found["baseline_bytes"] + found["peak_bytes"])


# ---- claims, table, picture


def claims(case: Case, results: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What one case says of each claim; time is not measured on a CPU."""
    on_device = case.device.type == "cuda"
    ours = results.get(OFFLOADED, {})

    def over(above: float | None, below: float | None) -> float | None:
        return None if above is None or not below else above / below

    timed = ours if on_device else {}
    ratio, hidden = timed.get("step_time_ratio"), timed.get("copy_time_hidden_share")
    what = f"share of copy time that {OFFLOADED} hides behind compute"
    found = [
        make_claim(f"step time of {OFFLOADED} over that of {REFERENCE}", ratio, "at most", 1.02),
        make_claim(what, hidden, "at least", 0.95),
    ]
    for name in (name for name in (OFFLOADED, "selective+offload") if "peak_bytes" in results.get(name, {})):
        mine, alone = results[name], results.get(name.partition("+")[0], {})
        moved = over(min(mine["out_bytes"], mine["in_bytes"]), mine["theory_bytes"])
        limits = ("at least", 0.99) if on_device else ("1, to within", 0.01)
        found.append(make_claim(f"bytes that {name} moves each way, over theory", moved, *limits))
        kept = None
        if "peak_bytes" in alone:
            # What lies on the device beside the blocks' boundaries (the loss's own, say) is the same without offload.
            others = alone["resident_bytes"] - alone["kept_bytes"]
            kept = over(mine["resident_bytes"] - others, mine["slot_bytes"] + mine["kept_bytes"])
        what = f"bytes that {name} keeps for the blocks after the forward, over two slots and the blocks that stay"
        found.append(make_claim(what, kept, "1, to within", 0.01))
    for name in (name for name in PEERS if name in results):
        peer = results[name]
        times = [side["step_time_ms"]["median"] if "step_time_ms" in side else None for side in (peer, ours)]
        value = over(*times) if on_device else None
        found.append(make_claim(f"step time of {name} over that of {OFFLOADED}", value, "above", 1.0))
        value = over(peer.get("peak_bytes"), ours.get("peak_bytes"))
        found.append(make_claim(f"peak of {name} over that of {OFFLOADED}", value, "above", 1.0))
    return [{"case": case.name, **claim} for claim in found]


COLUMNS = {
    **{"scheme": "scheme", "": "status", "step ms": "step_time_ms", "tokens/s": "tokens_per_s"},
    **{"vs full": "step_time_ratio", "resident": "resident_bytes", "peak": "peak_bytes"},
    **{"slots": "slot_bytes", "out": "out_bytes", "in": "in_bytes", "theory": "theory_bytes"},
    **{
        "hidden": "copy_time_hidden_share",
        "longest": "longest_tokens_extrapolated",
        "ok": "longest_verified",
    },
}


def make_table(case: Mapping[str, Any]) -> harness.Table:
    title = f"{case['name']} (one block input: {case['block_input_bytes'] / 2**20:.2f} MiB; sizes in MiB)"
    schemes = case["schemes"].items()
    notes = {name: row.get("decision") or row["reason"] for name, row in schemes}
    rows = [{"scheme": name, **row} for name, row in schemes]
    return harness.Table.of(title, COLUMNS, rows, [f"{name}: {note}" for name, note in notes.items() if note])


# ---- the command


def parse(given: Sequence[str]) -> argparse.Namespace:
    """The options, with what was left out filled in for the device. Exits on what cannot be."""
    parser = harness.make_parser(PROGRAM, __doc__, EXAMPLES, rounds=7)
    add = parser.add_argument
    positive = harness.positive
    add("--hidden", type=positive, nargs="+", help="channels; several make several cases (128; 3072 5120)")
    add("--tokens", type=positive, nargs="+", help="length of the sequence (512; 30000 75000 on CUDA)")
    add("--blocks", type=positive, help="default: 6; 8 on CUDA")
    add("--heads", type=positive, help="default: heads of 128 channels on CUDA, of 32 on a CPU")
    add("--batch", type=positive, default=1, help="default: 1")
    add("--dtype", choices=("float32", "bfloat16"), help="default: float32; bfloat16 on CUDA")
    add("--keep-last", type=int, default=1, help="last blocks that ours never moves (default: 1)")
    add("--budget-gib", type=float, help="device memory to fill (1; 90 %% of the device on CUDA)")
    add("--verify-longest", action="store_true", help="run the extrapolated lengths too, which takes long")
    options = parser.parse_args(given)
    on_cuda = harness.choose_device(options)
    defaults: dict[str, Any] = {"hidden": [128], "tokens": [512], "blocks": 6, "dtype": "float32"}
    if on_cuda:
        defaults = {"hidden": [3072, 5120], "tokens": [30_000, 75_000], "blocks": 8, "dtype": "bfloat16"}
    if options.quick:
        options.rounds = 2
        defaults |= {"hidden": [32], "tokens": [40], "blocks": 4}
    harness.check_options(parser, options, defaults)
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
    if on_cuda and options.budget_gib is None:
        options.budget_bytes = int(0.9 * torch.cuda.get_device_properties(0).total_memory)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 1 when a scheme's gradients differ. Claims that do not hold are printed and stored."""
    # Read when CUDA starts. cuBLAS needs the first to be deterministic, which the check of gradients asks for; the
    # second keeps one scheme's freed memory usable for the next.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parse(given)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    note = CPU_ONLY if options.device == "cpu" else None
    facts = {"note": note, "rounds": options.rounds, "budget_bytes": options.budget_bytes, "cases": []}
    report = harness.Report(options, PROGRAM, given, **facts)
    print(note or "")
    for hidden, tokens in ((hidden, tokens) for hidden in options.hidden for tokens in options.tokens):
        heads = options.heads or max(1, hidden // (32 if options.device == "cpu" else 128))
        case = Case(hidden, heads, tokens, options.batch, options.blocks, dtype, device, options.keep_last)
        try:
            with harness.progress(case.name) as tell:
                results = CaseRun(case, options, tell).measure()
        except GradientsDiffer as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        shown = dataclasses.asdict(case) | {"dtype": options.dtype, "device": options.device}
        row = {"name": case.name, **shown, "block_input_bytes": case.input_bytes, "schemes": results}
        report.result["cases"].append(row)
        report.result["claims"] += claims(case, results)
        report.show(make_table(row))
        report.save()
    report.finish(draw_offload)
    return 0


if __name__ == "__main__":
    sys.exit(main())
