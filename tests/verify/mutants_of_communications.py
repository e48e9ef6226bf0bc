"""Defects of `opensora_accel.communications`."""

from __future__ import annotations

from typing import Any

from opensora_accel.verify.findings import Kind
from tests.verify.meshes import TENSOR, ULYSSES, ULYSSES_BESIDE_DATA, ULYSSES_TO_4, Meshes
from tests.verify.mutation import Edit, Mutant
from tests.verify.steps import AttentionStep, DiTStep, MegatronStep, ShiftStep

COMMUNICATIONS = "opensora_accel.communications."
ALONG_DIM = COMMUNICATIONS + "along_dim:"
REDUCE = COMMUNICATIONS + "reduce:"
ALL_TO_ALL = COMMUNICATIONS + "alltoall:"
TRANSFER = COMMUNICATIONS + "transfer:"
EXCHANGE = COMMUNICATIONS + "ring:"
TRACED = COMMUNICATIONS + "traced:"
DATA_GROUP = "__import__('opensora_accel.parallel_states', fromlist=['x']).get_parallel_group('data')"
LAYER = AttentionStep("ulysses")


def _along_dim() -> list[Mutant]:
    """Split, gather and their divisors, around a layer of Ulysses."""

    def scale(name: str, old: str, new: str, factor: str, meshes: Meshes = ULYSSES) -> Mutant:
        edit = Edit(ALONG_DIM + "_scale", old, new)
        return Mutant(f"{name}", (edit,), LAYER, meshes, "scale", ("ulysses",), factor)

    def share(which: str) -> Mutant:
        size = f"(sum(ctx.splits) / ctx.splits[ctx.group.rank()] if {which} else ctx.group.size())"
        edit = Edit(ALONG_DIM + "_AlongDim.backward", "ctx.group.size()", size)
        name = f"scale by share: {which}"
        return Mutant(name, (edit,), LAYER, ULYSSES, "shares", ("ulysses",), "share")

    def wrong(
        name: str,
        function: str,
        old: str,
        new: str,
        kind: Kind = "values",
        factor: str = "",
        meshes: Meshes = ULYSSES,
    ) -> Mutant:
        edit = Edit(ALONG_DIM + function, old, new)
        return Mutant(name, (edit,), LAYER, meshes, kind, ("ulysses",), factor)

    backward = "_ALONG_DIM[ctx.backward_name](grad, ctx.group, ctx.dim, ctx.splits)"
    forward = "_ALONG_DIM[forward_name](input_, group, dim, splits)"
    own = (
        "torch.cat([{t} if r == {group}.rank() else {t}.new_zeros([*{t}.shape[:{dim}], n, *{t}.shape[{dim} + 1 :]]) "
        "for r, n in enumerate({splits})], {dim})"
    )
    own_grad = own.format(t="grad", group="ctx.group", dim="ctx.dim", splits="ctx.splits")
    own_input = own.format(t="input_", group="group", dim="dim", splits="splits")
    up, down = "grad * num_ranks", "grad / num_ranks"
    return [
        scale("up dropped", up, "grad", "ulysses⁻¹"),
        scale("up inverted", up, "grad / num_ranks", "ulysses⁻²"),
        scale("up squared", up, "grad * num_ranks**2", "ulysses"),
        scale("up counts the others", up, "grad * (num_ranks - 1)", "ulysses⁻¹ · (ulysses − 1)"),
        scale("up by 2", up, "grad * 2", "2 · ulysses⁻¹", ULYSSES_TO_4),
        scale("down dropped", down, "grad", "ulysses"),
        scale("down inverted", down, "grad * num_ranks", "ulysses²"),
        scale("down squared", down, "grad / num_ranks**2", "ulysses⁻¹"),
        scale("down counts the others", down, "grad / (num_ranks - 1)", "ulysses · (ulysses − 1)⁻¹"),
        scale("down by 2", down, "grad / 2", "0.5 · ulysses", ULYSSES_TO_4),
        share('ctx.grad_scale == "up"'),
        share('ctx.grad_scale == "down"'),
        share("True"),
        wrong(
            "gather of the gradient dropped",
            "_AlongDim.backward",
            backward,
            f'{own_grad} if ctx.backward_name == "gather" else {backward}',
            "scale",
            "ulysses⁻¹",
        ),
        wrong(
            "gather of the gradient doubled",
            "_AlongDim.backward",
            backward,
            f'{backward} * (2 if ctx.backward_name == "gather" else 1)',
            "scale",
            "2",
        ),
        wrong(
            "gather of the output dropped",
            "_AlongDim.forward",
            f"return {forward}",
            f'return {own_input} if forward_name == "gather" else {forward}',
        ),
        wrong(
            "gather in another order",
            "_gather",
            "gathered.split(largest), splits",
            "gathered.split(largest)[::-1], splits",
        ),
        wrong(
            "gather over data",
            "_gather",
            "rows.contiguous(), group",
            f"rows.contiguous(), {DATA_GROUP}",
            meshes=ULYSSES_BESIDE_DATA,
        ),
        wrong("split gives all the first tokens", "_split", "sum(splits[:rank])", "0"),
        wrong(
            "split of the gradient in another order",
            "_AlongDim.backward",
            backward,
            f'{backward.replace("(grad,", "(grad.flip(ctx.dim),")} if ctx.backward_name == "split" else {backward}',
        ),
        wrong(
            "split of the gradient doubled",
            "_AlongDim.backward",
            backward,
            f'{backward} * (2 if ctx.backward_name == "split" else 1)',
            "scale",
            "2",
        ),
    ]


