"""An MLP over tokens in pieces: its wide hidden layer exists for one piece at a time, also in backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from opensora_accel.wrapping import Forward, wrap_forward


def chunk_tokens(
    module: nn.Module, num_chunks: int, dim: int = -2, *, when: Callable[[], bool] | None = None
) -> Callable[[], None]:
    """Runs `module` on pieces of its first argument, cut along `dim`, one after the other; returns the undo.

    Each piece is recomputed in backward, so that of the hidden layer (4 C wide or more) only 1/`num_chunks` is
    alive; it costs one more forward of the module. Gradients are those of the whole, up to the order in which the
    weights' gradients are summed.

    Args:
        module: must treat every token alone: an MLP, not a norm over tokens or an attention.
        num_chunks: how many pieces; at most one a token.
        dim: of the tokens, by default that of [B, S, C] or [S, C].
        when: says at each forward whether it runs in pieces; by default it always does.

    Raises:
        ValueError: fewer than one chunk, or dropout, whose draws would depend on the chunks.
    """
    if num_chunks < 1:
        raise ValueError(f"num_chunks is a number of pieces, at least 1; got {num_chunks}")
    dropout = [name for name, part in module.named_modules() if isinstance(part, nn.Dropout) and part.p > 0]
    if dropout:
        raise ValueError(
            f"a module with dropout ({', '.join(dropout)}) cannot be run in chunks with the same gradients: "
            "the draws would differ; set its p to 0, or leave the module whole"
        )

    def wrap(original: Forward) -> Forward:
        def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            """hidden: [..., S at dim, ...], run in pieces along dim and joined again."""
            if when is not None and not when():
                return original(hidden, *args, **kwargs)
            run: Forward = original
            if torch.is_grad_enabled():
                # A piece is computed again in backward: the wide hidden layer is in memory for one piece at a time.
                run = partial(torch_checkpoint, original, use_reentrant=False, preserve_rng_state=False)
            pieces = hidden.tensor_split(max(1, min(num_chunks, hidden.size(dim))), dim)
            return torch.cat([run(piece, *args, **kwargs) for piece in pieces], dim)

        return forward

    return wrap_forward(module, wrap)
