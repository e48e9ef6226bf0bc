"""Collectives that send fewer bits: sums in bf16, and gathered weights in int8 or fp8 with a scale for each block.

Sums. Every rank's numbers are rounded to bf16 once, travel by all-to-all, and are added up in fp32: a reduce-scatter
of bf16 numbers would round every partial sum. What rounding leaves out is kept by the rank that rounds and is added to
what it sends the next time (error feedback). One number, 1/3 a step, in decimals with two digits:

    step    to send          sent     left out    sum of what was sent    true sum
    1       0.3333           0.33     0.0033      0.33                    0.3333
    2       0.3333 + 0.0033  0.34    -0.0033      0.67                    0.6667
    3       0.3333 - 0.0033  0.33     0.0000      1.00                    1.0000

So the sum over any number of steps is off by what was left out last, and no more. bf16 has 8 bits of significand, so
what is left out is at most u = 2⁻⁸ of what was to be sent. For gradients g_t,r of rank r, each at most G, the average
ĝ_t that comes out of T steps satisfies

    |ĝ_t − mean_r g_t,r| ≤ u (2 + u)/(1 − u) G        in one step: this one's rounding and the feedback of the last
    |Σ_t ĝ_t − Σ_t mean_r g_t,r| ≤ u/(1 − u) G        over all steps, whatever T is

Weights. They are cut into blocks of 128, none of which spans two parameters. Each block travels as 128 bytes and its
scale in fp32. With a the largest magnitude of the block, an element x comes back off by at most

    int8        a/254: half of a step of a/127
    fp8 e4m3    |x|/16, or a/448 · 2⁻¹⁰ where that is more: half of the smallest step, below 2⁻⁶ · a/448

A block that holds NaN or Inf comes back as NaN. Biases and the weights of norms (one dim) travel as they are.

The verifier compares gradients to 1e-8, where these are off by 1e-3. So under it every such collective runs, is held
element by element against the exact one of the same numbers and these bounds, and gives the exact result.

Source: 1-bit SGD (Seide et al., Interspeech 2014) for the feedback; ZeRO++ (arXiv:2306.10209) for blocks of weights.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_accel.communications import transport, wants_exact

BLOCK = 128
WIRE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
# What the largest magnitude of a block becomes.
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# Parts of a message start at multiples of it, so that they can be viewed in any dtype, and read 16 bytes at once.
_ALIGNMENT = 16
# What rounding to bf16 leaves out at most, as a share.
_UNIT = 2.0**-8


def replace_by_exact(found: Tensor, exact: Tensor, bound: Tensor, what: str) -> None:
    """Sets `found` to `exact`, if it is within the bound of it.

    Raises:
        ValueError: it is not.
    """
    # Sums in another order, and fp32 scales, are off by a few of these.
    slack = 1e-6 * exact.abs().max() if exact.numel() else 0.0
    over = (found - exact).abs() > bound + slack
    if bool(over.any()):
        worst = ((found - exact).abs() - bound).argmax()
        right, allowed, came = (each.flatten()[worst].item() for each in (exact, bound, found))
        raise ValueError(
            f"{what} may be off by {allowed:.3g} where it is {right:.6g}, and came back as {came:.6g}; "
            f"{int(over.sum())} of {over.numel()} elements are beyond the bound that compressed.py states: "
            "look for the mistake there, or set reduce_dtype and gather_dtype to same"
        )
    found.copy_(exact)


class RoundedSum:
    """Sums over the ranks of a group of what is sent in bf16, with what rounding leaves out kept for the next one.

    One object serves one sequence of tensors of the same meaning: the gradients of one block, step after step. It keeps
    as many numbers as it rounds, in the dtype of what it is given.
    """

    def __init__(self) -> None:
        self._left_out: dict[str, Tensor] = {}

    def forget(self) -> None:
        """Drops what was left out, as after a step whose gradients are not used."""
        self._left_out.clear()

    def reduce_scatter(self, output: Tensor, input_: Tensor, group: dist.ProcessGroup) -> None:
        """Fills `output` [n] with this rank's part of the sum over ranks of `input_` [P·n].

        `input_` is used up: its values are others afterwards.

        Communication: one `all_to_all_single` of 2·n·(P−1) bytes, half of what a reduce-scatter in fp32 sends.
        """
        # First, because rounding uses `input_` up.
        exact = self._exact("summands", input_, group) if wants_exact() else None
        sent = self._round("summands", input_)
        received = torch.empty_like(sent)
        transport.all_to_all_single(received, sent, group)
        # [P, n] → [n], added up in the dtype of the output.
        torch.sum(received.view(group.size(), -1), 0, dtype=output.dtype, out=output)
        if exact is not None:
            replace_by_exact(output, *exact, "a sum in bf16")

    def all_reduce_(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        """Replaces `tensor` [n] by its sum over ranks; the same bits on all of them.

        The sum is rounded as well before it is gathered, with a feedback of its own: then twice the bounds hold.

        Communication: an all-to-all and an all-gather, each of 2·⌈n/P⌉·(P−1) bytes: half of an all-reduce in fp32.
        """
        num_ranks = group.size()
        size = -(-tensor.numel() // num_ranks)
        # Zeros behind the end, so that every rank adds up and sends as many.
        padded = tensor.new_zeros(num_ranks * size)
        padded[: tensor.numel()] = tensor
        own = tensor.new_empty(size)
        self.reduce_scatter(own, padded, group)
        exact = own.clone() if wants_exact() else None
        # Before rounding, which changes `own` and what was left out.
        bound = self._bound("results", own)
        sent = self._round("results", own)
        gathered = sent.new_empty(num_ranks * size)
        transport.all_gather(gathered, sent, group)
        tensor.copy_(gathered[: tensor.numel()])
        if exact is not None:
            whole, bounds = tensor.new_empty(num_ranks * size), tensor.new_empty(num_ranks * size)
            transport.all_gather(whole, exact, group)
            transport.all_gather(bounds, bound, group)
            num_elements = tensor.numel()
            replace_by_exact(tensor, whole[:num_elements], bounds[:num_elements], "an average in bf16")

    def _exact(self, name: str, values: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        """This rank's part [n] of the exact sum of `values` [P·n], and how far from it the rounded one may be."""
        pair = values.new_empty(2, values.numel() // group.size())
        for part, of_all in zip(pair, (values.clone(), self._bound(name, values)), strict=True):
            transport.reduce_scatter(part, of_all, group)
        return pair[0], pair[1]

    def _bound(self, name: str, values: Tensor) -> Tensor:
        """How far from `values` [N] what is sent in their place may be, by what was left out before."""
        left_out = self._left_out.get(name)
        if left_out is None or left_out.shape != values.shape:
            return _UNIT * values.abs()
        return left_out.abs() + _UNIT * (values + left_out).abs()

    def _round(self, name: str, values: Tensor) -> Tensor:
        """`values` [N] and what was left out before, in bf16; `values` become what is left out now."""
        left_out = self._left_out.get(name)
        if left_out is not None and left_out.shape == values.shape:
            values += left_out
        # A copy, also of what is bf16 already: `values` change.
        sent = torch.empty_like(values, dtype=torch.bfloat16).copy_(values)
        values -= sent
        # A step with Inf or NaN is lost, and must not spoil those after it.
        values.nan_to_num_(0.0, 0.0, 0.0)
        if left_out is None or left_out.shape != values.shape:
            self._left_out[name] = values.clone()
        else:
            left_out.copy_(values)
        return sent


class CompressedShards:
    """How the shards of several parameters, one after the other in a tensor [n], travel in one message.

    P = 2 ranks and shards of a weight of 130 elements and a bias of 3, in bf16:

        bias     16 bytes: 3 × 2, and 10 of padding
        weight   256 bytes: two blocks, the second of which holds 2 elements and zeros
        scales   16 bytes: 2 × 4, and 8 of padding

    Args:
        numels: of each parameter's shard, padding of FSDP2 included.
        as_they_are: for each parameter, whether it is not compressed.
        dtype: of the shards.
        wire_dtype: int8 or float8_e4m3fn.
    """

    def __init__(
        self,
        numels: Sequence[int],
        as_they_are: Sequence[bool],
        dtype: torch.dtype,
        wire_dtype: torch.dtype,
    ):
        self._dtype, self._wire_dtype = dtype, wire_dtype
        self.numel = sum(numels)
        # Where each shard lies in [n], and where in the part of the message that it goes to.
        self._exact: list[tuple[slice, slice]] = []
        self._blocked: list[tuple[slice, slice]] = []
        start = num_exact = num_padded = 0
        for numel, is_exact in zip(numels, as_they_are, strict=True):
            place = slice(start, start + numel)
            if is_exact:
                self._exact.append((place, slice(num_exact, num_exact + numel)))
                num_exact += numel
            else:
                self._blocked.append((place, slice(num_padded, num_padded + numel)))
                num_padded += _round_up(numel, BLOCK)
            start += numel
        self._num_exact, self._num_padded = num_exact, num_padded
        parts = (num_exact * dtype.itemsize, num_padded, num_padded // BLOCK * torch.float32.itemsize)
        self._parts = tuple(_round_up(part, _ALIGNMENT) for part in parts)
        # [2, N] on the device: where in [n] each block begins, and how many of its numbers there are; and what divides
        # all of these.
        self._places: tuple[Tensor, int] | None = None

    @property
    def message_bytes(self) -> int:
        """What one rank's message has."""
        return sum(self._parts)

    def bound(self, shards: Tensor) -> Tensor:
        """How far each element may be off when it comes back, of shards [P, n] of all ranks."""
        bounds = torch.zeros_like(shards)
        for place, _ in self._blocked:
            numel = place.stop - place.start
            padded = torch.nn.functional.pad(shards[:, place], (0, -numel % BLOCK))
            of_blocks = error_bound(padded.reshape(-1, BLOCK), self._wire_dtype)
            bounds[:, place] = of_blocks.reshape(len(shards), -1)[:, :numel]
        # Weights in bf16 are rounded to it once more.
        return bounds if self._dtype != torch.bfloat16 else bounds + _UNIT * (shards.abs() + bounds)

    def pack(self, shards: Tensor) -> Tensor:
        """One rank's message, uint8 [message_bytes], from its shards [n]."""
        # The gaps between the parts travel too: zeros make them the same in every run.
        message = shards.new_zeros(self.message_bytes, dtype=torch.uint8)
        exact, blocks, scales = self._views(message.unsqueeze(0))
        if self._exact:
            torch._foreach_copy_(
                [exact[0, to] for _, to in self._exact], [shards[of] for of, _ in self._exact]
            )
        # Zeros leave the largest magnitude of a block, and so its scale, as they are.
        padded = shards.new_zeros(self._num_padded)
        if self._blocked:
            torch._foreach_copy_(
                [padded[to] for _, to in self._blocked], [shards[of] for of, _ in self._blocked]
            )
        compressed, factors = quantize(padded.view(-1, BLOCK), self._wire_dtype)
        blocks.copy_(compressed.view(1, -1))
        scales.copy_(factors.view(1, -1))
        return message

    def unpack(self, messages: Tensor, output: Tensor) -> None:
        """Fills `output` [P, n] from the messages uint8 [P, message_bytes] of all ranks."""
        if messages.is_cuda and type(output) is Tensor and _has_triton():
            self.unpack_by_kernel(messages, output)
        else:
            self.unpack_by_operations(messages, output)

    def unpack_by_kernel(self, messages: Tensor, output: Tensor) -> None:
        """As `unpack_by_operations` and to the same bits, where Triton is: see `unpack_kernel.py`."""
        from opensora_accel.experiments.unpack_kernel import WHOLE, unpack_blocks

        exact, blocks, scales = self._views(messages)
        self._copy_exact(exact, output)
        if self._places is None or self._places[0].device != output.device:
            places = [
                (at, min(BLOCK, to.stop - at))
                for to, _ in self._blocked
                for at in range(to.start, to.stop, BLOCK)
            ]
            step = 1 if math.gcd(*itertools.chain.from_iterable(places)) % WHOLE else WHOLE
            table = torch.tensor(places, dtype=torch.int64).view(-1, 2).T.contiguous()
            self._places = table.to(output.device), step
        (starts, sizes), step = self._places
        unpack_blocks(output, blocks, scales, starts, sizes, step)

    def unpack_by_operations(self, messages: Tensor, output: Tensor) -> None:
        """Fills `output` [P, n] by the operations of torch, which write a number in fp32 twice on its way."""
        exact, blocks, scales = self._views(messages)
        self._copy_exact(exact, output)
        num_ranks = messages.size(0)
        padded = dequantize(blocks.reshape(num_ranks, -1, BLOCK), scales, self._dtype).view(num_ranks, -1)
        if self._blocked:
            torch._foreach_copy_(
                [output[:, to] for to, _ in self._blocked], [padded[:, of] for _, of in self._blocked]
            )

    def _copy_exact(self, exact: Tensor, output: Tensor) -> None:
        if self._exact:
            torch._foreach_copy_(
                [output[:, to] for to, _ in self._exact], [exact[:, of] for _, of in self._exact]
            )

    def _views(self, messages: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The parts of messages [P, bytes]: exact [P, E], blocks [P, N·128] and scales [P, N]."""
        exact, blocks, scales = messages.split(self._parts, 1)
        return (
            exact.view(self._dtype)[:, : self._num_exact],
            blocks[:, : self._num_padded].view(self._wire_dtype),
            scales.view(torch.float32)[:, : self._num_padded // BLOCK],
        )


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def quantize(blocks: Tensor, wire_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Blocks [N, 128] in `wire_dtype`, and the fp32 scale [N] of each."""
    # Scales of bf16 weights are no bf16 numbers: rounded to it, one could make the largest weight more than 127.
    wide = _in_dtype(blocks, torch.promote_types(blocks.dtype, torch.float32))
    scales = _in_dtype(wide.abs().amax(1) / _LARGEST[wire_dtype], torch.float32)
    # A block of zeros needs a scale above 0 too: 0/0 would come back as NaN.
    scales.clamp_min_(torch.finfo(torch.float32).tiny)
    scaled = wide / scales.unsqueeze(1)
    if wire_dtype == torch.int8:
        scaled.round_()
    return _in_dtype(scaled, wire_dtype), scales


def error_bound(blocks: Tensor, wire_dtype: torch.dtype) -> Tensor:
    """How far each element of blocks [N, 128] may be off when it comes back, as stated at the top."""
    step = blocks.abs().amax(1, keepdim=True) / _LARGEST[wire_dtype]
    if wire_dtype == torch.int8:
        return (step / 2).expand_as(blocks)
    return torch.maximum(blocks.abs() / 16, step * 2.0**-10)


def dequantize(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Blocks [..., N, 128] and scales [..., N] as numbers [..., N, 128] of `dtype`."""
    # Multiplied in fp32 or wider, and rounded once.
    wide = _in_dtype(blocks, torch.promote_types(dtype, torch.float32))
    return _in_dtype(wide * scales.unsqueeze(-1), dtype)


def _in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor rounded to a dtype, also where the verifier leaves out the casts of `Tensor.to`."""
    return tensor if tensor.dtype == dtype else torch.empty_like(tensor, dtype=dtype).copy_(tensor)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
