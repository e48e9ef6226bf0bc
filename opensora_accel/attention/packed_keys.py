"""Keys and values in one flat buffer, so that they are one message, with their mask too."""

from __future__ import annotations

import torch
from torch import Tensor


def packed_size(k: Tensor, v: Tensor, mask: Tensor | None) -> int:
    """What a token takes of a packed block: elements of k, with a mask bytes.

    k, v: [B, S_kv, H_kv, D]; mask: [B, S_kv].
    """
    per_token = k.size(2) * (k.size(3) + v.size(3))
    if mask is not None:
        # A token's keys and values, and one byte for its flag.
        per_token = per_token * k.element_size() + 1
    return k.size(0) * per_token


def pack_keys(k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """k, v [B, S_kv/P, H_kv, D] in one flat buffer; with their mask [B, S_kv/P], in one of bytes."""
    # One buffer is one message a hop, whatever is in it. The mask stands last: bytes can be viewed as the
    # dtype of k only from a multiple of its size on, and the front of the buffer is one.
    block = torch.cat([k.reshape(-1), v.reshape(-1)])
    if mask is None:
        return block
    return torch.cat([block.view(torch.uint8), mask.reshape(-1).view(torch.uint8)])


def unpack_keys(
    block: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, num_tokens: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The inverse of `pack_keys`: a flat block → keys, values [B, num_tokens, H_kv, D] and mask [B, num_tokens].

    `k`, `v` and `mask` of this rank have the dtypes and all sizes but the number of tokens.
    """
    key_mask = None
    if mask is not None:
        num_flags = k.size(0) * num_tokens
        key_mask = block[block.numel() - num_flags :].view(torch.bool).view(k.size(0), num_tokens)
        block = block[: block.numel() - num_flags].view(k.dtype)
    return *split_keys(block, k, v, num_tokens), key_mask


def split_keys(block: Tensor, k: Tensor, v: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Views [B, num_tokens, H_kv, D] of keys and values, or of their gradients, in a flat buffer."""
    batch, _, heads, dim = k.shape
    num_keys = batch * num_tokens * heads * dim
    keys, values = block[:num_keys], block[num_keys:]
    return keys.view(batch, num_tokens, heads, dim), values.view(batch, num_tokens, heads, v.size(3))
