"""What a model passes as `attn_mask`, as sequence-parallel attention can use it.

Models build their mask before the tokens are split or after, over keys alone or over queries and keys, as bool or as
a bias of 0 and −10000. Nearly all of them say the same: some keys are padding.

One sample of 5 tokens, of which the last is padding, on P = 2 ranks. The model may pass a mask over all keys,
[1, 1, 1, 5]; one over its own, [1, 1, 1, 3] on rank 0 and [1, 1, 1, 2] on rank 1; or one over queries and keys,
[1, 1, 5, 5]. All of them become this rank's part of the key mask: 1 1 1 on rank 0 and 1 0 on rank 1. What says more
than padding (a causal mask, a bias) cannot be cut by keys; it is kept whole in its columns, for `gathered_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shardformer.modeling.flash_attn import Lengths

# A bias from here on hides a key: exp(−10000) is 0 in every dtype.
HIDDEN = -10000.0

Kind = Literal["keys", "padding", "any"]


@dataclass(frozen=True)
class Extent:
    """Tokens along one dim of a mask: video that is spread over ranks, and text that every rank has."""

    rank: int
    # Every rank's number of video tokens.
    splits: tuple[int, ...]
    num_text: int = 0
    text_first: bool = False

    @property
    def own(self) -> slice:
        """This rank's video tokens among all."""
        return slice(sum(self.splits[: self.rank]), sum(self.splits[: self.rank + 1]))

    @property
    def num_video(self) -> int:
        return sum(self.splits)

    @property
    def num_local(self) -> int:
        return self.own.stop - self.own.start + self.num_text

    @property
    def num_whole(self) -> int:
        return self.num_video + self.num_text

    def cut(self, mask: Tensor, dim: int) -> Tensor:
        """This rank's part of a mask over all tokens: [..., S at dim, ...] → [..., S/P + text at dim, ...]."""
        start = self.num_text if self.text_first else 0
        video = mask.narrow(dim, start + self.own.start, self.own.stop - self.own.start)
        if not self.num_text:
            return video
        text = mask.narrow(dim, 0 if self.text_first else self.num_video, self.num_text)
        return torch.cat([text, video] if self.text_first else [video, text], dim)


@dataclass(frozen=True)
class Mask:
    """Keys that may be seen, [B, S_kv/P + T], and queries that see any, [B, S_q/P + T]; or else `bias`.

    `bias` is [B or 1, H or 1, S_q/P + T, S_kv + T], bool or added to the scores: this rank's queries and all keys.
    """

    keys: Tensor | None = None
    queries: Tensor | None = None
    bias: Tensor | None = None


