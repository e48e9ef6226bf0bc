"""Attention whose own code needs every token: tokens are exchanged for heads around it, not around its kernel call.

Some attention modules do more between their projections and their output layer than one kernel call sees: they look up
a mask of blocks for the whole clip, choose blocks of keys by what the queries are, lay tokens out anew, or keep keys
for another forward. Ulysses serves all of it if the exchange is put where tokens are still treated one by one. P = 3
ranks, 6 tokens, 4 heads a b c d of 8 channels each:

    to_q, to_k, to_v    rank 0: tokens 0 1, 32 channels   →   all-to-all   →   tokens 0…5, the 16 channels of heads a b
    the module's code   rank 0: as on one device, of a clip of 6 tokens and a model of 2 heads
    to_out              rank 0: tokens 0 1, 32 channels   ←   all-to-all   ←   tokens 0…5, 16 channels

The other ranks have heads c and d. Heads need not divide, but each rank needs one. Shares are over the whole sequence
group, whether it is a ring, a ulysses group or both: a ring would have to know what the module does with its keys.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from opensora_accel.communications import Cut, all_to_all_unchecked, share_sizes
from shardformer.paths import find
from shardformer.policy import Policy
from shardformer.spread import Spread, Tokens


def exchange_heads(spread: Spread, policy: Policy) -> None:
    """Puts the exchanges around every module that `policy.whole_sequences` names.

    Raises:
        ValueError: a module has fewer heads than there are ranks.
    """
    for entry in policy.whole_sequences:
        for path in entry.paths:
            spread.modules(path)  # noted as hooked
        for name, module in find(spread.model, entry.module):
            exchange = _Exchange(spread.tokens, name, getattr(module, entry.heads))
            # No hooks of `Spread`, which end a compiled graph: these need no more than that the state is known.
            hooks = [
                module.register_forward_pre_hook(partial(exchange.cut_tables, entry.tables), with_kwargs=True)
            ]
            hooks += [
                module.get_submodule(child).register_forward_hook(exchange.to_heads)
                for child in entry.projections
            ]
            hooks.append(module.get_submodule(entry.out).register_forward_pre_hook(exchange.to_tokens))
            for hook in hooks:
                spread.undo.callback(hook.remove)
            spread.undo.callback(setattr, module, entry.heads, exchange.num_heads)
            # The code between the exchanges reads the number of heads from the module.
            setattr(module, entry.heads, exchange.num_own)


class _Exchange:
    """What the hooks of one module do."""

    def __init__(self, tokens: Tokens, name: str, num_heads: int):
        group = tokens.group
        if num_heads < group.size():
            raise ValueError(
                f"{name} needs whole heads on every rank, and has {num_heads} of them for {group.size()} ranks; "
                f"use ring × ulysses of at most {num_heads}"
            )
        self._tokens, self._name, self.num_heads = tokens, name, num_heads
        self._heads = share_sizes(num_heads, group.size())
        self._first, self.num_own = sum(self._heads[: group.rank()]), self._heads[group.rank()]

    def to_heads(self, _module: nn.Module, _args: tuple[Any, ...], projected: Tensor) -> Tensor:
        """[B, S/P, C] → [B, S, C/P]."""
        by_tokens, by_heads = self._cuts(projected.size(2) // self.num_heads)
        (out,) = all_to_all_unchecked([projected], self._tokens.group, scatter=by_heads, gather=by_tokens)
        return out.contiguous()  # the module's code may `view` it

    def to_tokens(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """[B, S, C/P] → [B, S/P, C]."""
        by_tokens, by_heads = self._cuts(args[0].size(2) // self.num_own)
        (out,) = all_to_all_unchecked([args[0]], self._tokens.group, scatter=by_tokens, gather=by_heads)
        return out, *args[1:]

    def cut_tables(
        self, tables: tuple[str, ...], _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """This rank's heads of the keyword arguments that `tables` names."""
        return args, kwargs | {name: self._own_heads(kwargs[name]) for name in tables if name in kwargs}

    def _own_heads(self, value: Any) -> Any:
        """[B, S, C] → [B, S, C/P], [B, H, S, D] → [B, H/P, S, D]; of tuples and lists each."""
        if isinstance(value, (tuple, list)):
            return type(value)(self._own_heads(item) for item in value)
        if not isinstance(value, Tensor):
            return value
        dim = 1 if value.dim() == 4 else 2
        head_size = value.size(dim) // self.num_heads
        if head_size * self.num_heads != value.size(dim):
            raise ValueError(
                f"{self._name} has {self.num_heads} heads, and a table of {tuple(value.shape)}, whose dim {dim} they "
                "do not share; correct the policy's `tables`"
            )
        return value.narrow(dim, self._first * head_size, self.num_own * head_size)

    def _cuts(self, head_size: int) -> tuple[Cut, Cut]:
        """How tokens and channels are shared."""
        self._tokens.check_known(self._name)
        splits = self._tokens.state.splits
        if splits is None:
            raise ValueError(
                f"the policy spreads {self._name} over the ranks, but splits no tokens before it"
            )
        # Channels change ranks by whole heads.
        return Cut(1, (splits,)), Cut(2, (tuple(num * head_size for num in self._heads),))
