"""Searches the longest sequence that a stack of real Wan blocks trains on, under each way to keep activations.

Forward and backward of diffusers' `WanTransformerBlock` with random weights, in the widths of Wan 1.3B. Peaks grow in a
straight line with the length. So for each of none, selective, full and full+offload two lengths are measured, then the
one at which the line through both meets the limit, and then what is left between a length that fits and one that does
not. A part of the device's memory may stand for all of it (`--memory-gib`), because a step takes four times as long for
twice the length. Where the time ends first, the length is one that fits, and the row says so.

Claims: checkpointing fits a longer sequence than none, and offload a longer one than checkpointing; at seven eighths of
the longest sequence that fits both, a step with offload takes at most 1.02 times that of checkpointing alone (on a
GPU); and a settled step with offload asks for no synchronisation of the device (on a GPU, by torch's own watch).

On a CPU memory is counted by storages, without those of the arena, and the limit is a number: the search is tested.

    python tools/bench/longest.py --memory-gib 16 --seconds 120
"""

from __future__ import annotations

import copy
import gc
import os
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import harness
import torch
from harness import Report, make_claim, make_table
from pictures import draw_longest
from torch import nn

from opensora_accel.checkpoint import GLOBAL_ACTIVATION_MANAGER as MANAGER
from opensora_accel.checkpoint import checkpoint_blocks
from opensora_accel.profiler import LimitedBytes

GIB, MOST_TIME = 2**30, 1.02
MODES = ("none", "selective", "full", "full+offload")
# The bisection ends where what fits and what does not differ by less than this share.
CLOSE = 1 / 16
# By so much of itself a step may last longer than the shortest one for no reason.
NOISE = 1 / 5


class Stack:
    """Blocks of Wan on one device, whose weights all modes share."""

    def __init__(self, options: Any):
        from diffusers.models.transformers.transformer_wan import WanTransformerBlock

        self.device, self.options = torch.device(options.device), options
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.width = options.heads * options.head_dim
        torch.manual_seed(0)
        with torch.device(self.device):
            make = partial(WanTransformerBlock, self.width, options.feed_forward, options.heads)
            self.blocks = nn.ModuleList(make(cross_attn_norm=True) for _ in range(options.blocks))
            self.blocks.to(self.dtype)
            self.text = torch.randn(1, options.text_tokens, self.width, dtype=self.dtype)
            self.timestep = torch.randn(1, 6, self.width, dtype=self.dtype)
        for parameter in self.blocks.parameters():
            parameter.grad = torch.zeros_like(parameter)  # held before the step, as an optimizer's are
        self._undo = lambda: None
        self.modules: list[nn.Module] = []

    def set_mode(self, mode: str) -> None:
        """Modules of its own on the shared weights, wrapped for this mode."""
        MANAGER.close()
        self.modules = list(
            copy.deepcopy(self.blocks, {id(weight): weight for weight in self.blocks.parameters()})
        )
        kind: Any = mode.removesuffix("+offload")
        MANAGER.enable = mode.endswith("+offload")
        if mode != "none":
            checkpoint_blocks(self.modules, kind, 1.0 if MANAGER.enable else 0.0)

    def set_length(self, tokens: int) -> None:
        """Host memory for the inputs of all blocks at this length."""
        if MANAGER.enable:
            MANAGER.setup_arena(len(self.modules) * (tokens * self.width * self.dtype.itemsize + 8192))

    def step(self, tokens: int) -> None:
        """Forward and backward of a sequence; hidden [1, S, C]."""
        hidden = torch.randn(1, tokens, self.width, dtype=self.dtype, device=self.device, requires_grad=True)
        angles = torch.randn(1, tokens, 1, self.options.head_dim, device=self.device)
        rotary = angles.cos(), angles.sin()
        del angles
        for block in self.modules:
            hidden = block(hidden, self.text, self.timestep, rotary)
        hidden.sum().backward()

    def peak_bytes(self, tokens: int) -> int:
        """Of a step, with the weights and their gradients.

        Raises:
            torch.OutOfMemoryError: on a CPU, above the limit.
        """
        self.set_length(tokens)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.step(tokens)
            return torch.cuda.max_memory_allocated()
        live = LimitedBytes(self.options.limit_bytes)
        live.count(list(self.blocks.parameters()))
        live.count([parameter.grad for parameter in self.blocks.parameters() if parameter.grad is not None])
        for tensor in MANAGER.arena.memory if MANAGER.arena is not None else ():
            live.ignore(tensor)
        with live:
            self.step(tokens)
        return live.peak_bytes

    def free(self) -> None:
        """After a step that did not end."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def search(stack: Stack, end: float) -> dict[str, Any]:
    """The longest sequence of the stack's mode that fits, and every length tried until `end` (monotonic clock)."""
    unit, tried = stack.options.unit, list[dict[str, Any]]()
    fits, does_not, ended = 0, None, "the next length does not fit"
    tokens = stack.options.start
    while True:
        started, row = time.monotonic(), {"tokens": tokens}
        try:
            row["peak_bytes"] = stack.peak_bytes(tokens)
            fits = tokens
        except torch.OutOfMemoryError:
            does_not = tokens
        stack.free()
        row["seconds"] = took = time.monotonic() - started
        tried.append(row)
        before, tokens = tokens, next_length(tried, fits, does_not, stack.options)
        if does_not is not None and (does_not - max(fits, unit) <= max(unit, CLOSE * fits) or tokens < unit):
            break
        # What a step takes at any length, and the rest four times for twice the length. Where that rest is no more than
        # the noise of short steps it says nothing, and the next length is one at which there is more of it.
        least = min(each["seconds"] for each in tried)
        if took - least < NOISE * took:
            tokens, expected = min(tokens, before * 8), took
        else:
            expected = least + (took - least) * (tokens / before) ** 2
        if time.monotonic() + expected > end:
            ended = "the time ended"
            break
    found: dict[str, Any] = {"tokens": fits or None, "ended": ended, "tried": tried}
    peaks = peaks_of(tried)
    if peaks:
        found["peak_bytes"] = peaks[-1][1]
    if len(peaks) > 1:
        found["per_token_kib"] = bytes_per_token(peaks) / 1024
        # What the whole device would take, were there the time.
        found["extrapolated_tokens"] = length_within(peaks, stack.options.device_bytes)
    return found


