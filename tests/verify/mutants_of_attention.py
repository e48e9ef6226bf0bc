"""Defects of `opensora_accel.attention`, around its public functions and in its messages, and of a ring by hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_accel.attention import local_attention
from opensora_accel.parallel_states import get_parallel_group
from tests.verify.by_hand import RingByHand
from tests.verify.defects import (
    FACTORS,
    Collective,
    Mutant,
    Patch,
    change_gradient,
    in_place_of,
    lost,
    mirrored,
    not_summed,
    received_in_reverse,
)
from tests.verify.meshes import BOTH, RING, ULYSSES, ULYSSES_BESIDE_DATA, Meshes, plan
from tests.verify.steps import AttentionStep, FactorisedStep, JointStep

ATTENTION = "opensora_accel.attention:"
GROUP = "opensora_accel.parallel_states:get_parallel_group"
ULYSSES_LAYER, RING_LAYER = AttentionStep("ulysses"), AttentionStep("ring")


def alone(
    q: Tensor, k: Tensor, v: Tensor, *_: Any, mask: Tensor | None = None, causal: bool = False, **__: Any
) -> Tensor:
    """Attention of this rank's tokens to this rank's tokens."""
    return local_attention(q, k, v, mask=mask, causal=causal)


def over_mixed(original: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **options: Any) -> Tensor:
    return original(q, k, v, get_parallel_group("mixed"), **options)


def mask_reversed(
    original: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, mask: Tensor, **options: Any
) -> Tensor:
    """The shares of the mask [B, S/P] are put together from the last rank to the first."""
    group = get_parallel_group("sequence")
    masks: list[Any] = [None] * group.size()
    dist.all_gather_object(masks, mask, group)
    whole = torch.cat(masks, 1)
    if group.size() > 1:
        whole = whole.flip(1)
    return original(q, k, v, *args, mask=whole.tensor_split(group.size(), 1)[group.rank()], **options)


def keys_of_other_heads(original: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Tensor:
    if get_parallel_group("sequence").size() > 1:
        k, v = k.flip(2), v.flip(2)
    return original(q, k, v, *args, **options)


def _ulysses() -> list[Mutant]:
    def mutant(name: str, wrapper: Any, axis: str = "ulysses", step: Any = ULYSSES_LAYER) -> Mutant:
        change = Patch(ATTENTION + "ulysses_attention", wrapper)
        return Mutant(f"Ulysses: {name}", (change,), step, ULYSSES, "values", (axis,))

    masked, grouped = AttentionStep("ulysses", masked=True), AttentionStep("ulysses", heads=12, kv_heads=4)
    return [
        mutant("attends to its own tokens", partial(in_place_of, alone)),
        mutant("over mixed", over_mixed, "dp_replicate"),
        mutant("gathers the mask in another order", mask_reversed, step=masked),
        mutant("gives keys to other heads", keys_of_other_heads, step=grouped),
    ]


def gradient_rescaled(original: Any, *args: Any, which: int, by: str, **options: Any) -> Tensor:
    """The gradient of the queries, keys or values that go into the attention."""
    factor = FACTORS[by](get_parallel_group("ring").size())
    if get_parallel_group("ring").size() > 1:
        tensors = list(args)
        tensors[which] = change_gradient(args[which], lambda gradient: factor * gradient)
        args = tuple(tensors)
    return original(*args, **options)


def _ring() -> list[Mutant]:
    """Our own ring is changed in its messages and around it, a ring by hand also between its hops."""

    def mutant(
        name: str, change: Any, kind: str = "values", factor: str = "", *, step: Any = RING_LAYER
    ) -> Mutant:
        return Mutant(f"ring: {name}", (change,), step, RING, kind, ("ring",), factor, timeout_s=20)

    def scale(name: str, which: int, by: str, factor: str) -> Mutant:
        wrapper = partial(gradient_rescaled, which=which, by=by)
        return mutant(name, Patch(ATTENTION + "ring_attention", wrapper), "scale", factor)

    def by_hand(
        mistake: Any,
        kind: str = "values",
        axes: tuple[str, ...] = ("ring",),
        meshes: Meshes = RING,
        **options: Any,
    ) -> Mutant:
        step = RingByHand(mistake, **options)
        return Mutant(
            f"ring: {mistake}",
            (),
            step,
            meshes,
            kind,
            axes,
            timeout_s=20,
        )

    over_mixed_ = Patch(ATTENTION + "ring_attention", over_mixed)
    causal = AttentionStep("ring", tokens=12, causal=True, layout="zigzag")
    return [
        mutant("the other way", Collective("message", mirrored), step=causal),
        mutant("messages lost", Collective("message", lost)),
        mutant("messages of backward lost", Collective("message", lost, "backward")),
        scale("queries doubled", 0, "2", "2"),
        scale("keys doubled", 1, "2", "2"),
        scale("values averaged", 2, "1/P", "ring⁻¹"),
        Mutant(
            "ring: over mixed", (over_mixed_,), RING_LAYER, RING, "values", ("dp_replicate",), timeout_s=6
        ),
        mutant("attends to its own tokens", Patch(ATTENTION + "ring_attention", partial(in_place_of, alone))),
        by_hand("sums the other way", tokens=12),
        by_hand("another owner", causal=True),
        by_hand("the last hop dropped"),
        by_hand("sums start anew"),
        by_hand("only the own sums"),
        by_hand("the own sums dropped"),
        by_hand("sums of another block", tokens=12),
        by_hand("only the last step's queries"),
        by_hand("to another group", "failure", ("dp_replicate", "ring")),
        by_hand("sums never sent", "failure", meshes=(plan(ring=2), plan(dp_replicate=2))),
    ]


def ring_and_ulysses_exchanged(original: Any, name: str) -> Any:
    return original({"ring": "ulysses", "ulysses": "ring"}.get(name, name))


def ring_over_ulysses(original: Any, name: str) -> Any:
    return original("ulysses" if name == "ring" else name)


Text = tuple[Tensor, Tensor]


def text_doubled(original: Any, *args: Any, **options: Any) -> Text:
    out, text = original(*args, **options)
    return out, text if get_parallel_group("ulysses").size() == 1 else 2 * text


def text_without_gradient(original: Any, *args: Any, axis: str, **options: Any) -> Text:
    out, text = original(*args, **options)
    return out, text if get_parallel_group(axis).size() == 1 else text.detach()


def text_of_other_heads(
    original: Any, q: Tensor, k: Tensor, v: Tensor, *text: Tensor, **options: Any
) -> Text:
    """Queries of the text that another rank has the heads of, with this rank's keys."""
    text_q, *rest = text
    if get_parallel_group("ulysses").size() > 1:
        text_q = text_q.flip(2)
    return original(q, k, v, text_q, *rest, **options)


