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
import copy
import dataclasses
import gc
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import harness
import torch
from peers.offloaders import SaveOnCpu, SynchronousStack, TorchtuneOffload, Traffic, why_no_torchtune
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from opensora_accel.checkpoint import GLOBAL_ACTIVATION_MANAGER as MANAGER
from opensora_accel.checkpoint import checkpoint_blocks
from opensora_accel.offload import Queue
from opensora_accel.profiler import LiveBytes

PROGRAM = "python tools/bench/offload.py"
CPU_ONLY = "accounting only: on a CPU host and device memory are one, so step times say nothing about hiding"
REFERENCE, OFFLOADED, AUTOMATIC = "full", "full+offload", "full+auto"
PEERS = ("save_on_cpu", "synchronous stack", "torchtune")
NAMES = ("none", REFERENCE, OFFLOADED, AUTOMATIC, "selective", "selective+offload", *PEERS)
VERIFIED_SHARE = 0.98
"""Of the extrapolated length, at which it is run."""
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

Forward = Callable[[Tensor, Tensor], Tensor]
"""All blocks: hidden [B, S, C], timestep embedding [B, C] → hidden [B, S, C]."""

# ---- the step that every scheme runs


@dataclass(frozen=True)
class Case:
    """The sizes of one stack of blocks."""

    hidden: int
    heads: int
    tokens: int
    batch: int
    blocks: int
    dtype: torch.dtype
    device: torch.device
    keep_last: int

    @property
    def name(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"hidden {self.hidden}, {self.tokens} tokens, {self.blocks} blocks, batch {self.batch}, {dtype}"
        )

    @property
    def input_bytes(self) -> int:
        """Of one block's input, and of what its attention puts out."""
        return self.batch * self.tokens * self.hidden * self.dtype.itemsize

    @property
    def log_sum_exp_bytes(self) -> int:
        return self.batch * self.tokens * self.heads * torch.float32.itemsize


class Block(nn.Module):
    """Attention and MLP, each scaled, shifted and gated from the timestep (adaLN)."""

    def __init__(self, case: Case):
        super().__init__()
        self.heads, width = case.heads, case.hidden
        self.modulation, self.qkv = nn.Linear(width, 6 * width), nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor, timestep: Tensor) -> Tensor:
        """hidden [B, S, C], timestep [B, C] → [B, S, C]."""
        shift, scale, gate, *mlp = self.modulation(functional.silu(timestep)).unsqueeze(1).chunk(6, dim=-1)
        normed = functional.layer_norm(hidden, hidden.shape[-1:])
        qkv = self.qkv(normed * (1 + scale) + shift).unflatten(-1, (3, self.heads, -1))
        # Fused ones only: the plain kernel would keep [S, S].
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
            attended = functional.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4))  # [B, H, S, D]
        hidden = hidden + gate * self.projection(attended.transpose(1, 2).flatten(2))
        normed = functional.layer_norm(hidden, hidden.shape[-1:])
        return hidden + mlp[2] * self.mlp(normed * (1 + mlp[1]) + mlp[0])