def _megatron() -> list[Mutant]:
    def mutant(
        name: str, place: str, old: str, new: str, kind: Kind, factor: str = "", axis: str | None = "tensor"
    ) -> Mutant:
        step = MegatronStep(sequence_parallel=place.startswith(ALONG_DIM))
        axes = () if axis is None else (axis,)
        return Mutant(name, (Edit(place, old, new),), step, TENSOR, kind, axes, factor)

    forward, backward = "_reduce(input_, group)", "_reduce(grad, ctx.group)"
    scatter = "reduce_scatter_single(reduced, rows.contiguous(), group)"
    along = "_ALONG_DIM[ctx.backward_name](grad, ctx.group, ctx.dim, ctx.splits)"
    is_scatter = 'ctx.backward_name == "reduce_scatter"'
    function = REDUCE + "_CopyReduce."
    return [
        mutant(
            "all-reduce dropped", function + "forward", f"return {forward}", "return input_.clone()", "values"
        ),
        mutant(
            "all-reduce of the gradient dropped",
            function + "backward",
            backward,
            "grad",
            "missing sum",
            "",
            "tensor",
        ),
        mutant(
            "all-reduce twice",
            function + "forward",
            f"return {forward}",
            f"return _reduce({forward}, group)",
            "values",
        ),
        # Doubled on a group of one rank, too: no axis is to blame.
        mutant(
            "all-reduce of the gradient doubled",
            function + "backward",
            backward,
            f"2 * {backward}",
            "scale",
            "2",
            None,
        ),
        mutant(
            "all-reduce of the gradient twice",
            function + "backward",
            backward,
            f"_reduce({backward}, ctx.group)",
            "scale",
            "tensor",
        ),
        mutant(
            "all-reduce of the gradient averages",
            function + "backward",
            backward,
            f"{backward} / ctx.group.size()",
            "scale",
            "tensor⁻¹",
        ),
        mutant(
            "the copied gradient is reduced as well",
            function + "forward",
            "not reduce_forward",
            "True",
            "scale",
            "tensor",
        ),
        mutant(
            "all-reduce over the world",
            REDUCE + "_reduce",
            "reduced, group=group",
            "reduced",
            "values",
            "",
            "data",
        ),
        mutant(
            "reduce-scatter does not reduce",
            ALONG_DIM + "_reduce_scatter",
            scatter,
            "reduced = rows.split(largest)[group.rank()]",
            "values",
        ),
        mutant(
            "reduce-scatter in another order",
            ALONG_DIM + "_reduce_scatter",
            "rows.contiguous(), group",
            "torch.cat(rows.split(largest)[::-1]), group",
            "values",
        ),
        mutant(
            "reduce-scatter of the gradient averages",
            ALONG_DIM + "_AlongDim.backward",
            along,
            f"{along} / (ctx.group.size() if {is_scatter} else 1)",
            "scale",
            "tensor⁻¹",
        ),
        mutant(
            "reduce-scatter of the gradient doubled",
            ALONG_DIM + "_AlongDim.backward",
            along,
            f"{along} * (2 if {is_scatter} else 1)",
            "scale",
            "2",
        ),
        mutant(
            "the gradient is scattered and not summed",
            ALONG_DIM + "_AlongDim.backward",
            along,
            f"_ALONG_DIM['split' if {is_scatter} else ctx.backward_name](grad, ctx.group, ctx.dim, ctx.splits)",
            "values",
        ),
    ]


