"""Defects of `opensora_accel.communications`: of the collectives themselves, and around the public functions."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opensora_accel.communications import copy_forward_reduce_backward, share_sizes
from tests.verify.defects import (
    FACTORS,
    Collective,
    Mutant,
    Patch,
    change_gradient,
    dropped,
    in_place_of,
    not_summed,
    over,
    received_in_reverse,
    scaled,
    sent_in_reverse,
    twice,
    with_arguments,
)
from tests.verify.meshes import TENSOR, ULYSSES, ULYSSES_BESIDE_DATA, ULYSSES_TO_4, Meshes
from tests.verify.model_steps import DiTStep
from tests.verify.steps import TOKENS, AttentionStep, MegatronStep, ShiftStep

COMMUNICATIONS = "opensora_accel.communications:"
SPLIT, GATHER = (
    COMMUNICATIONS + "split_forward_gather_backward",
    COMMUNICATIONS + "gather_forward_split_backward",
)
LAYER = AttentionStep("ulysses")


def rescaled(
    original: Any, input_: Tensor, group: Any, dim: int, grad_scale: Any = None, *, by: str, **options: Any
) -> Tensor:
    """By another factor than "up" or "down" names; a group of one rank has none."""
    factor = grad_scale if group.size() == 1 else FACTORS[by](group.size())
    return original(input_, group, dim, factor, **options)


def scaled_by_share(
    original: Any, input_: Tensor, group: Any, dim: int, grad_scale: Any = None, **options: Any
) -> Tensor:
    """An uneven split scaled by each rank's share, where exactly the number of ranks is right."""
    share = share_sizes(TOKENS, group.size())[group.rank()] / TOKENS
    return original(input_, group, dim, share if grad_scale == "down" else 1 / share, **options)


def first_tokens_only(
    original: Any, input_: Tensor, group: Any, dim: int, *args: Any, **options: Any
) -> Tensor:
    """Every rank's share starts at the first token."""
    start = sum(share_sizes(input_.size(dim), group.size())[: group.rank()])
    return original(input_.roll(start, dim), group, dim, *args, **options)


def gradient_flipped(
    original: Any, input_: Tensor, group: Any, dim: int, *args: Any, **options: Any
) -> Tensor:
    output = original(input_, group, dim, *args, **options)
    return output if group.size() == 1 else change_gradient(output, lambda gradient: gradient.flip(dim))


def gradient_doubled(original: Any, input_: Tensor, group: Any, *args: Any, **options: Any) -> Tensor:
    output = original(input_, group, *args, **options)
    return output if group.size() == 1 else change_gradient(output, lambda gradient: 2 * gradient)


