"""All-to-all: one `all_to_all_single` around one permutation, for sizes that need not divide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from opensora_accel.communications.checks import check_agreement, check_dim, check_group
from opensora_accel.communications.sizes import splits_of_locals, splits_of_total
from opensora_accel.communications.traced import all_to_all_traced
from opensora_accel.communications.transfer import Handle
from opensora_accel.communications.waiting import waiting


@dataclass(frozen=True)
class _Route:
    """How one tensor travels: `scatter_dim` is cut by `scatter_splits`, parts of `gather_dim` are joined."""

    scatter_dim: int
    gather_dim: int
    scatter_splits: tuple[int, ...]
    gather_splits: tuple[int, ...]

    def inverse(self) -> _Route:
        return _Route(self.gather_dim, self.scatter_dim, self.gather_splits, self.scatter_splits)


class _AllToAll:
    """One `all_to_all_single` around one permutation, for any number of tensors.

    What goes to a rank is laid out with `gather_dim` first, as rows; tensors with equal row counts lie side by
    side. What arrives is then already in order: the outputs are views of the receive buffer. A single tensor whose
    `gather_dim` is the inner one travels in pieces as they lie instead, and these are joined on arrival: that
    copies longer runs of memory, and where nothing stands before `scatter_dim` (a batch of one) only once.
    """

    def __init__(self, group: dist.ProcessGroup, routes: Sequence[_Route]):
        self.group = group
        self.routes = tuple(routes)

    def inverse(self) -> _AllToAll:
        return _AllToAll(self.group, [route.inverse() for route in self.routes])

    def start(self, tensors: Sequence[Tensor]) -> None:
        num_ranks, rank = self.group.size(), self.group.rank()
        # Row length of each tensor towards each rank, and of what arrives here: facts of the shapes alone.
        self._send_shapes = [_rest_shapes(t, r) for t, r in zip(tensors, self.routes, strict=True)]
        self._bundles = _bundles(self.routes)
        self._joins = len(tensors) == 1 and self.routes[0].gather_dim > self.routes[0].scatter_dim
        send_sizes = [
            sum(
                r.gather_splits[rank] * s[to].numel()
                for r, s in zip(self.routes, self._send_shapes, strict=True)
            )
            for to in range(num_ranks)
        ]
        receive_sizes = [
            sum(
                r.gather_splits[of] * s[rank].numel()
                for r, s in zip(self.routes, self._send_shapes, strict=True)
            )
            for of in range(num_ranks)
        ]
        if self._joins:
            self._sent = _in_pieces(tensors[0], self.routes[0])
        else:
            self._sent = self._pack(tensors, sum(send_sizes))
        self._received = tensors[0].new_empty(sum(receive_sizes))
        self._receive_sizes = receive_sizes
        with waiting("all_to_all", self.group):
            self._work = dist.all_to_all_single(
                self._received, self._sent, receive_sizes, send_sizes, group=self.group, async_op=True
            )

    def _pack(self, tensors: Sequence[Tensor], num_elements: int) -> Tensor:
        rank = self.group.rank()
        buffer = tensors[0].new_empty(num_elements)
        pieces = [t.split(r.scatter_splits, r.scatter_dim) for t, r in zip(tensors, self.routes, strict=True)]
        position = 0
        for to in range(self.group.size()):
            for bundle in self._bundles:
                rows = self.routes[bundle[0]].gather_splits[rank]
                lengths = [self._send_shapes[i][to].numel() for i in bundle]
                area = buffer[position : position + rows * sum(lengths)].view(rows, sum(lengths))
                position += area.numel()
                for i, columns in zip(bundle, area.split(lengths, 1), strict=True):
                    source = pieces[i][to].movedim(self.routes[i].gather_dim, 0)
                    columns.view(source.shape).copy_(source)
        return buffer

    def finish(self) -> tuple[Tensor, ...]:
        with waiting("all_to_all", self.group):
            self._work.wait()
        received = self._received
        if self._joins:
            outputs = [self._join_pieces(received)]
        elif len(self._bundles) == 1:
            outputs = self._unpack_bundle(received, self._bundles[0])
        else:
            outputs = self._unpack_bundles(received)
        del self._sent, self._received, self._work
        return tuple(outputs)

    def _join_pieces(self, received: Tensor) -> Tensor:
        route, rank = self.routes[0], self.group.rank()
        rest = list(self._send_shapes[0][rank])
        shapes = [rest[: route.gather_dim] + [n] + rest[route.gather_dim :] for n in route.gather_splits]
        parts = received.split(self._receive_sizes)
        return torch.cat(
            [part.view(shape) for part, shape in zip(parts, shapes, strict=True)], route.gather_dim
        )

    def _unpack_bundle(self, received: Tensor, bundle: Sequence[int]) -> list[Tensor]:
        rank = self.group.rank()
        lengths = [self._send_shapes[i][rank].numel() for i in bundle]
        rows = sum(self.routes[bundle[0]].gather_splits)
        columns = received.view(rows, sum(lengths)).split(lengths, 1)
        return [
            _alias(part.view(rows, *self._send_shapes[i][rank]).movedim(0, self.routes[i].gather_dim))
            for i, part in zip(bundle, columns, strict=True)
        ]

    def _unpack_bundles(self, received: Tensor) -> list[Tensor]:
        """Several row counts: each bundle's rows are first brought together from all the ranks' messages."""
        rank = self.group.rank()
        lengths = [sum(self._send_shapes[i][rank].numel() for i in bundle) for bundle in self._bundles]
        outputs: list[Tensor] = [received] * len(self.routes)
        sizes = [
            self.routes[bundle[0]].gather_splits[of] * length
            for of in range(self.group.size())
            for bundle, length in zip(self._bundles, lengths, strict=True)
        ]
        parts = received.split(sizes)
        for index, bundle in enumerate(self._bundles):
            joined = torch.cat(parts[index :: len(self._bundles)])
            for i, output in zip(bundle, self._unpack_bundle(joined, bundle), strict=True):
                outputs[i] = output
        return outputs


def _rest_shapes(tensor: Tensor, route: _Route) -> list[torch.Size]:
    """For every rank: the shape of its piece, without `gather_dim`."""
    shapes = []
    for size in route.scatter_splits:
        shape = list(tensor.shape)
        shape[route.scatter_dim] = size
        del shape[route.gather_dim]
        shapes.append(torch.Size(shape))
    return shapes


def _bundles(routes: Sequence[_Route]) -> list[list[int]]:
    """Indices of the tensors with equal row counts, in order of first appearance."""
    bundles: dict[tuple[int, ...], list[int]] = {}
    for index, route in enumerate(routes):
        bundles.setdefault(route.gather_splits, []).append(index)
    return list(bundles.values())


def _in_pieces(tensor: Tensor, route: _Route) -> Tensor:
    """The pieces of `scatter_dim` one after the other, each as it lies; no copy where they already do."""
    if all(size == 1 for size in tensor.shape[: route.scatter_dim]):
        return tensor.contiguous().view(-1)
    buffer, position = tensor.new_empty(tensor.numel()), 0
    for piece in tensor.split(route.scatter_splits, route.scatter_dim):
        buffer[position : position + piece.numel()].view(piece.shape).copy_(piece)
        position += piece.numel()
    return buffer


def _alias(view: Tensor) -> Tensor:
    """The same memory as a tensor of its own: the outputs of one buffer may be changed in place."""
    return view.new_empty(0).set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())


def all_to_all(
    input_: Tensor,
    process_group: dist.ProcessGroup | None,
    scatter_dim: int = 2,
    gather_dim: int = 1,
    *,
    splits: Sequence[int] | None = None,
) -> Tensor:
    """This rank's share of `scatter_dim` and all of `gather_dim`.

    Args:
        input_: [..., G/P at gather_dim, ..., N at scatter_dim, ...].
        process_group: the P ranks; None is the world, as in torch.
        scatter_dim: cut by the rule of `torch.tensor_split`.
        gather_dim: its parts may differ in size between ranks.
        splits: every rank's size of `gather_dim`, where the caller knows them. Otherwise they are exchanged
            (one integer per rank), see `cached_sizes`.

    Returns:
        [..., G at gather_dim, ..., N/P at scatter_dim, ...], contiguous, as code written for Open-Sora expects: it
        calls `view` on it. `all_to_all_packed` gives the same numbers without that last copy.

    Communication: one `all_to_all_single`, (P−1)/P of the input's bytes sent. Gradient: the inverse all-to-all,
    unscaled. Raises ValueError for dims that are out of range or equal, and for splits that do not fit.
    """
    (output,) = all_to_all_packed([input_], process_group, scatter_dim, gather_dim, splits=[splits])
    return output.contiguous()


def all_to_all_async(
    input_: Tensor,
    process_group: dist.ProcessGroup | None,
    scatter_dim: int = 2,
    gather_dim: int = 1,
    *,
    splits: Sequence[int] | None = None,
) -> Handle:
    """`all_to_all` in flight; `.wait()` gives its output. The backward is asynchronous likewise."""
    return _launch([input_], process_group, scatter_dim, gather_dim, [splits], [None])


def all_to_all_packed(
    tensors: Sequence[Tensor],
    process_group: dist.ProcessGroup | None,
    scatter_dim: int = 2,
    gather_dim: int = 1,
    *,
    splits: Sequence[Sequence[int] | None] | None = None,
    scatter_splits: Sequence[Sequence[int] | None] | None = None,
) -> tuple[Tensor, ...]:
    """`all_to_all` of several tensors of one dtype in a single collective.

    Args:
        tensors: they may differ in every size.
        splits: for each tensor, every rank's size of `gather_dim`, or None.
        scatter_splits: for each tensor, every rank's share of `scatter_dim`, or None for the default rule.

    Returns:
        The tensors as `all_to_all` gives them, not always contiguous: they may be views of what was received.
    """
    if len({tensor.dtype for tensor in tensors}) != 1:
        raise ValueError(
            f"tensors packed into one all-to-all must share one dtype; got {[str(t.dtype) for t in tensors]}"
        )
    nothing = [None] * len(tensors)
    splits, scatter_splits = splits or nothing, scatter_splits or nothing
    if torch.compiler.is_compiling():
        group = check_group(process_group)
        return all_to_all_traced(tensors, group, scatter_dim, gather_dim, splits, scatter_splits)
    return _launch(tensors, process_group, scatter_dim, gather_dim, splits, scatter_splits).wait_all()


def _launch(
    tensors: Sequence[Tensor],
    process_group: dist.ProcessGroup | None,
    scatter_dim: int,
    gather_dim: int,
    splits: Sequence[Sequence[int] | None],
    scatter_splits: Sequence[Sequence[int] | None],
) -> Handle:
    group = check_group(process_group)
    scatter_dim, gather_dim = _check_dims(tensors, scatter_dim, gather_dim)
    scattered = [
        splits_of_total(tensor.size(scatter_dim), given, group, scatter_dim)
        for tensor, given in zip(tensors, scatter_splits, strict=True)
    ]
    for tensor in tensors:
        check_agreement(
            "all_to_all", tensor, group, gather_dim, f"scatter_dim={scatter_dim}", f"gather_dim={gather_dim}"
        )
    gathered = splits_of_locals(tensors, splits, group, gather_dim)
    if group.size() == 1:
        return Handle(None, tensors)
    routes = [_Route(scatter_dim, gather_dim, s, g) for s, g in zip(scattered, gathered, strict=True)]
    return Handle(_AllToAll(group, routes), tensors)


def _check_dims(tensors: Sequence[Tensor], scatter_dim: int, gather_dim: int) -> tuple[int, int]:
    for tensor in tensors:
        dims = check_dim("scatter_dim", scatter_dim, tensor), check_dim("gather_dim", gather_dim, tensor)
        if dims[0] == dims[1]:
            raise ValueError(f"scatter_dim and gather_dim must differ; both are dim {dims[0]}")
    return dims