class Workload:
    """Weights, data and gradients of one case, which all schemes share, and the step over them."""

    def __init__(self, case: Case):
        self.case = case
        latent_channels = 64  # the stack's own input is as small as a model's, its hidden state is not
        with torch.random.fork_rng(), torch.device(case.device):
            torch.manual_seed(0)
            self.projection = nn.Linear(latent_channels, case.hidden).to(case.dtype)
            self.blocks = nn.ModuleList(Block(case).to(case.dtype) for _ in range(case.blocks))
            self.head = nn.Linear(case.hidden, latent_channels).to(case.dtype)
            shape = (case.batch, case.tokens, latent_channels)
            self.latents = torch.randn(shape, dtype=case.dtype).requires_grad_()
            self.target = torch.randn(shape, dtype=case.dtype)
            self.timestep = torch.randn(case.batch, case.hidden, dtype=case.dtype).requires_grad_()
        self.differentiated = {
            **{f"blocks.{name}": weight for name, weight in self.blocks.named_parameters()},
            **{f"projection.{name}": weight for name, weight in self.projection.named_parameters()},
            **{f"head.{name}": weight for name, weight in self.head.named_parameters()},
            "latents (the input)": self.latents,
            "timestep (the input)": self.timestep,
        }
        # Held before the step, so that what the step adds is activations alone.
        for tensor in self.differentiated.values():
            tensor.grad = torch.zeros_like(tensor)
        self.gradients = {name: tensor.grad for name, tensor in self.differentiated.items()}

    def twin_blocks(self) -> list[nn.Module]:
        """Modules of a scheme's own, which it may wrap, on the shared weights."""
        return list(copy.deepcopy(self.blocks, {id(weight): weight for weight in self.blocks.parameters()}))

    def held(self) -> list[Tensor]:
        """What lies on the device between steps."""
        return [*self.differentiated.values(), *self.gradients.values(), self.target]

    def step(self, forward: Forward, after_forward: Callable[[], None] = lambda: None) -> None:
        """One training step without the optimizer's part."""
        for gradient in self.gradients.values():
            gradient.zero_()
        # No local name for the hidden state: it would keep the first block's input alive.
        output = self.head(forward(self.projection(self.latents), self.timestep))
        loss = functional.mse_loss(output, self.target)
        del output
        after_forward()
        loss.backward()


# ---- the schemes: ours in every setting, and the peers


@dataclass
class Scheme:
    """One way to run the blocks of a case."""

    name: str
    forward: Forward
    blocks: Sequence[nn.Module]
    each_bytes: int = 0
    """What a block that moves has to copy out in one step, or keeps where it stays."""
    moved: int | None = 0
    """Blocks that move; None where the engine decides."""
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

    def theory_bytes(self) -> int:
        moved = self.moved
        if moved is None:
            moved = MANAGER.decisions[-1].moved if MANAGER.decisions else len(self.blocks) - 1
        return moved * self.each_bytes


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
        each, moved = case.input_bytes, case.blocks
        return Scheme(name, forward, blocks, each, moved, traffic=traffic, host_memory=host_memory)

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
    return Scheme(name, in_turn, blocks, each, moved, uses_arena=offload != 0.0)


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


# ---- what ran when: start and end in milliseconds on three queues

Interval = tuple[float, float]


