"""A model's parameters as the verifier compares them: by the names that they had before anything wrapped them, whole.

A rank may hold all of a parameter, a shard of it (FSDP), rows of it along one dim (Megatron), or none (a pipeline).
Rows are found by the weights' own values, so that a packed projection is put together right. With P = 2 and a weight
that packs q, k and v of four rows each, rank 0 holds rows 0, 1, 4, 5, 8, 9 and rank 1 the others:

    whole        q0 q1 q2 q3 k0 k1 k2 k3 v0 v1 v2 v3
    rank 0       q0 q1       k0 k1       v0 v1          its gradient's rows go to rows 0, 1, 4, 5, 8, 9
    rank 1             q2 q3       k2 k3       v2 v3    its gradient's rows go to rows 2, 3, 6, 7, 10, 11
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import hashlib
import math
import warnings
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor, peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils._pytree import SequenceKey, keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from opensora_accel.observe import PART_AXIS_NAMES, MeshShape, subsets
from opensora_accel.precision import widest
from opensora_accel.verify.fit import TOLERANCE, magnitude

# Under which torch's wrappers keep the module that they wrap; DDP and others call it `module`.
_WRAPPED = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """`model.named_modules()` without what wrappers put into the names.

    A module of the user's own that is called `module` keeps its name, unless nothing lies beside it: then nothing can
    be taken for another.
    """
    seen: set[nn.Module] = set()  # a module that is used twice has the name of its first place

    def visit(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        if module in seen:
            return
        seen.add(module)
        yield name, module
        # A wrapper has one child and nothing of its own.
        is_bare = len(module._modules) == 1 and not any(p is not None for p in module._parameters.values())
        for child_name, child in module.named_children():
            is_wrapped = child_name in _WRAPPED or (child_name == "module" and is_bare)
            yield from visit(child, name if is_wrapped else ".".join(filter(None, [name, child_name])))

    return visit(model, "")


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """`model.named_parameters()` with the names of `named_modules`."""
    seen: set[nn.Parameter] = set()
    for module_name, module in named_modules(model):
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in seen:
                seen.add(parameter)
                yield ".".join(filter(None, [module_name, name])), parameter


def plain_name(name: str, known: Collection[str]) -> str:
    """The one of `known` that `name` is in a wrapper; otherwise `name`."""
    if name in known:
        return name
    plain = ".".join(part for part in name.split(".") if part not in (*_WRAPPED, "module"))
    return plain if plain in known else name


def is_transformed() -> bool:
    """Whether torch.func (grad, jvp, vmap) or forward-mode autograd is at work: a tensor may then stand for several."""
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def plain(tensor: Tensor) -> Tensor:
    """The numbers of a tensor that torch.func may have wrapped, outside of every graph; of `vmap` the batch."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    # Within a transform, what is computed from it would be wrapped again.
    with temporarily_clear_interpreter_stack():
        return tensor.detach().clone()


def whole(tensor: Tensor) -> Tensor:
    """A copy in real fp64 on the CPU: a sharded tensor as a whole, a complex one as two parts [..., 2].

    Communication: an all-gather of a DTensor.
    """
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    tensor = widest(tensor).cpu()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.double().clone()


def digest(tensor: Tensor) -> str:
    """The shape and a hash of the values; of a sharded tensor the whole."""
    values = whole(tensor).flatten()
    # Read where it lies, without numpy, which is not there beside torch alone.
    text = ctypes.string_at(values.data_ptr(), values.nbytes)
    return f"{list(tensor.shape)} {hashlib.sha256(text).hexdigest()}"


def map_tensors(name: str, value: Any, function: Callable[[str, Tensor], Tensor]) -> Any:
    """`value` with `function(name, tensor)` for every tensor in it; itself where nothing has changed.

    Tensors are found in what torch takes apart (lists, dicts, named tuples), in dataclasses, and in what is like a
    dict.
    """

    def map_leaf(name: str, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(name, leaf)
        is_dataclass = dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)
        if is_dataclass:
            values = {
                each.name: (f".{each.name}", getattr(leaf, each.name)) for each in dataclasses.fields(leaf)
            }
        elif isinstance(leaf, MutableMapping):
            values = {key: (f"[{key!r}]", item) for key, item in leaf.items()}
        else:
            return leaf
        mapped = {key: map_tensors(name + path, item, function) for key, (path, item) in values.items()}
        if all(mapped[key] is item for key, (_, item) in values.items()):
            return leaf
        changed = copy.copy(leaf)
        for key, item in mapped.items():
            if is_dataclass:
                object.__setattr__(changed, key, item)  # a frozen one, too
            else:
                changed[key] = item
        return changed

    try:
        leaves, structure = tree_flatten_with_path(value)
    except ValueError:  # a type that is registered without names of what is in it, as diffusers' outputs are
        plain_leaves, structure = tree_flatten(value)
        leaves = [((SequenceKey(place),), leaf) for place, leaf in enumerate(plain_leaves)]
    mapped = [map_leaf(name + keystr(path), leaf) for path, leaf in leaves]
    if all(new is old for new, (_, old) in zip(mapped, leaves, strict=True)):
        return value
    return tree_unflatten(mapped, structure)


