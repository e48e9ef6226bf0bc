"""Gradients as they are when a clip function finds them: afterwards they all have the same norm."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel

from opensora_accel.wrapping import replaced

ClipKind = Literal["norm", "value"]


@contextlib.contextmanager
def before_clipping(see: Callable[[ClipKind, float, Sequence[Tensor]], None]) -> Iterator[None]:
    """Within it, `see(how, limit, parameters)` is called before torch's clip functions change a gradient.

    accelerate, lightning and others call these; FSDP1 has a method of its own. A clip written by hand is not seen.
    """

    def seen_first(how: ClipKind, clip: Any) -> Any:
        def call(parameters: Any, limit: float, *args: Any, **kwargs: Any) -> Any:
            given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            see(how, float(limit), given)
            return clip(given, limit, *args, **kwargs)

        return call

    # Not by torch's functions: its parameters are flat, and their norms are added up over ranks.
    clip_of_fsdp1 = FullyShardedDataParallel.clip_grad_norm_

    def by_fsdp1(self: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
        see("norm", float(max_norm), list(self.parameters()))
        return clip_of_fsdp1(self, max_norm, *args, **kwargs)

    functions: list[tuple[ClipKind, Any]] = [
        ("norm", torch.nn.utils.clip_grads_with_norm_),
        ("value", torch.nn.utils.clip_grad_value_),
    ]
    with contextlib.ExitStack() as stack:
        for how, function in functions:
            # Others may have imported it by its name. torch decorates its clip functions: the one that does the work
            # lies in a cell of what they have, and is exchanged there.
            (cell,) = (c for c in function.__closure__ if c.cell_contents is function.__wrapped__)
            stack.callback(setattr, cell, "cell_contents", cell.cell_contents)
            cell.cell_contents = seen_first(how, cell.cell_contents)
        stack.enter_context(replaced(FullyShardedDataParallel, "clip_grad_norm_", by_fsdp1))
        yield
