"""How much memory a function's backward needs: counted, not measured, so that it is the same in every run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def run_and_count(
    function: Callable[[], Tensor], inputs: Sequence[Tensor], num_tokens: int
) -> tuple[Tensor, int]:
    """The output, and the bytes a token that autograd keeps for its backward, beside `inputs`.

    A tensor counts if its size is a multiple of `num_tokens`: take a prime that divides no other size.
    """
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.numel() % num_tokens == 0:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
        out = function()
    for tensor in inputs:
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    return out, sum(kept.values()) // num_tokens