class FlatParameters:
    """The parameters of `model` that FSDP1 has flattened; `made` are the FSDP1 modules that the step made."""

    def __init__(self, model: nn.Module, made: Sequence[FullyShardedDataParallel], names: Sequence[str]):
        self._names = names
        self._prefix_of: dict[FullyShardedDataParallel, str] = {}
        name_of = {module: name for name, module in model.named_modules()}
        each = dict.fromkeys([*made, *(m for m in name_of if isinstance(m, FullyShardedDataParallel))])
        for root in each:
            # Only those that lie in no other one, with their place in the model, if they do not stand around it.
            is_inner = any(root is not other and root in set(other.modules()) for other in each)
            if not is_inner and (root in name_of or root.module is model):
                self._prefix_of[root] = f"{name_of[root]}." if name_of.get(root) else ""
        self._ids = {id(parameter) for root in self._prefix_of for parameter in root.parameters()}

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._ids

    def whole(self, read: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor]:
        """What `read` finds at each flat parameter [N/P], by the names and in the shapes of before.

        The state dict of an optimizer is what FSDP1 knows to take apart: here of one whose state is `read`.

        Communication: an all-gather for each FSDP1 module.
        """
        pieces: dict[str, Tensor] = {}
        for root, prefix in self._prefix_of.items():
            # It never steps: it only holds one value for each parameter.
            optimizer = torch.optim.SGD(root.parameters(), lr=0.0)
            for parameter in root.parameters():
                value = read(parameter)
                if value is not None:
                    optimizer.state[parameter]["value"] = value.detach().clone()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it warns that it will be replaced some day
                state_dict = FullyShardedDataParallel.full_optim_state_dict(root, optimizer, rank0_only=False)
            for name, state in state_dict["state"].items():
                if "value" in state:
                    pieces[plain_name(prefix + name, self._names)] = whole(state["value"])
        return pieces


def match_rows(part: Tensor, whole: Tensor, dim: int) -> Tensor:
    """Which row of `part` [..., R, ...] is which of `whole` [..., N, ...] along `dim`: bool [R, N].

    Rows are told apart by their products with a few random vectors: comparing each with each would take too long.
    """
    if not part.numel() or not whole.numel():
        return torch.zeros(part.size(dim), whole.size(dim), dtype=torch.bool)
    # mine: [R, columns], all_: [N, columns]
    mine, all_ = (each.movedim(dim, 0).reshape(each.size(dim), -1) for each in (part, whole))
    # [columns, 3]: that two different rows agree on all three is as good as impossible.
    vectors = torch.randn(all_.size(1), 3, dtype=all_.dtype, generator=torch.Generator().manual_seed(0))
    limit = TOLERANCE * magnitude(whole) * math.sqrt(all_.size(1))
    return ((mine @ vectors)[:, None] - all_ @ vectors).abs().amax(-1) <= limit


def join_shares(
    shape: MeshShape, gradients: Sequence[Tensor | None], weights: Sequence[Tensor | None], whole: Tensor
) -> tuple[Tensor, ...] | None:
    """Every rank's gradient in the shape of `whole`, with the shares of ranks that differ along the fewest axes.

    None where a gradient is no part of one, where shares overlap, or leave something out. What a rank lacks
    altogether is not taken from another data rank.

    Args:
        gradients: of what each rank holds: [R, C] of a parameter [N, C], for example; None where it holds nothing.
        weights: the parameter's values that each rank holds, in its gradient's shape.
        whole: all values of the parameter.
    """
    places: list[
        tuple[int, Tensor] | None
    ] = []  # the dim and the rows of it, where a rank has not all of them
    for gradient, weight in zip(gradients, weights, strict=True):
        if gradient is None or gradient.shape == whole.shape:
            places.append(None)
            continue
        if weight is None or weight.shape != gradient.shape or weight.dim() != whole.dim():
            return None
        # A slice is smaller along one dim; a rank with fewer of two dims holds something else.
        dims = [dim for dim in range(whole.dim()) if weight.size(dim) != whole.size(dim)]
        if len(dims) != 1:
            return None
        matches = match_rows(weight, whole, dims[0])
        if not bool((matches.sum(1) == 1).all()):
            return None
        places.append((dims[0], matches.int().argmax(1)))
    axes = shape.used(shape.axes)
    # Another replica's gradient does not stand for one that is missing: that is a mistake to be named.
    if any(gradient is None for gradient in gradients):
        axes = tuple(axis for axis in axes if axis not in shape.data_axes or axis in PART_AXIS_NAMES)
    # The fewest axes that make it whole: ranks along the others have replicas, which are compared, not joined.
    for some in subsets(axes):
        joined: dict[int, Tensor] = {}
        for ranks in shape.groups(some):
            together = _join_group([(gradients[rank], places[rank]) for rank in ranks], whole)
            if together is None:
                break
            joined |= dict(zip(ranks, together, strict=True))
        else:
            return tuple(joined[rank] for rank in range(shape.world_size))
    return None


def _join_group(
    shares: Sequence[tuple[Tensor | None, tuple[int, Tensor] | None]], whole: Tensor
) -> list[Tensor] | None:
    """Every rank's gradient, in the shape of `whole`, from shares: all of it, or a slice with its dim and rows [N]."""
    # Either some ranks have all of it, and those that lack it are given theirs, or all have slices.
    complete = [gradient for gradient, place in shares if gradient is not None and place is None]
    slices = [(gradient, *place) for gradient, place in shares if gradient is not None and place is not None]
    if complete:
        return None if slices else [complete[0] if g is None else g for g, _ in shares]
    if len({dim for _, dim, _ in slices}) != 1:
        return None
    rows = torch.cat([rows for _, _, rows in slices])
    # Every row once.
    if rows.sort().values.tolist() != list(range(whole.size(slices[0][1]))):
        return None
    joined = torch.empty_like(whole)
    for gradient, dim, own in slices:
        joined.index_copy_(dim, own, gradient)
    return [joined] * len(shares)