def merge(intervals: Iterable[Interval], gap_ms: float = 0.0) -> list[Interval]:
    """The same time as intervals that neither overlap nor lie closer together than `gap_ms`, in order."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1] + gap_ms:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def subtract(intervals: Iterable[Interval], taken: Iterable[Interval]) -> list[Interval]:
    """The time of the first that lies outside of the second."""
    left = merge(intervals)
    for start, end in merge(taken):
        pieces = [piece for a, b in left for piece in ((a, min(b, start)), (max(a, end), b))]
        left = [(a, b) for a, b in pieces if a < b]
    return left


def hidden_share(compute: Sequence[Interval], *copies: Sequence[Interval]) -> float | None:
    """Of the time that copies took in each direction, how much lay beside compute; None without copies."""

    def length_ms(intervals: Iterable[Interval]) -> float:
        return sum(end - start for start, end in intervals)

    total_ms = sum(length_ms(merge(each)) for each in copies)
    return 1 - sum(length_ms(subtract(each, compute)) for each in copies) / total_ms if total_ms else None


def split_by_queue(events: Iterable[Any]) -> dict[str, list[Interval]]:
    """From the events of a profiler, in microseconds: kernels compute, as do copies within the device."""
    found: dict[str, list[Interval]] = {"compute": [], "out": [], "in": []}
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA and not getattr(
            event, "is_user_annotation", False
        ):
            key = "out" if "Memcpy DtoH" in event.name else "in" if "Memcpy HtoD" in event.name else "compute"
            found[key].append((event.time_range.start / 1000, event.time_range.end / 1000))
    return found


def record_on_host(scheme: Scheme, workload: Workload) -> tuple[dict[str, list[Interval]], list[str]]:
    """The same of one step of our engine on a CPU, where copies make compute wait; and the block of each interval."""
    found: dict[str, list[Interval]] = {"compute": [], "out": [], "in": []}
    marks: list[tuple[float, str]] = []  # when something else began to compute, and what
    queues = MANAGER.queues(workload.case.device)
    copy_now = queues.copy

    def now_ms() -> float:
        return time.perf_counter() * 1000

    def mark(label: str) -> Callable[..., None]:
        return lambda *unused: marks.append((now_ms(), label))

    def recorded(which: Queue, destination: Tensor, source: Tensor) -> None:
        start = now_ms()
        copy_now(which, destination, source)
        found["out" if which is Queue.OUT else "in"].append((start, now_ms()))

    def watch(block: nn.Module, index: int) -> list[Any]:
        def begin(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            mark(f"forward {index}")()
            if index == 0:
                args[0].register_hook(mark(""))

        def end(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            mark("")()
            output.register_hook(mark(f"backward {index}"))

        return [block.register_forward_pre_hook(begin), block.register_forward_hook(end)]

    handles = [handle for index, block in enumerate(scheme.blocks) for handle in watch(block, index)]
    queues.copy = recorded  # type: ignore[method-assign]
    try:
        scheme.run(workload)
    finally:
        mark("")()
        del queues.copy  # the class's own again
        for handle in handles:
            handle.remove()
    labels = []
    for (start, label), (end, _) in pairwise(marks):
        pieces = subtract([(start, end)], [*found["out"], *found["in"]]) if label else []
        found["compute"] += pieces
        labels += [label] * len(pieces)
    return found, labels


def queues_to_draw(found: Mapping[str, Sequence[Interval]], labels: list[str]) -> dict[str, Any]:
    """From the step's start; what a picture could not tell apart is joined."""
    bounds = [bound for intervals in found.values() for interval in intervals for bound in interval] or [0.0]
    gap_ms = (max(bounds) - min(bounds)) / 2000
    shown: dict[str, Any] = {"labels": labels}
    for key, intervals in found.items():
        kept = intervals if labels else merge(intervals, gap_ms if key == "compute" else 0.0)
        shown[f"{key}_ms"] = [[round(a - min(bounds), 4), round(b - min(bounds), 4)] for a, b in kept]
    return shown


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
        schemes = {
            name: make_scheme(name, workload) for name in names if name != "torchtune" or reason is None
        }
        for name in names:
            measured = {"status": "measured", "reason": "", "gradients_equal": True}
            self.results[name] = measured if name in schemes else {"status": "skipped", "reason": reason}
        set_up_arena(self.case)
        expected: dict[str, Tensor] = {}
        for name in sorted(schemes, key=lambda name: name != REFERENCE):
            self.note("gradients", name)
            self._attempt(name, lambda name=name: self._check(workload, schemes[name], expected))
        if AUTOMATIC in schemes:
            # It measures a pass after an optimizer's first step, which nothing here would make, and then decides.
            set_up_arena(self.case)  # the slots of the others would count
            free(self.case.device)
            torch.optim.SGD([torch.zeros(1)]).step()
            for _ in range(2):  # the gradient check was the first pass
                self._attempt(AUTOMATIC, lambda: schemes[AUTOMATIC].run(workload))
        self._time(workload, schemes)
        for name, scheme in schemes.items():
            self.note("memory", name)
            self._attempt(name, lambda scheme=scheme: self._look_inside(workload, scheme))

    def _attempt(self, name: str, run: Callable[[], Any]) -> Any:
        """What `run` returns. A scheme for which the device is too small is out of the case from here on."""
        if self.results[name]["status"] != "measured":
            return None
        try:
            return run()
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
            return self._attempt(
                scheme.name, lambda: harness.time_ms(lambda: scheme.run(workload), self.case.device)
            )

        turns = {name: lambda scheme=scheme: turn(scheme) for name, scheme in schemes.items()}
        times = harness.take_turns(turns, self.options.rounds, self.note)
        for name, values in times.items():
            if self.results[name]["status"] == "measured":
                step_ms, reference = harness.spread(values), times[REFERENCE]
                self.results[name] |= {
                    "step_time_ms": step_ms,
                    "tokens_per_s": self.case.batch * self.case.tokens / step_ms["median"] * 1000,
                    "step_time_ratio": harness.ratios(values, reference)["median"]
                    if len(reference) > 1
                    else None,
                }

    def _look_inside(self, workload: Workload, scheme: Scheme) -> None:
        result, device = self.results[scheme.name], self.case.device
        result |= measure_memory(workload, scheme, with_timeline=self.options.picture is not None)
        result["theory_bytes"] = scheme.theory_bytes()
        if scheme.moved is not None and scheme.each_bytes:
            result["kept_bytes"] = (self.case.blocks - scheme.moved) * scheme.each_bytes
        result["copy_time_hidden_share"] = result["decision"] = None
        if scheme.name == AUTOMATIC:
            decisions = MANAGER.decisions
            none = "no pass was measured to its end, so all blocks move"
            result["decision"] = decisions[-1].reason if decisions else none
        if device.type == "cuda":
            activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=activities) as profile:
                scheme.run(workload)
                torch.cuda.synchronize(device)
            found, labels = split_by_queue(profile.events()), list[str]()
            result["copy_time_hidden_share"] = hidden_share(found["compute"], found["out"], found["in"])
        elif scheme.name == OFFLOADED:
            found, labels = record_on_host(scheme, workload)
        if scheme.name == OFFLOADED:
            result["queues"] = queues_to_draw(found, labels)

    def _extrapolate(self) -> None:
        """The longest sequence by a second point of the line; not of "auto", which decides anew for every length."""
        for name, result in self.results.items():
            keys = ("longest_tokens_extrapolated", "longest_verified", "longest_verified_total_bytes")
            result |= dict.fromkeys(keys, None)
            if "peak_bytes" in result and name != AUTOMATIC:
                self.note("memory at half the length", name)
                self._attempt(name, lambda name=name, result=result: self._extrapolate_one(name, result))

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

    ratio, hidden = (
        ours.get(key) if on_device else None for key in ("step_time_ratio", "copy_time_hidden_share")
    )
    found = [
        harness.make_claim(f"step time of {OFFLOADED} over that of {REFERENCE}", ratio, "at most", 1.02),
        harness.make_claim(
            f"share of copy time that {OFFLOADED} hides behind compute", hidden, "at least", 0.95
        ),
    ]
    for name in (name for name in (OFFLOADED, "selective+offload") if "peak_bytes" in results.get(name, {})):
        mine, alone = results[name], results.get(name.partition("+")[0], {})
        moved = over(min(mine["out_bytes"], mine["in_bytes"]), mine["theory_bytes"])
        limits = ("at least", 0.99) if on_device else ("1, to within", 0.01)
        found.append(harness.make_claim(f"bytes that {name} moves each way, over theory", moved, *limits))
        kept = None
        if "peak_bytes" in alone:
            # What lies on the device beside the blocks' boundaries (the loss's own, say) is the same without offload.
            others = alone["resident_bytes"] - alone["kept_bytes"]
            kept = over(mine["resident_bytes"] - others, mine["slot_bytes"] + mine["kept_bytes"])
        what = f"bytes that {name} keeps for the blocks after the forward, over two slots and the blocks that stay"
        found.append(harness.make_claim(what, kept, "1, to within", 0.01))
    for name in (name for name in PEERS if name in results):
        peer = results[name]
        times = [side["step_time_ms"]["median"] if "step_time_ms" in side else None for side in (peer, ours)]
        value = over(*times) if on_device else None
        found.append(harness.make_claim(f"step time of {name} over that of {OFFLOADED}", value, "above", 1.0))
        value = over(peer.get("peak_bytes"), ours.get("peak_bytes"))
        found.append(harness.make_claim(f"peak of {name} over that of {OFFLOADED}", value, "above", 1.0))
    return [{"case": case.name, **claim} for claim in found]


