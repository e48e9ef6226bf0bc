"""Numbers of tokens that a model's modules get, for policies whose functions change them.

The first 4 of 7 tokens are a given frame's, and blocks get `num_tokens = 4`. On P = 3 ranks, which hold tokens 0 1 2,
3 4 and 5 6, the first 3 of rank 0's tokens are, the first 1 of rank 1's, and none of rank 2's.
"""

from __future__ import annotations

import inspect

from torch import nn

from opensora_accel.arguments import Arguments, change_at
from shardformer.spread import Spread


def count_own(spread: Spread, module: str, argument: str, *, last: bool = False, text: bool = False) -> None:
    """A number of tokens, counted from the first, becomes the number of those that are in this rank's share.

    Args:
        module: the path of modules. Those whose forward has no such argument are passed over: blocks of a model differ
            in it.
        argument: the number's name, or its path into an argument.
        last: it is counted from the last token.
        text: it counts all tokens of text and video, and text tokens are on every rank.

    Raises:
        ValueError: there is no such module, or none that has the argument.
    """
    tokens = spread.tokens

    def count(whole: int) -> int:
        tokens.check_known(f"{module}'s {argument}")
        splits = tokens.state.splits
        if splits is None:
            return whole
        own = tokens.own_range(splits)
        num_own = own.stop - own.start
        # Counted tokens before this rank's share are others', and those behind it too.
        before = sum(splits) - own.stop if last else own.start
        return whole - sum(splits) + num_own if text else min(max(whole - before, 0), num_own)

    def change(arguments: Arguments, _name: str) -> None:
        change_at(arguments, argument, count)

    named = dict(spread.modules(module))
    # Where none has the argument, the first of them raises the error.
    for name in [name for name in named if _takes(named[name], argument)] or list(named)[:1]:
        spread.change_arguments(name, argument, change)


def _takes(module: nn.Module, argument: str) -> bool:
    parameters = inspect.signature(module.forward).parameters
    takes_any = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
    return takes_any or argument.split(".")[0] in parameters