def _all_to_all() -> list[Mutant]:
    even = AttentionStep("ulysses", heads=6, tokens=12)

    def mutant(
        name: str,
        place: str,
        old: str,
        new: str,
        kind: Kind = "values",
        factor: str = "",
        *,
        step: Any = LAYER,
        axes: tuple[str, ...] = ("ulysses",),
        meshes: Meshes = ULYSSES,
    ) -> Mutant:
        return Mutant(name, (Edit(place, old, new),), step, meshes, kind, axes, factor)

    own = "torch.cat([p * (r == {0}.rank()) for r, p in enumerate({1}.split({2}))])"
    start = "ctx.transfers[1].start(grads)"
    finish = ALL_TO_ALL + "_AllToAll.finish"
    return [
        mutant(
            "all-to-all dropped",
            finish,
            "received = self._received",
            "received = " + own.format("self.group", "self._received", "self._receive_sizes"),
        ),
        mutant("all-to-all doubled", finish, "received = self._received", "received = 2 * self._received"),
        mutant(
            "all-to-all over the world",
            ALL_TO_ALL + "_AllToAll.start",
            "group=self.group",
            "group=dist.group.WORLD",
            "failure",
            axes=("dp_replicate", "ulysses"),
        ),
        mutant(
            "all-to-all over data",
            ALL_TO_ALL + "_AllToAll.start",
            "group=self.group",
            f"group={DATA_GROUP}",
            step=even,
            meshes=ULYSSES_BESIDE_DATA,
        ),
        mutant(
            "heads go to other ranks",
            ALL_TO_ALL + "_AllToAll._pack",
            "pieces[i][to]",
            "pieces[i][-1 - to]",
            step=even,
        ),
        mutant(
            "heads come back in another order",
            ALL_TO_ALL + "_AllToAll._join_pieces",
            "zip(parts, shapes, strict=True)",
            "zip(parts[::-1], shapes, strict=True)",
            step=even,
        ),
        mutant(
            "gradient of one all-to-all doubled",
            TRANSFER + "_Finish.backward",
            start,
            "ctx.transfers[1].start([2 * g for g in grads] if len(grads) == 1 else grads)",
            "scale",
            "2",
        ),
        mutant(
            "gradient of one all-to-all scaled up",
            TRANSFER + "_Finish.backward",
            start,
            "ctx.transfers[1].start([ctx.transfers[1].group.size() * g for g in grads] if len(grads) == 1 else grads)",
            "scale",
            "ulysses",
        ),
        mutant(
            "gradient of every all-to-all averaged",
            TRANSFER + "_Start.backward",
            "*ctx.transfers[1].finish()",
            "*[g / ctx.transfers[1].group.size() for g in ctx.transfers[1].finish()]",
            "scale",
            "ulysses⁻²",
        ),
        mutant(
            "gradient of every all-to-all dropped",
            TRANSFER + "_Start.backward",
            "*ctx.transfers[1].finish()",
            "*[0 * g for g in ctx.transfers[1].finish()]",
        ),
    ]


def _traced() -> list[Mutant]:
    """What torch.compile sees, run without it."""
    traced = Edit(ALL_TO_ALL + "all_to_all_packed", "if torch.compiler.is_compiling():", "if True:")
    call = "all_to_all_single_autograd(sent, receive_sizes, send_sizes, group)"

    def mutant(name: str, new: str) -> Mutant:
        edits = (traced, Edit(TRACED + "all_to_all_traced", call, new))
        return Mutant(f"traced: {name}", edits, DiTStep(), ULYSSES, "values", ("ulysses",))

    own = f"torch.cat([p * (r == rank) for r, p in enumerate({call}.split(receive_sizes))])"
    return [
        mutant("all-to-all dropped", own),
        mutant("all-to-all doubled", f"2 * {call}"),
    ]


def _exchange() -> list[Mutant]:
    def mutant(name: str, function: str, old: str, new: str) -> Mutant:
        edit = Edit(EXCHANGE + function, old, new)
        return Mutant(f"ring exchange: {name}", (edit,), ShiftStep(), ULYSSES, "values", ("ulysses",))

    return [
        mutant("dropped", "_RingExchange.finish", "received = self._received", "received = self._sent"),
        mutant(
            "the other way",
            "ring_exchange_async",
            "_RingExchange(group, shift,",
            "_RingExchange(group, -shift,",
        ),
        mutant(
            "gradient the same way", "_RingExchange.inverse", "-self.shift, self.dim", "self.shift, self.dim"
        ),
    ]


COMMUNICATION_MUTANTS = [*_along_dim(), *_megatron(), *_all_to_all(), *_traced(), *_exchange()]