def _both() -> list[Mutant]:
    """Ring and ulysses together: USP, and joint attention with text."""

    def mutant(name: str, change: Any, step: Any, axes: tuple[str, ...], meshes: Meshes = BOTH) -> Mutant:
        return Mutant(name, (change,), step, meshes, "values", axes, timeout_s=20)

    def joint(name: str, wrapper: Any, axis: str, step: JointStep = JointStep()) -> Mutant:  # noqa: B008 - frozen
        return mutant(name, Patch(ATTENTION + "joint_attention", wrapper), step, (axis,))

    even, even_text = AttentionStep(heads=6, tokens=12), JointStep(text_tokens=6, heads=6, tokens=12)
    causal = AttentionStep(heads=6, tokens=12, causal=True)
    return [
        mutant("ring and ulysses exchanged", Patch(GROUP, ring_and_ulysses_exchanged), causal, ("sequence",)),
        mutant("the ring runs over ulysses", Patch(GROUP, ring_over_ulysses), even, ("ring",), (*BOTH[:2], BOTH[3])),
        mutant(
            "text's gradient is not summed", Collective("reduce-scatter", not_summed, "backward", "ring"),
            JointStep(), ("ring",),
        ),
        mutant(
            "text of another ring rank", Collective("all-gather", received_in_reverse, "forward", "ring"),
            even_text, ("ring",),
        ),
        joint("text's heads of another rank", text_of_other_heads, "ulysses", even_text),
        joint("text's exchange doubled", text_doubled, "ulysses"),
        joint("text's exchange without gradient", partial(text_without_gradient, axis="ulysses"), "ulysses"),
        joint("text's gather without gradient", partial(text_without_gradient, axis="ring"), "ring"),
    ]  # fmt: skip


def switched_over_mixed(original: Any, input_: Tensor, *_: Any, **options: Any) -> Tensor:
    return original(input_, get_parallel_group("mixed"), **options)


def dims_exchanged(
    original: Any, input_: Tensor, *args: Any, from_dim: int, to_dim: int, **options: Any
) -> Tensor:
    return original(input_, *args, from_dim=to_dim, to_dim=from_dim, **options)


def _factorised() -> list[Mutant]:
    def mutant(name: str, wrapper: Any, axis: str, kind: str = "values") -> Mutant:
        change = Patch(ATTENTION + "switch_sharded_dim", wrapper)
        meshes = ULYSSES_BESIDE_DATA if kind == "failure" else ULYSSES
        return Mutant(f"switch: {name}", (change,), FactorisedStep(), meshes, kind, (axis,), timeout_s=20)

    return [
        mutant("over mixed", switched_over_mixed, "dp_replicate"),
        mutant("the dims exchanged", dims_exchanged, "ulysses", "failure"),
    ]


ATTENTION_MUTANTS = [*_ulysses(), *_ring(), *_both(), *_factorised()]