def make_table(case: Mapping[str, Any]) -> harness.Table:
    header = [
        "scheme",
        "step ms [quartiles]",
        "tokens/s",
        "vs full",
        "resident",
        "peak",
        "slots",
        "out",
        "in",
        "theory",
    ]
    header += ["hidden", "longest"]
    lines = []
    for name, row in case["schemes"].items():
        if "peak_bytes" not in row:
            lines.append([name, ": ".join(filter(None, (row["status"], row["reason"]))), *[""] * 10])
            continue
        sizes = [row[f"{key}_bytes"] / 2**20 for key in ("resident", "peak", "slot", "out", "in", "theory")]
        ratio, hidden, longest = (
            row[k] for k in ("step_time_ratio", "copy_time_hidden_share", "longest_tokens_extrapolated")
        )
        verified = {True: " ok", False: " NO", None: ""}[row["longest_verified"]]
        cells = [name, harness.show_spread(row["step_time_ms"], 1), f"{row['tokens_per_s']:.0f}"]
        cells += ["–" if ratio is None else f"{ratio:.3f}", *(f"{size:.2f}" for size in sizes)]
        cells += [
            "–" if hidden is None else f"{hidden:.1%}",
            "–" if longest is None else f"{longest}{verified}",
        ]
        lines.append(cells)
    title = f"{case['name']} (one block input: {case['block_input_bytes'] / 2**20:.2f} MiB; sizes in MiB)"
    notes = [f"{name}: {row['decision']}" for name, row in case["schemes"].items() if row.get("decision")]
    return harness.Table(title, header, lines, notes)