def peaks_of(tried: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """Lengths that fit and their peaks, the shortest first."""
    return sorted((row["tokens"], row["peak_bytes"]) for row in tried if "peak_bytes" in row)


def bytes_per_token(peaks: Sequence[tuple[int, int]]) -> float:
    (few, less), (many, more) = peaks[0], peaks[-1]
    return (more - less) / (many - few)


def length_within(peaks: Sequence[tuple[int, int]], limit_bytes: int) -> int:
    """Where the line through the shortest and the longest meets the limit; the longest, if that is behind it."""
    many, more = peaks[-1]
    return int(many + max(0, limit_bytes - more) / bytes_per_token(peaks))


def length_of(found: Mapping[str, Any], options: Any) -> int:
    """The longest that fits; where the time ended first, the one at which the line meets the limit. 0 if none fits."""
    peaks = peaks_of(found.get("tried", ()))
    if "time ended" in found.get("ended", "") and len(peaks) > 1 and bytes_per_token(peaks) > 0:
        return length_within(peaks, options.limit_bytes)
    return found.get("tokens") or 0


def next_length(tried: Sequence[Mapping[str, Any]], fits: int, does_not: int | None, options: Any) -> int:
    """The length to try next, a multiple of the unit; 0 where none is left that could fit."""
    unit, peaks = options.unit, peaks_of(tried)
    if len(peaks) < 2 or bytes_per_token(peaks) <= 0:
        return 2 * fits if does_not is None else (fits + does_not) // 2 // unit * unit
    # Where the line has been followed already, as much further as two lengths may lie apart in the end.
    guess = max(length_within(peaks, options.limit_bytes), fits + max(unit, int(CLOSE * fits))) // unit * unit
    return guess if does_not is None or guess < does_not else (fits + does_not) // 2 // unit * unit


def compare_offload(stack: Stack, tokens: int, seconds: float) -> dict[str, Any]:
    """Steps with and without offload in turn, at this length or at one for which the time is enough."""
    rounds = stack.options.rounds
    stack.set_mode("full")
    while True:
        stack.step(tokens)  # the first one of a length waits for memory
        step_s = harness.time_ms(partial(stack.step, tokens), stack.device) / 1e3
        num_steps = 2 * (harness.WARM_UP_ROUNDS + rounds) + 2
        if step_s * num_steps <= seconds or tokens // 2 < stack.options.unit:
            break
        tokens //= 2
    without = stack.modules
    stack.set_mode("full+offload")
    stack.set_length(tokens)
    sides = {"full": without, "full+offload": stack.modules}

    def turn(side: str) -> float:
        MANAGER.enable, stack.modules = side.endswith("+offload"), sides[side]
        return harness.time_ms(partial(stack.step, tokens), stack.device)

    times = harness.take_turns({side: partial(turn, side) for side in sides}, rounds)
    found = {"tokens": tokens, **{f"{side} ms": harness.spread(values) for side, values in times.items()}}
    found["ratio"] = harness.ratios(times["full+offload"], times["full"])
    found["moved_bytes"] = MANAGER.counters.moved_bytes
    if stack.device.type == "cuda":
        MANAGER.enable, stack.modules = True, sides["full+offload"]
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                stack.step(tokens)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found["waits"] = sorted(
            {f"{each.filename}:{each.lineno}" for each in told if "synchroniz" in str(each.message)}
        )
    return found


def make_claims(found: Mapping[str, Mapping[str, Any]], times: Mapping[str, Any], on_cuda: bool) -> list[Any]:
    """What the run says of each claim; lengths that the time ended compare nothing."""
    claims = []
    for longer, than in (("selective", "none"), ("full", "none"), ("full+offload", "full")):
        both = [found.get(mode, {}) for mode in (longer, than)]
        ended = any("time ended" in each.get("ended", "time ended") for each in both)
        values = [each.get("tokens") or 0 for each in both]
        ratio = None if ended or 0 in values else values[0] / values[1]
        claims.append(make_claim(f"longest sequence of {longer} over that of {than}", ratio, "above", 1.0))
    ratio = times["ratio"]["median"] if times and on_cuda else None
    claims.append(make_claim("step time of full+offload over that of full", ratio, "at most", MOST_TIME))
    waits = len(times["waits"]) if "waits" in times else None
    what = "lines that make the host wait for the device in a step with offload"
    claims.append(make_claim(what, waits, "exactly", 0) | {"fails": times.get("waits", [])})
    return claims


COLUMNS = {
    "mode": "mode",
    "longest": "tokens",
    "peak (MiB)": "peak_bytes",
    "KiB a token": "per_token_kib",
    "of the whole device, extrapolated": "extrapolated_tokens",
    "ended because": "ended",
}


def parse(arguments: Sequence[str] | None) -> Any:
    """The options, with the limit in bytes. Exits on what cannot be."""
    parser = harness.make_parser("longest", __doc__, rounds=3)
    add = parser.add_argument
    add("--blocks", type=int, help="default: 30; 12 on a CPU")
    add("--heads", type=int, help="default: 12; 2 on a CPU")
    add("--head-dim", type=int, help="default: 128; 16 on a CPU")
    add("--feed-forward", type=int, help="default: 8960; 64 on a CPU")
    add("--text-tokens", type=int, help="default: 512; 8 on a CPU")
    add("--start", type=int, help="the first length (1024; 32 on a CPU)")
    add("--unit", type=int, help="lengths are multiples of it (128; 8 on a CPU)")
    add("--memory-gib", type=float, help="a part of the device's memory, as if it were all; default: all")
    add(
        "--seconds",
        type=float,
        default=120.0,
        help="time for all modes and the comparison (120; 600 on a CPU)",
    )
    small: dict[str, Any] = {"blocks": 12, "heads": 2, "head_dim": 16, "feed_forward": 64, "text_tokens": 8}
    small |= {"start": 32, "unit": 8, "memory_gib": 6 / 2**10, "seconds": 600.0}
    large = {"blocks": 30, "heads": 12, "head_dim": 128, "feed_forward": 8960, "text_tokens": 512}
    large |= {"start": 1024, "unit": 128}
    usual: Mapping[str, Any] = {"cpu": small, "cuda": large, "quick": {"rounds": 2, "memory_gib": 3 / 2**10}}
    options = harness.parse_options(parser, arguments, usual)
    if not any(options.only in mode for mode in MODES):
        parser.error(f"--only {options.only!r} is in no mode's name; they are {', '.join(MODES)}")
    options.device_bytes = options.limit_bytes = int((options.memory_gib or 0) * GIB)
    if options.device == "cuda":
        options.device_bytes = torch.cuda.mem_get_info()[0]
        options.limit_bytes = min(options.limit_bytes or options.device_bytes, options.device_bytes)
        torch.cuda.set_per_process_memory_fraction(options.limit_bytes / torch.cuda.mem_get_info()[1])
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """0; claims that do not hold are printed and stored."""
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    options = parse(arguments)
    report = Report(options, limit_bytes=options.limit_bytes, device_bytes=options.device_bytes)
    stack, found, times = Stack(options), dict[str, Any](), dict[str, Any]()
    report.result |= {"modes": found, "offload": times}
    modes, started = [mode for mode in MODES if options.only in mode], time.monotonic()
    try:
        for number, mode in enumerate(modes, 1):
            harness.say(f"longest: {mode}")
            stack.set_mode(mode)
            stack.step(options.unit)  # kernels are loaded
            # What one mode leaves of its share is for those after it, whose steps are longer.
            found[mode] = search(stack, started + number * options.seconds / (len(MODES) + 2))
            report.result["claims"] = make_claims(found, times, options.device == "cuda")
            rows = [{"mode": mode, **row} for mode, row in found.items()]
            report.show(make_table("Longest sequences so far", COLUMNS, rows))
        lengths = [length_of(found.get(mode, {}), options) for mode in ("full", "full+offload")]
        if 0 not in lengths:
            harness.say("longest: offload beside checkpointing alone")
            # Beside the one without it, offload's slots stay where they are.
            times |= compare_offload(stack, min(lengths) * 7 // 8, options.seconds / 3)
    finally:
        MANAGER.close()
    report.result["claims"] = make_claims(found, times, options.device == "cuda")
    columns = {"tokens": "tokens", "full": "full ms", "full+offload": "full+offload ms", "ratio": "ratio"}
    report.show(
        make_table("A step with offload beside checkpointing alone (ms)", columns, [times] if times else [])
    )
    report.finish(draw_longest)
    return 0


if __name__ == "__main__":
    sys.exit(main())