def _along_dim() -> list[Mutant]:
    """Split, gather and their divisors, around a layer of Ulysses."""

    def mutant(name: str, change: Any, kind: str, factor: str = "", meshes: Meshes = ULYSSES) -> Mutant:
        return Mutant(name, (change,), LAYER, meshes, kind, ("ulysses",), factor)

    def scale(name: str, place: str, by: str, factor: str, meshes: Meshes = ULYSSES) -> Mutant:
        return mutant(name, Patch(place, partial(rescaled, by=by)), "scale", factor, meshes)

    def share(*places: str) -> Mutant:
        changes = tuple(Patch(place, scaled_by_share) for place in places)
        names = " and ".join("up" if place == GATHER else "down" for place in places)
        return Mutant(f"{names} scaled by share", changes, LAYER, ULYSSES, "shares", ("ulysses",), "share")

    return [
        scale("up dropped", GATHER, "1", "ulysses⁻¹"),
        scale("up inverted", GATHER, "1/P", "ulysses⁻²"),
        scale("up squared", GATHER, "P²", "ulysses"),
        scale("up counts the others", GATHER, "P-1", "ulysses⁻¹ · (ulysses − 1)"),
        scale("up by 2", GATHER, "2", "2 · ulysses⁻¹", ULYSSES_TO_4),
        scale("down dropped", SPLIT, "1", "ulysses"),
        scale("down inverted", SPLIT, "P", "ulysses²"),
        scale("down squared", SPLIT, "1/P²", "ulysses⁻¹"),
        scale("down counts the others", SPLIT, "1/(P-1)", "ulysses · (ulysses − 1)⁻¹"),
        scale("down by 2", SPLIT, "1/2", "0.5 · ulysses", ULYSSES_TO_4),
        share(GATHER),
        share(SPLIT),
        share(GATHER, SPLIT),
        mutant("gather of the gradient dropped", Collective("all-gather", dropped, "backward"), "scale", "ulysses⁻¹"),
        mutant(
            "gather of the gradient doubled",
            Collective("all-gather", partial(scaled, by="2"), "backward"), "scale", "2",
        ),
        mutant("gather of the output dropped", Collective("all-gather", dropped, "forward"), "values"),
        mutant("gather in another order", Collective("all-gather", received_in_reverse), "values"),
        mutant(
            "gather over data", Collective("all-gather", partial(over, group="data")), "values",
            meshes=ULYSSES_BESIDE_DATA,
        ),
        mutant("split gives all the first tokens", Patch(SPLIT, first_tokens_only), "values"),
        mutant("split of the gradient in another order", Patch(GATHER, gradient_flipped), "values"),
        mutant("split of the gradient doubled", Patch(GATHER, gradient_doubled), "scale", "2"),
    ]  # fmt: skip


def input_gradient_doubled(original: Any, input_: Tensor, group: Any) -> Tensor:
    return original(change_gradient(input_, lambda gradient: 2 * gradient), group)


def gradient_reduced_too(original: Any, input_: Tensor, group: Any) -> Tensor:
    return copy_forward_reduce_backward(original(input_, group), group)


def _megatron() -> list[Mutant]:
    def mutant(
        name: str, change: Any, kind: str, factor: str = "", axes: tuple[str, ...] = ("tensor",)
    ) -> Mutant:
        is_along_tokens = isinstance(change, Collective) and change.kind == "reduce-scatter"
        return Mutant(name, (change,), MegatronStep(is_along_tokens), TENSOR, kind, axes, factor)

    def reduce(change: Any, phase: str) -> Collective:
        return Collective("all-reduce", change, phase)

    def scatter(change: Any, phase: str = "forward or backward") -> Collective:
        return Collective("reduce-scatter", change, phase)

    copy, sum_ = (
        COMMUNICATIONS + "copy_forward_reduce_backward",
        COMMUNICATIONS + "reduce_forward_copy_backward",
    )
    average, double = partial(scaled, by="1/P"), partial(scaled, by="2")
    return [
        mutant("all-reduce dropped", reduce(not_summed, "forward"), "values"),
        mutant("all-reduce of the gradient dropped", reduce(not_summed, "backward"), "missing sum"),
        mutant("all-reduce twice", reduce(twice, "forward"), "values"),
        # Doubled on a group of one rank, too: no axis is to blame.
        mutant("all-reduce of the gradient doubled", Patch(copy, input_gradient_doubled), "scale", "2", ()),
        mutant("all-reduce of the gradient twice", reduce(twice, "backward"), "scale", "tensor"),
        mutant("all-reduce of the gradient averages", reduce(average, "backward"), "scale", "tensor⁻¹"),
        mutant("the copied gradient is reduced as well", Patch(sum_, gradient_reduced_too), "scale", "tensor"),
        mutant(
            "all-reduce over the world", reduce(partial(over, group="world"), "forward or backward"), "values",
            axes=("data", "tensor"),
        ),
        mutant("reduce-scatter does not reduce", scatter(not_summed), "values"),
        mutant("reduce-scatter in another order", scatter(sent_in_reverse), "values"),
        mutant("reduce-scatter of the gradient averages", scatter(average, "backward"), "scale", "tensor⁻¹"),
        mutant("reduce-scatter of the gradient doubled", scatter(double, "backward"), "scale", "2"),
        mutant("the gradient is scattered and not summed", scatter(not_summed, "backward"), "values"),
    ]  # fmt: skip


