"""Defects of `opensora_accel.attention`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from opensora_accel.verify.findings import Kind
from tests.verify.meshes import BOTH, RING, ULYSSES, ULYSSES_BESIDE_DATA, Meshes, plan
from tests.verify.mutation import Edit, Mutant
from tests.verify.steps import AttentionStep, FactorisedStep, JointStep

ATTENTION = "opensora_accel.attention."
CIRCULATE = ATTENTION + "circulate:Circulation."
RING_ATTENTION = ATTENTION + "ring:"
ULYSSES_ATTENTION = ATTENTION + "ulysses:"
USP = ATTENTION + "usp:"
JOINT = ATTENTION + "joint:"
FACTORISED = ATTENTION + "factorised:"
ULYSSES_LAYER, RING_LAYER = AttentionStep("ulysses"), AttentionStep("ring")


def _ulysses() -> list[Mutant]:
    def mutant(
        name: str, function: str, old: str, new: str, axis: str = "ulysses", step: Any = ULYSSES_LAYER
    ) -> Mutant:
        edit = Edit(ULYSSES_ATTENTION + function, old, new)
        return Mutant(f"Ulysses: {name}", (edit,), step, ULYSSES, "values", (axis,))

    return [
        mutant(
            "attends to its own tokens",
            "ulysses_attention",
            "if group.size() == 1",
            "if True",
        ),
        mutant(
            "over mixed",
            "ulysses_attention",
            'get_parallel_group("sequence")',
            'get_parallel_group("mixed")',
            "dp_replicate",
        ),
        mutant(
            "gathers the mask in another order",
            "_whole_mask",
            "splits=splits).bool()",
            "splits=splits).flip(1).bool()",
            step=AttentionStep("ulysses", masked=True),
        ),
        mutant(
            "gives keys to other heads",
            "Heads.align_keys",
            "return _select(tensor, serving)",
            "return _select(tensor, serving[::-1])",
            step=AttentionStep("ulysses", heads=12, kv_heads=4),
        ),
    ]


def _ring() -> list[Mutant]:
    causal = AttentionStep("ring", tokens=12, causal=True, layout="zigzag")

    def mutant(
        name: str,
        place: str,
        old: str,
        new: str,
        kind: Kind = "values",
        factor: str = "",
        *,
        step: Any = RING_LAYER,
        axes: tuple[str, ...] = ("ring",),
        meshes: Meshes = RING,
    ) -> Mutant:
        edit = Edit(place, old, new)
        return Mutant(f"ring: {name}", (edit,), step, meshes, kind, axes, factor, timeout_s=6)

    to, of = "(self._rank + 1) % self._num_ranks", "(self._rank - 1) % self._num_ranks"
    turn = f"to, of = {to}, {of}"
    return [
        mutant("the other way", CIRCULATE + "_post", turn, f"of, to = {to}, {of}", step=causal),
        mutant(
            "sums the other way",
            CIRCULATE + "_post",
            turn,
            f"{turn}\n        to, of = (of, to) if tag else (to, of)",
            step=AttentionStep("ring", tokens=12),
        ),
        mutant(
            "another owner", CIRCULATE + "_owner_at", "self._rank - step", "self._rank + step", step=causal
        ),
        mutant(
            "the last hop dropped",
            RING_ATTENTION + "_forward",
            "in ring.tiles(trip.owner):",
            "in ring.tiles(trip.owner) if trip._step < len(ring.kv_splits) - 1 else ():",
        ),
        mutant("sums start anew", CIRCULATE + "send_home", "self._step == 1", "True"),
        mutant("only the own sums", RING_ATTENTION + "_backward", "is_new=False", "is_new=True"),
        mutant(
            "the own sums dropped", RING_ATTENTION + "_backward", "own.add_to(sums, is_new=False)", "pass"
        ),
        mutant(
            "sums of another block",
            RING_ATTENTION + "_backward",
            "trip.send_home(found.add_to)",
            "trip.send_home(own.add_to)",
            step=AttentionStep("ring", tokens=12),
        ),
        mutant(
            "only the last step's queries",
            RING_ATTENTION + "_backward",
            "grad_q[:, rows] +=",
            "grad_q[:, rows] =",
        ),
        mutant(
            "queries doubled", RING_ATTENTION + "_backward", "+= parts[0]", "+= 2 * parts[0]", "scale", "2"
        ),
        mutant(
            "keys doubled", RING_ATTENTION + "_KeyGrads.add_to", "+= grad_k", "+= 2 * grad_k", "scale", "2"
        ),
        mutant(
            "values averaged",
            RING_ATTENTION + "_backward",
            "grad_v.to(v.dtype, copy=True)",
            "grad_v / ring.group.size()",
            "scale",
            "ring⁻¹",
        ),
        mutant(
            "to another group",
            CIRCULATE + "_post",
            "dist.get_global_rank(self._group, to)",
            "to",
            "failure",
            axes=("dp_replicate", "ring"),
        ),
        mutant(
            "sums never sent",
            CIRCULATE + "_post",
            "if sent.numel():",
            "if sent.numel() and tag == 0:",
            "failure",
            meshes=(plan(ring=2), plan(dp_replicate=2)),
        ),
        mutant(
            "over mixed",
            RING_ATTENTION + "ring_attention",
            'get_parallel_group("sequence")',
            'get_parallel_group("mixed")',
            axes=("dp_replicate",),
        ),
        mutant(
            "attends to its own tokens",
            RING_ATTENTION + "ring_attend",
            "if group.size() == 1",
            "if True",
        ),
    ]


def _both() -> list[Mutant]:
    """Ring and ulysses together: USP, and joint attention with text."""

    def mutant(
        name: str,
        place: str,
        old: str,
        new: str,
        step: Any,
        axes: tuple[str, ...],
        meshes: Meshes = BOTH,
    ) -> Mutant:
        return Mutant(name, (Edit(place, old, new),), step, meshes, "values", axes, timeout_s=8)

    even = AttentionStep("usp", heads=6, tokens=12)
    joint, joint_even = JointStep(), JointStep(text_tokens=6, heads=6, tokens=12)
    groups = 'get_parallel_group("ring"), get_parallel_group("ulysses")'
    exchanged = 'get_parallel_group("ulysses"), get_parallel_group("ring")'
    own_heads = "heads.query_range(rank)"
    comms = "__import__('opensora_accel.communications', fromlist=['x'])"
    return [
        mutant(
            "ring and ulysses exchanged",
            USP + "SequenceGroups.of",
            groups,
            exchanged,
            replace(even, causal=True),
            ("sequence",),
        ),
        mutant(
            "the ring runs over ulysses",
            USP + "usp_attention",
            "k, v, groups.ring,",
            "k, v, groups.ulysses,",
            even,
            ("ring",),
            (*BOTH[:2], BOTH[3]),
        ),
        mutant(
            "text's gradient is not summed",
            JOINT + "joint_attention",
            "gather_forward_reduce_scatter_backward(",
            f"{comms}.gather_forward_split_backward(",
            joint,
            ("ring",),
        ),
        mutant(
            "text of another ring rank",
            JOINT + "_own_tokens",
            "[groups.ring.rank()]",
            "[-1 - groups.ring.rank()]",
            joint_even,
            ("ring",),
        ),
        mutant(
            "text's heads of another rank",
            JOINT + "_own_heads",
            own_heads,
            "heads.query_range(len(heads.queries) - 1 - rank)",
            joint_even,
            ("ulysses",),
        ),
        mutant(
            "text's exchange doubled",
            JOINT + "_gather_heads",
            "copies = text.",
            "copies = (2 * text).",
            joint,
            ("ulysses",),
        ),
        mutant(
            "text's exchange without gradient",
            JOINT + "_gather_heads",
            "copies = text.",
            "copies = text.detach().",
            joint,
            ("ulysses",),
        ),
        mutant(
            "text's gather without gradient",
            JOINT + "joint_attention",
            "gather_forward_reduce_scatter_backward(text_out,",
            "gather_forward_reduce_scatter_backward(text_out.detach(),",
            joint,
            ("ring",),
        ),
    ]


def _factorised() -> list[Mutant]:
    def mutant(name: str, old: str, new: str, axis: str, kind: Kind = "values") -> Mutant:
        edit = Edit(FACTORISED + "switch_sharded_dim", old, new)
        meshes = ULYSSES_BESIDE_DATA if kind == "failure" else ULYSSES
        return Mutant(f"switch: {name}", (edit,), FactorisedStep(), meshes, kind, (axis,), timeout_s=8)

    group = 'get_parallel_group("sequence")'
    dims = "[input_], group, to_dim, from_dim"
    return [
        mutant("over mixed", group, 'get_parallel_group("mixed")', "dp_replicate"),
        mutant("the dims exchanged", dims, "[input_], group, from_dim, to_dim", "ulysses", "failure"),
    ]


ATTENTION_MUTANTS = [*_ulysses(), *_ring(), *_both(), *_factorised()]
