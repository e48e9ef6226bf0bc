"""A permutation of data between ranks, in flight or finished, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Transfer(Protocol):
    """A permutation of data between ranks; its gradient is the inverse permutation."""

    def start(self, tensors: Sequence[Tensor]) -> None: ...
    def finish(self) -> tuple[Tensor, ...]: ...
    def inverse(self) -> Transfer: ...


class _Start(torch.autograd.Function):
    """Starts the transfer; its output is a token that orders `_Finish` after it, in both directions.

    The token, and not the buffer in flight, passes through autograd: the buffers of the two directions differ in
    size wherever shares are uneven.
    """

    @staticmethod
    def forward(ctx: Any, transfers: list[Transfer], *tensors: Tensor) -> Tensor:
        ctx.transfers = transfers
        transfers[0].start(tensors)
        return tensors[0].new_zeros(())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _token: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.transfers[1].finish()


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transfers: list[Transfer], token: Tensor) -> tuple[Tensor, ...]:
        ctx.transfers, ctx.token = transfers, token.detach()
        return transfers[0].finish()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        ctx.transfers[1].start(grads)
        return None, ctx.token


class Handle:
    """A transfer in flight. `wait()` gives its output; compute that does not need it may run before.

    In backward the transfer of the gradient likewise starts where `wait()` stood and ends where it was started.
    """

    def __init__(self, transfer: Transfer | None, tensors: Sequence[Tensor]):
        self._outputs: tuple[Tensor, ...] | None = tuple(tensors) if transfer is None else None
        if transfer is not None:
            self._transfers = [transfer, transfer.inverse()]
            self._token = _Start.apply(self._transfers, *tensors)

    def wait_all(self) -> tuple[Tensor, ...]:
        if self._outputs is None:
            self._outputs = _Finish.apply(self._transfers, self._token)
        return self._outputs

    def wait(self) -> Tensor:
        return self.wait_all()[0]