def _all_to_all() -> list[Mutant]:
    even = AttentionStep("ulysses", heads=6, tokens=12)

    def mutant(
        name: str,
        change: Any,
        kind: str = "values",
        factor: str = "",
        *,
        step: Any = LAYER,
        axes: tuple[str, ...] = ("ulysses",),
        meshes: Meshes = ULYSSES,
    ) -> Mutant:
        return Mutant(name, (change,), step, meshes, kind, axes, factor)

    def all_to_all(change: Any, phase: str = "", is_first_only: bool = False) -> Collective:
        return Collective("all-to-all", change, phase, is_first_only=is_first_only)

    def backward(change: Any, is_first_only: bool = False) -> Collective:
        return all_to_all(change, "backward", is_first_only)

    both = ("dp_replicate", "ulysses")
    return [
        mutant("all-to-all dropped", all_to_all(dropped)),
        mutant("all-to-all doubled", all_to_all(partial(scaled, by="2"))),
        mutant("all-to-all over the world", all_to_all(partial(over, group="world")), "failure", axes=both),
        mutant(
            "all-to-all over data", all_to_all(partial(over, group="data")), step=even, meshes=ULYSSES_BESIDE_DATA
        ),
        mutant("heads go to other ranks", all_to_all(sent_in_reverse), step=even),
        mutant("heads come back in another order", all_to_all(received_in_reverse), step=even),
        # The first all-to-all of backward brings the gradient of the attention's output.
        mutant("gradient of one all-to-all doubled", backward(partial(scaled, by="2"), True), "scale", "2"),
        mutant("gradient of one all-to-all scaled up", backward(partial(scaled, by="P"), True), "scale", "ulysses"),
        mutant("gradient of every all-to-all averaged", backward(partial(scaled, by="1/P")), "scale", "ulysses⁻²"),
        mutant("gradient of every all-to-all dropped", backward(dropped)),
    ]  # fmt: skip


def seems_to_compile(original: Any) -> bool:
    """torch.compile's own path of the collectives, run without it."""
    caller = sys._getframe(2).f_globals.get("__name__", "")
    return caller.startswith("opensora_accel.communications") or original()


TRACED = Patch("torch.compiler:is_compiling", seems_to_compile)


def _traced() -> list[Mutant]:
    """What torch.compile sees, run without it."""

    def mutant(name: str, change: Any) -> Mutant:
        changes = (TRACED, Collective("all-to-all", change))
        return Mutant(f"traced: {name}", changes, DiTStep(), ULYSSES, "values", ("ulysses",))

    return [
        mutant("all-to-all dropped", dropped),
        mutant("all-to-all doubled", partial(scaled, by="2")),
    ]


def unchanged(input_: Tensor, *_: Any, **__: Any) -> Tensor:
    return input_


class _SameWay(torch.autograd.Function):
    """Backward exchanges as forward does, where it should go the other way."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, exchange: Any) -> Tensor:
        ctx.exchange = exchange
        return exchange(input_)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange(grad), None


def gradient_goes_the_same_way(original: Any, input_: Tensor, *args: Any, **options: Any) -> Tensor:
    return _SameWay.apply(input_, lambda tensor: original(tensor, *args, **options))


def _negative(shift: int) -> int:
    return -shift


def _exchange() -> list[Mutant]:
    def mutant(name: str, wrapper: Any) -> Mutant:
        change = Patch(COMMUNICATIONS + "ring_exchange", wrapper)
        return Mutant(f"ring exchange: {name}", (change,), ShiftStep(), ULYSSES, "values", ("ulysses",))

    return [
        mutant("dropped", partial(in_place_of, unchanged)),
        mutant("the other way", partial(with_arguments, _named={"shift": _negative})),
        mutant("gradient the same way", gradient_goes_the_same_way),
    ]


COMMUNICATION_MUTANTS = [*_along_dim(), *_megatron(), *_all_to_all(), *_traced(), *_exchange()]
