"""Parameters that the loss reaches and the model does not have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn


class Leaves:
    """The trained parameters that every backward reached, in the order of their discovery."""

    def __init__(self) -> None:
        self._found: dict[int, nn.Parameter] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        backward = torch.autograd.backward

        def watched(tensors: Any, *args: Any, **kwargs: Any) -> None:
            self._walk([tensors] if isinstance(tensors, Tensor) else list(tensors))
            backward(tensors, *args, **kwargs)

        with mock.patch.object(torch.autograd, "backward", watched):
            yield

    def _walk(self, tensors: Sequence[Tensor]) -> None:
        ahead: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        seen = set(ahead)
        while ahead:
            node = ahead.pop()
            leaf = getattr(node, "variable", None)  # where gradients are accumulated
            if isinstance(leaf, nn.Parameter):
                self._found.setdefault(id(leaf), leaf)
            following = {next_ for next_, _ in node.next_functions if next_ is not None} - seen
            seen |= following
            ahead += following

    def outside(self, model: nn.Module) -> list[nn.Parameter]:
        """Those that are none of `model`'s."""
        mine = {id(parameter) for parameter in model.parameters()}
        return [parameter for key, parameter in self._found.items() if key not in mine]
