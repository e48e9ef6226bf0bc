"""`flex_attention` under a block mask, redirected to sequence-parallel attention by slices of that mask.

Causal video models call `flex_attention(query, key, value, block_mask=…)` on [B, H, S, D], padded to whole blocks of
128. Under sequence parallelism rank 0 of 2 has 150 of 300 tokens, and pads them to 256; the mask still speaks of all
300, and so do its slices:

    query [B, H, 256, D]   →   the rank's own 150   →   attention over all ranks' tokens   →   150, and zeros again

CausVid's and Self-Forcing's code cuts off what it has padded by `out[:, :, :-padded_length]`, which leaves nothing of a
share of 128 tokens, where it had nothing to pad (`out[:, :, :-0]`). There it gets all of them (`_NothingPadded`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_SIGNATURE = inspect.signature(
    lambda query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, **options: None
)


def redirect_flex_attention(
    original: Callable[..., Any],
    running: Callable[[], Callable[..., Tensor] | None],
    splits: Callable[[], tuple[int, ...]],
    rank: int,
) -> Callable[..., Any]:
    """A function that calls `running()` where that is not None, and `original` elsewhere.

    Args:
        splits: every rank's number of tokens, in the forward that runs.

    Raises:
        ValueError: from the returned function, on all ranks, for what slices of a mask do not say.
    """

    @functools.wraps(original)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        attend = running()
        if attend is None:
            return original(*args, **kwargs)
        given = _SIGNATURE.bind(*args, **kwargs).arguments
        for name in ("score_mod", "return_lse", "return_aux"):
            if given.get(name) or given.get("options", {}).get(name):
                raise ValueError(
                    f"flex_attention got {name}, which sequence-parallel attention does not have; leave it out, or "
                    "keep this model on one device a sequence"
                )
        num_own = splits()[rank]
        query, key, value = (
            given[name][:, :, :num_own].transpose(1, 2) for name in ("query", "key", "value")
        )
        out = attend(
            query, key, value, 0.0, mask=given.get("block_mask"), causal=False, scale=given.get("scale")
        )
        out = out.transpose(1, 2)
        padding = given["query"].size(2) - num_own
        if not padding:
            return out.as_subclass(_NothingPadded)
        return torch.nn.functional.pad(out, (0, 0, 0, padding))

    return kernel


class _NothingPadded(Tensor):
    """[B, H, S, D] of a rank that had nothing to pad: `x[:, :, :-0]` is all of it.

    A model's code says that to cut its padding off, and means all of it. What is made of this is a plain tensor.
    """

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def __getitem__(self, index: Any) -> Tensor:
        plain = self.as_subclass(Tensor)
        return plain if index == (slice(None), slice(None), slice(None, 0)) else plain[index]
