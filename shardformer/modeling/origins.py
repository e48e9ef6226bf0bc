"""Finds positions and masks that a model makes for itself inside attention, from the number of tokens it was given.

Where the tokens are split, that number is a rank's own. Of 7 tokens rank 1 of 2 has the last 3, and its attention sees
x: [B, 3, C]. `torch.arange(x.size(1))` gives 0, 1, 2 there, and not 4, 5, 6: every gradient is wrong, nothing fails.

Such a tensor can be told from all others. It has a dim of 3, as many as there are tokens, and nothing that it was made
of has one: no argument of the module, no parameter, no buffer. So every tensor that a first call makes is noted with
the sizes of what it was made of. One made to measure is refused where it meets the tokens. A mask is refused if it also
counts: `torch.ones(3)` is as right on rank 1 as anywhere, `torch.arange(3) < lengths` is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from opensora_accel.arguments import tensors_in


@dataclass(frozen=True)
class _Origin:
    # The sizes of all dims of everything that a tensor was made of.
    sizes: frozenset[int]
    is_of_tokens: bool = False
    # Whether it differs from position to position: stems from a range, or was written to in part.
    counts: bool = False


# What is the same at every position: no rank counts wrongly by it.
_CONSTANT = {torch.ones, torch.zeros, torch.full, torch.empty}


class Origins:
    """What the tensors of one call of an attention module were made of.

    Args:
        name: the module's, for messages.
        counts: how many tokens, and how many frames where shares are of whole frames, this rank has; nothing as soon
            as the model's code asked for its share.
        arguments: what the module was called with. Those with as many rows as tokens hold the tokens, and so does the
            first, in which text may have joined them.
    """

    def __init__(self, name: str, counts: Callable[[], frozenset[int]], arguments: Any):
        self._name, self._counts = name, counts
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()
        for index, tensor in enumerate(tensors_in(arguments)):
            sizes = frozenset(tensor.shape)
            self._known[tensor] = _Origin(sizes, index == 0 or bool(sizes & counts()))

    def note(self, function: Any, inputs: Any, output: Any) -> None:
        """Notes what `function` made of its inputs.

        Raises:
            ValueError: a tensor that was made to measure meets the tokens here.
        """
        tensors = tensors_in(inputs)
        origins = [self._of(each) for each in tensors]
        if any(origin.is_of_tokens for origin in origins):
            # The function has tokens among its inputs: whatever else goes in must not count from a rank's own first.
            for tensor, origin in zip(tensors, origins, strict=True):
                if not origin.is_of_tokens and self._is_made_to_measure(tensor, self._counts()):
                    raise ValueError(self._message(f"a tensor {tuple(tensor.shape)}", "positions"))
        made = _Origin(
            frozenset().union(*(origin.sizes for origin in origins)),
            any(origin.is_of_tokens for origin in origins),
            # Made of nothing, and not constant: torch.arange and its like.
            any(origin.counts for origin in origins) or not (tensors or function in _CONSTANT),
        )
        if function is Tensor.__setitem__:  # what it was filled with before is as constant as padding is
            target, sizes = tensors[0], frozenset().union(*(origin.sizes for origin in origins[1:]))
            self._known[target] = replace(
                made, sizes=sizes, is_of_tokens=self._of(target).is_of_tokens, counts=True
            )
            return
        outputs = tensors_in(output)
        is_filled = function in _CONSTANT or function is F.pad
        # A view of all elements, in one piece or several, cuts dims that its input has: heads of as many channels as
        # there are tokens are no positions. A range may be cut to measure.
        # By their shapes: to ask values that are not projected yet for anything else would project them.
        is_whole = len(tensors) == 1 and sum(_size(each) for each in outputs) == _size(tensors[0])
        for tensor in outputs:
            accounts = is_filled or (is_whole and not made.counts)
            self._known[tensor] = (
                replace(made, sizes=made.sizes | frozenset(tensor.shape)) if accounts else made
            )

    def note_attention(self, out: Tensor) -> None:
        """Notes that attention's output [B, S/P, H, D] is of the tokens, however it was computed."""
        self._known[out] = _Origin(frozenset(out.shape), is_of_tokens=True)

    def check_mask(self, mask: Tensor, num_keys: int) -> None:
        """Refuses a mask [..., S_kv] that was counted out here, for as many keys as this rank has.

        Raises:
            ValueError: it was.
        """
        origin = self._of(mask)
        if (
            origin.counts
            and not origin.is_of_tokens
            and self._is_made_to_measure(mask, frozenset({num_keys}))
        ):
            raise ValueError(self._message(f"a mask {tuple(mask.shape)}", "keys to hide"))

    def _of(self, tensor: Tensor) -> _Origin:
        """Where the sizes of a tensor come from."""
        origin = self._known.get(tensor)
        # A result that no function was seen to make came out of an autograd function: that treats tokens.
        return _Origin(frozenset(tensor.shape), tensor.grad_fn is not None) if origin is None else origin

    def _is_made_to_measure(self, tensor: Tensor, counts: frozenset[int]) -> bool:
        """Whether a tensor has a size in `counts` that its origin does not account for."""
        return bool(frozenset(tensor.shape) & counts - self._of(tensor).sizes)

    def _message(self, what: str, of: str) -> str:
        return (
            f"{self._name} made {what} from the number of tokens it was called with, which is one rank's share: {of} "
            "would count from 0 on every rank. Make them for the whole clip and take this rank's rows, "
            "table[shardformer.local_tokens(len(table))], or name the function that makes them in the policy's "
            "`positions` (docs/policies.md)"
        )


def _size(tensor: Tensor) -> int:
    return math.prod(tensor.shape)
