"""A model's parameters as the verifier compares them: by the names they had before anything wrapped them, whole, in
numbers of twice the usual width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_WRAPPED = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")
"""Under which torch's wrappers keep the module that they wrap; DDP and others call it `module`."""


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """`model.named_modules()` without what wrappers put into the names, as those of what they wrap.

    A module of the user's own that is called `module` keeps its name, unless nothing lies beside it: then nothing can
    be taken for another.
    """
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        if module in seen:
            return
        seen.add(module)
        yield name, module
        is_bare = len(module._modules) == 1 and not any(p is not None for p in module._parameters.values())
        for child_name, child in module.named_children():
            is_wrapped = child_name in _WRAPPED or (child_name == "module" and is_bare)
            yield from visit(child, name if is_wrapped else ".".join(filter(None, [name, child_name])))

    return visit(model, "")


def named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """`model.named_parameters()` with such names."""
    seen: set[nn.Parameter] = set()
    for module_name, module in named_modules(model):
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in seen:
                seen.add(parameter)
                yield ".".join(filter(None, [module_name, name])), parameter


def plain_name(name: str, known: Collection[str]) -> str:
    """One of `known`, where `name` is that in a wrapper; otherwise `name`."""
    if name in known:
        return name
    parts = [part for part in name.split(".") if part not in (*_WRAPPED, "module")]
    return found if (found := ".".join(parts)) in known else name


def widest(tensor: Tensor) -> Tensor:
    """In fp64, or complex of two; whole numbers as they are."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def whole(tensor: Tensor) -> Tensor:
    """A copy in real fp64 on the CPU: of a sharded tensor all of it, of a complex one both parts [..., 2].

    Communication: an all-gather of a DTensor.
    """
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    tensor = widest(tensor).cpu()
    return (
        torch.view_as_real(tensor.resolve_conj()).clone() if tensor.is_complex() else tensor.double().clone()
    )


def digest(tensor: Tensor) -> str:
    """Of shape and values; of a sharded tensor, the whole."""
    values = whole(tensor).flatten()  # a copy: numpy would pin a storage that FSDP2 frees
    found = hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).hexdigest()
    return f"{list(tensor.shape)} {found}"