PANELS = (
    ("none", "no checkpointing", harness.GREY),
    (REFERENCE, "checkpointing", harness.ORANGE),
    (OFFLOADED, "checkpointing\n+ our offload", harness.BLUE),
    ("selective+offload", "attention kept too\n+ our offload", harness.PURPLE),
    ("save_on_cpu", "checkpointing\n+ save_on_cpu", harness.GREEN),
)


def draw(result: dict[str, Any], path: Path) -> None:
    """Memory over the step for each scheme of the last case, and what ran when on the three queues."""
    case = result["cases"][-1]
    schemes, on_cpu = case["schemes"], case["device"] == "cpu"
    panels = [panel for panel in PANELS if "timeline" in schemes.get(panel[0], {})]
    scale, unit = (
        (2**30, "GiB") if max(schemes[p[0]]["peak_bytes"] for p in panels) >= 2**30 else (2**20, "MiB")
    )
    peaks = [schemes[name]["peak_bytes"] / scale for name, *_ in panels if name != "none" or len(panels) == 1]
    with harness.drawing(path, 10, 7.4) as figure:
        grid = figure.add_gridspec(
            2, len(panels), height_ratios=[1.35, 1], left=0.085, right=0.985, top=0.79, bottom=0.1, hspace=0.5
        )
        ours, alone = (schemes.get(name, {}).get("resident_bytes", 0) for name in (OFFLOADED, REFERENCE))
        title = (
            f"Offload frees {1 - ours / alone:.0%} of what checkpointing keeps"
            if ours and alone
            else "Memory"
        )
        figure.text(0.02, 0.955, title, fontsize=15, weight="bold")
        where = (
            result["hardware"].get("gpu")
            or f"{result['hardware']['cpu']} (accounting only: copies cannot hide)"
        )
        figure.text(0.02, 0.9, f"One training step of a stack of DiT blocks on {where}\n{case['name']}")
        for column, (name, title, colour) in enumerate(panels):
            axes, scheme = figure.add_subplot(grid[0, column]), schemes[name]
            halves = [
                [size / scale for size in scheme["timeline"][f"{half}_bytes"]]
                for half in ("forward", "backward")
            ]
            places = [start + at / len(half) for start, half in enumerate(halves) for at in range(len(half))]
            axes.fill_between(places, halves[0] + halves[1], color=colour, alpha=0.4)
            axes.axvline(1, color="black", linewidth=0.8)
            axes.axhline(alone / scale, color=harness.ORANGE, linewidth=1, linestyle="--")
            # Without checkpointing leaves the picture.
            axes.set(xlim=(0, 2), ylim=(0, 1.45 * max(peaks)))
            axes.set_xticks([0.5, 1.5], ["forward", "backward"])
            figures = [f"{scheme[f'{key}_bytes'] / scale:.2f}" for key in ("peak", "resident")]
            axes.set_title(title, fontsize=10.5, color=colour)
            axes.text(
                1,
                1.43 * max(peaks),
                f"peak {figures[0]} {unit}\nafter forward {figures[1]}",
                ha="center",
                va="top",
            )
        note = "the step's operations, in order; dashed: what checkpointing alone keeps after the forward"
        figure.text(0.53, 0.43, note, ha="center")
        if "queues" in schemes.get(OFFLOADED, {}):
            how = (
                "on a CPU they do not overlap"
                if on_cpu
                else f"{schemes[OFFLOADED]['copy_time_hidden_share']:.1%} hidden"
            )
            _draw_queues(figure.add_subplot(grid[1, :]), schemes[OFFLOADED]["queues"], how)


