"""Whether a ring's transfers hide behind its compute, and from which size on they do.

Nothing of it runs in training: measure once with `measure_ring_hardware`, and ask `explain_overlap` about a plan.

One step computes 4·B·c²·H·D operations (c tokens a rank) while 2·B·c·H·D elements of keys and values travel. In bf16
that hides where c ≥ F/W, for F operations and W bytes a second (Ring Attention, arXiv:2310.01889, section 3).
Backward computes 2.5 times as much, and gradients in fp32 travel too: c ≥ 1.2 F/W.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from opensora_accel.attention.kernels import Scores
from opensora_accel.attention.local import accumulator_dtype, attend
from opensora_accel.communications import ring_exchange


@dataclass(frozen=True)
class RingHardware:
    """What one rank computes and what it sends to the next rank of the ring."""

    # The attention kernel's speed: about half of the peak that a data sheet gives.
    flops_per_s: float
    bandwidth_bytes_per_s: float

    def __post_init__(self) -> None:
        if not (self.flops_per_s > 0 and self.bandwidth_bytes_per_s > 0):
            raise ValueError(f"flops_per_s and bandwidth_bytes_per_s must be positive; got {self}")


@dataclass(frozen=True)
class RingShape:
    """One layer of ring attention as a rank sees it: B samples of c = `block_tokens`, H heads of D."""

    num_ranks: int
    batch: int
    block_tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    # With a balanced layout: half of the scores of every step.
    causal: bool = False

    @property
    def step_flops(self) -> float:
        half = 0.5 if self.causal else 1.0
        return 4 * half * self.batch * self.block_tokens**2 * self.heads * self.head_dim

    @property
    def block_elements(self) -> int:
        return 2 * self.batch * self.block_tokens * self.kv_heads * self.head_dim


# Five products of matrices instead of two.
_BACKWARD_FLOPS = 2.5


@dataclass(frozen=True)
class Overlap:
    """The steps of one layer, in seconds."""

    forward_compute_s: float
    forward_transfer_s: float
    backward_compute_s: float
    backward_transfer_s: float
    # What one layer waits for, forward and backward. The last hop of the gradients has nothing to hide behind.
    exposed_s: float
    # Tokens a rank from which every step but that hop hides.
    smallest_block_tokens: int

    @property
    def hides(self) -> bool:
        return (
            self.forward_transfer_s <= self.forward_compute_s
            and self.backward_transfer_s <= self.backward_compute_s
        )


def ring_overlap(shape: RingShape, hardware: RingHardware) -> Overlap:
    """How the transfers of one layer of ring attention lie beside its compute. A model, not a measurement."""
    forward = shape.step_flops / hardware.flops_per_s
    keys = shape.block_elements * shape.dtype.itemsize / hardware.bandwidth_bytes_per_s
    grads = shape.block_elements * accumulator_dtype(shape.dtype).itemsize / hardware.bandwidth_bytes_per_s
    backward, both = _BACKWARD_FLOPS * forward, keys + grads
    exposed = _waited_s(shape.num_ranks, forward, keys, 0.0) + _waited_s(
        shape.num_ranks, backward, keys, grads
    )
    # Compute grows with the square of the block and transfers with the block itself.
    missing = max(keys / forward, both / backward) if forward else 0.0
    return Overlap(forward, keys, backward, both, exposed, math.ceil(shape.block_tokens * missing))


def _waited_s(num_ranks: int, compute_s: float, keys_s: float, sums_s: float) -> float:
    """What the trip of `ring_pipeline` takes beyond its compute: one processor, one link each way, event by event."""
    now = link = keys_arrive = sums_arrive = 0.0
    for step in range(num_ranks):
        now = max(now, keys_arrive)
        # The next block is sent on as soon as this one is here, while it is computed with.
        if step < num_ranks - 1:
            keys_arrive = link = max(link, now) + keys_s
        now += compute_s
        # The sum of the block's gradients follows it; it can be added to once the rank before has sent it.
        if sums_s and step > 0:
            now = max(now, sums_arrive)
            sums_arrive = link = max(link, now) + sums_s
    return max(now, sums_arrive) - num_ranks * compute_s


def measure_ring_hardware(group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> RingHardware:
    """The slowest rank's attention kernel and slowest link of the ring, by a few short runs. Every rank calls it."""
    tokens, heads, head_dim = (2048, 16, 64) if device.type == "cuda" else (512, 4, 64)
    # Zeros, because a draw would shift the random numbers of a run that goes on after it.
    q, k, v = (torch.zeros(1, tokens, heads, head_dim, device=device, dtype=dtype) for _ in range(3))
    message = torch.zeros(16 * 2**20 if device.type == "cuda" else 2**20, dtype=torch.uint8, device=device)
    compute_s = _time_s(lambda: attend(q, k, v, Scores(head_dim**-0.5)), device)
    transfer_s = _time_s(lambda: ring_exchange(message, group), device)
    slowest = torch.tensor([compute_s, transfer_s], device=device, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    compute_s, transfer_s = slowest.tolist()
    return RingHardware(4 * tokens**2 * heads * head_dim / compute_s, message.nbytes / transfer_s)


def _time_s(run: Callable[[], object], device: torch.device, num_runs: int = 5) -> float:
    """The fastest of a few runs after one to warm up."""
    times = []
    for _ in range(num_runs + 1):
        _synchronize(device)
        start = time.perf_counter()
        run()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    # Other work on the machine only adds to a time.
    return min(times[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def explain_overlap(shape: RingShape, hardware: RingHardware) -> str:
    """Whether a plan's ring hides its transfers, in words; if not, what that costs and what to change."""
    overlap = ring_overlap(shape, hardware)
    steps = (
        f"a block of {shape.block_tokens:,} tokens computes {1e3 * overlap.forward_compute_s:.3g} ms and sends for "
        f"{1e3 * overlap.forward_transfer_s:.3g} ms (backward {1e3 * overlap.backward_compute_s:.3g} and "
        f"{1e3 * overlap.backward_transfer_s:.3g}), at {hardware.flops_per_s / 1e12:.3g} TFLOP/s and "
        f"{hardware.bandwidth_bytes_per_s / 1e9:.3g} GB/s"
    )
    if overlap.hides:
        return f"the ring of {shape.num_ranks} ranks hides its transfers: {steps}"
    return (
        f"the ring of {shape.num_ranks} ranks does not hide its transfers: {steps}. About "
        f"{1e3 * overlap.exposed_s:.3g} ms of every layer's step are waited for; blocks of "
        f"{overlap.smallest_block_tokens:,} tokens would hide it. "
        "Where the heads allow it, move ranks from the ring to ulysses"
    )