class MaskReader:
    """Reads the masks of one attention module.

    What kind of mask has which shape is looked up at the first call and asserted from then on, because looking makes
    the host wait for the device. The ranks must decide alike, or they would communicate differently. So a kind is
    decided by what all of them have: a mask over all keys, never a rank's own rows of it.
    """

    def __init__(self, name: str):
        self.name = name
        self._kinds: dict[tuple[object, ...], Kind] = {}

    def read(
        self,
        mask: Tensor | Lengths | None,
        batch: int,
        queries: Extent,
        keys: Extent,
        device: torch.device | None = None,
    ) -> Mask:
        """What a mask [B or 1, H or 1, S_q or 1, S_kv] means, in fewer dims too, or lengths.

        Raises:
            ValueError: the mask fits neither this rank's tokens nor all of them.
        """
        if isinstance(mask, Lengths):
            mask = self._mask_of_lengths(mask, queries, keys, device)
        if mask is None:
            return Mask()
        mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))  # [B or 1, H or 1, S_q or 1, S_kv]
        num_rows, num_columns = mask.shape[2:]
        rows_fit = num_rows in (1, queries.num_local, queries.num_whole)
        if not rows_fit or num_columns not in (keys.num_local, keys.num_whole):
            raise ValueError(
                f"{self.name} got a mask of {tuple(mask.shape)}; sequence-parallel attention takes one over this "
                f"rank's tokens, [B, 1, 1 or {queries.num_local}, {keys.num_local}], or over all, "
                f"[B, 1, 1 or {queries.num_whole}, {keys.num_whole}]"
            )
        has_all_keys = num_columns == keys.num_whole
        is_cut = num_rows not in (1, queries.num_whole)
        if num_rows > 1 and not is_cut and not has_all_keys and num_rows != queries.num_local:
            raise ValueError(
                f"{self.name} got a mask over all queries and this rank's keys, {tuple(mask.shape)}; leave it whole: "
                "attention takes this rank's part of it"
            )
        # Rows that are cut differ from rank to rank, so nothing is decided by them. A mask with a gradient is a bias.
        kind = "any" if has_all_keys and (is_cut or mask.requires_grad) else self._kind(mask, has_all_keys)
        if kind == "any":
            if num_rows == queries.num_whole:
                mask = queries.cut(mask, 2)
            return Mask(bias=mask)
        # From here on it is padding. A key is seen if any query sees it, and a query asks if it sees any key.
        visible = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] == 0
        seen = visible.any(1) if num_rows > 1 else visible[:, 0]
        asking = visible.any(2) if kind == "padding" else None
        if has_all_keys:
            seen = keys.cut(seen, 1)
        if asking is not None and num_rows == queries.num_whole:
            asking = queries.cut(asking, 1)
        return Mask(
            seen.expand(batch, -1),
            None if asking is None else asking.expand(batch, -1),
        )

    def _mask_of_lengths(
        self, lengths: Lengths, queries: Extent, keys: Extent, device: torch.device | None
    ) -> Tensor | None:
        """The mask [B, 1, 1, S_kv + T] that lengths mean, or None where all is seen.

        All ranks decide alike, because they decide by numbers that are equal on all of them.
        """
        visible, total = lengths.visible, lengths.total
        if lengths.queries is not None and set(lengths.queries) != {queries.num_whole}:
            raise ValueError(
                f"{self.name} got q_lens {list(lengths.queries)}, but samples have {queries.num_whole} queries, which "
                "must all be there; leave q_lens out, and hide keys by k_lens"
            )
        if visible is None:
            return None
        if total is None:
            num_seen = visible
            # Lengths that could be a rank's own share of a clip cannot be told from those of short clips.
            if set(visible) <= {size + keys.num_text for size in keys.splits}:
                raise ValueError(
                    f"{self.name} got lengths {list(visible)}, which may be of whole samples of {keys.num_whole} "
                    "tokens or of what one rank has of them; leave them out where nothing is padded, or pad all "
                    "samples to the longest one's length"
                )
        else:
            # Padding stands last, so that as much of it is there whether the tokens were counted split or whole.
            hidden = [total - seen for seen in visible]
            num_seen = tuple(keys.num_whole - count for count in hidden)
            if max(hidden) > (0 if keys.text_first else keys.num_text):
                raise ValueError(
                    f"{self.name} got packed samples with {list(visible)} of {total} tokens seen. In such a kernel "
                    "padding attends to itself, which is known here of text that stands last alone; pass clips "
                    "without padding"
                )
        if total not in (None, keys.num_local, keys.num_whole) or not 0 < max(num_seen) <= keys.num_whole:
            raise ValueError(
                f"{self.name} got samples of {list(visible)}{'' if total is None else f' of {total}'} tokens, but they "
                f"have {keys.num_whole}, and this rank {keys.num_local} of them"
            )
        if min(num_seen) == keys.num_whole:
            return None
        # One comparison a sample, because a tensor of the lengths would be copied to the device, which waits for that.
        index = torch.arange(keys.num_whole, device=device)
        return torch.stack([index < end for end in num_seen])[:, None, None]

    def _kind(self, mask: Tensor, has_all_keys: bool) -> Kind:
        """What a mask [B, H or 1, S_q or 1, S_kv] says, as found the first time for its dtype and shape."""
        key = mask.dtype, *mask.shape[1:]
        plain: Kind = "keys" if mask.size(2) == 1 else "padding"
        known = self._kinds.get(key)
        if known == "any":
            return known
        if plain == "keys" and mask.dtype == torch.bool and mask.size(1) == 1:
            return plain  # such a mask can say nothing else
        is_plain = _is_plain(mask, has_all_keys)
        if known is not None:
            # Unnamed in a graph, which else would serve this one module alone.
            name = "attention" if torch.compiler.is_compiling() else self.name
            torch._assert_async(
                is_plain,
                f"{name} got masks of two kinds in one shape; call shardformer.unshard, and shard again",
            )
            return known
        # One wait for the device, for both answers.
        hides, says_nothing = torch.stack(
            [is_plain, (mask if mask.dtype == torch.bool else mask == 0).all()]
        ).tolist()
        if hides:
            # A mask of queries and keys that hides nothing says nothing of the next one.
            if plain == "keys" or not says_nothing:
                self._kinds[key] = plain
            return plain
        if not has_all_keys:
            raise ValueError(
                f"{self.name} got a mask over this rank's tokens that is more than padding ({mask.dtype}, "
                f"{tuple(mask.shape)}); pass one over all tokens, or none"
            )
        self._kinds[key] = "any"
        return "any"


def _is_plain(mask: Tensor, has_all_keys: bool) -> Tensor:
    """Whether a mask [B, H or 1, S_q or 1, S_kv] says only that some queries and keys are padding; a bool scalar."""
    visible, is_plain = mask, torch.full((), not mask.requires_grad, device=mask.device)
    if mask.dtype != torch.bool:
        visible = mask == 0
        is_plain = is_plain & (visible | (mask <= HIDDEN)).all()
        if has_all_keys:  # where a bias hides all, a softmax that ignores shifts shows all
            is_plain = is_plain & visible.any(-1).all()
    if mask.size(1) > 1:
        is_plain = is_plain & (visible == visible[:, :1]).all()
    visible = visible[:, 0]
    # Padding is an outer product: queries that ask times keys that are seen.
    padding = visible.any(2, keepdim=True) & visible.any(1, keepdim=True)
    return is_plain & (visible == padding).all() if mask.size(2) > 1 else is_plain