def _draw_queues(axes: Any, queues: Mapping[str, Any], how: str) -> None:
    rows = (("compute", harness.BLUE), ("out", harness.GREEN), ("in", harness.PURPLE))
    end = max((stop for key, _ in rows for _, stop in queues[f"{key}_ms"]), default=1.0)
    for row, (key, colour) in enumerate(rows):
        # A copy is drawn wide enough to be seen.
        bars = [(start, max(stop - start, 0.0025 * end)) for start, stop in queues[f"{key}_ms"]]
        axes.broken_barh(bars, (2 - row - 0.32, 0.64), facecolors=colour, edgecolors="white", linewidth=0.4)
    last = ""
    for (start, _), label in zip(queues["compute_ms"], queues["labels"], strict=False):
        if label != last:
            axes.text(start, 2.4, label.replace("forward ", "").replace("backward ", "−"), fontsize=8)
        last = label
    axes.set_yticks([2, 1, 0], ["compute", "copies out\n(to host)", "copies in\n(to device)"])
    axes.set_xlabel("time in the step (ms)")
    axes.set_title(
        f"our offload: blocks in forward, and (−) in backward; copies: {how}", loc="left", fontsize=10.5
    )


# ---- the command


def parse(given: Sequence[str]) -> argparse.Namespace:
    """The options, with what was left out filled in for the device. Exits on what cannot be."""
    parser = harness.make_parser(PROGRAM, __doc__, EXAMPLES, rounds=7)
    add = parser.add_argument
    add("--hidden", type=int, nargs="+", help="channels; several make several cases (128; 3072 5120 on CUDA)")
    add("--tokens", type=int, nargs="+", help="length of the sequence (512; 30000 75000 on CUDA)")
    add("--blocks", type=int, help="default: 6; 8 on CUDA")
    add("--heads", type=int, help="default: heads of 128 channels on CUDA, of 32 on a CPU")
    add("--batch", type=int, default=1, help="default: 1")
    add("--dtype", choices=("float32", "bfloat16"), help="default: float32; bfloat16 on CUDA")
    add("--keep-last", type=int, default=1, help="last blocks that ours never moves (default: 1)")
    add("--budget-gib", type=float, help="device memory to fill (1; 90 %% of the device on CUDA)")
    add("--verify-longest", action="store_true", help="run the extrapolated lengths too, which takes long")
    options = parser.parse_args(given)
    on_cuda = options.device == "cuda"
    defaults: dict[str, Any] = {"hidden": [128], "tokens": [512], "blocks": 6, "dtype": "float32"}
    if on_cuda:
        defaults = {"hidden": [3072, 5120], "tokens": [30_000, 75_000], "blocks": 8, "dtype": "bfloat16"}
    if options.quick:
        options.rounds = 2
        defaults |= {"hidden": [32], "tokens": [40], "blocks": 4}
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    for name in ("hidden", "tokens", "blocks", "batch", "heads"):
        value = getattr(options, name)
        for number in value if isinstance(value, list) else [value]:
            if number is not None and number < 1:
                parser.error(f"--{name} must be at least 1; got {number}")
    if options.keep_last < 0 or (options.budget_gib or 1) <= 0:
        parser.error(
            f"--keep-last is a number of blocks, at least 0; got {options.keep_last}. --budget-gib is above 0; got "
            f"{options.budget_gib}"
        )
    if options.heads and any(hidden % options.heads for hidden in options.hidden):
        parser.error(
            f"--hidden {options.hidden} must be divisible by --heads ({options.heads}); leave --heads out"
        )
    if not any(options.only in name for name in NAMES):
        parser.error(f"--only {options.only!r} is in no scheme's name; they are {', '.join(NAMES)}")
    harness.check_options(parser, options)
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
        report.save(draw)
    report.show_claims()
    return 0


if __name__ == "__main__":
    sys.exit(main())
