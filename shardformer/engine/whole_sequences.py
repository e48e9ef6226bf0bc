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

from contextlib import ExitStack

from torch import Tensor, nn

from opensora_accel.communications import share_sizes
from opensora_accel.communications.alltoall import Cut, all_to_all_unchecked
from shardformer.engine.tokens import Tokens
from shardformer.paths import find
from shardformer.policy.base import Policy, WholeSequence


def exchange_heads(model: nn.Module, policy: Policy, tokens: Tokens, undo: ExitStack) -> None:
    """Puts the exchanges around every module that `policy.whole_sequences` names.

    Raises:
        ValueError: a module has fewer heads than there are ranks.
    """
    for entry in policy.whole_sequences:
        for name, module in find(model, entry.module):
            _exchange_heads_of(module, name, entry, tokens, undo)


def _exchange_heads_of(
    module: nn.Module, name: str, entry: WholeSequence, tokens: Tokens, undo: ExitStack
) -> None:
    group, num_heads = tokens.group, getattr(module, entry.heads)
    if num_heads < group.size():
        raise ValueError(
            f"{name} needs whole heads on every rank, and has {num_heads} of them for {group.size()} ranks; "
            f"use ring × ulysses of at most {num_heads}"
        )
    heads = share_sizes(num_heads, group.size())
    num_own = heads[group.rank()]

    def exchange(tensor: Tensor, head_size: int, *, to_heads: bool) -> Tensor:
        tokens.check_known(name)
        if tokens.state.splits is None:
            raise ValueError(f"the policy spreads {name} over the ranks, but splits no tokens before it")
        by_tokens = Cut(1, (tokens.state.splits,))
        by_heads = Cut(2, (tuple(num * head_size for num in heads),))
        scatter, gather = (by_heads, by_tokens) if to_heads else (by_tokens, by_heads)
        (out,) = all_to_all_unchecked([tensor], group, scatter, gather)
        return out.contiguous()  # the module's code may `view` it

    # No hook of `hooks.py`, which would end a compiled graph here: that the state is followed is all these need.
    def scatter_heads(_module: nn.Module, _args: tuple[Tensor, ...], projected: Tensor) -> Tensor:
        """[B, S/P, C] → [B, S, C/P]."""
        return exchange(projected, projected.size(2) // num_heads, to_heads=True)

    def gather_heads(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """[B, S, C/P] → [B, S/P, C]."""
        return exchange(args[0], args[0].size(2) // num_own, to_heads=False), *args[1:]

    for child in entry.projections:
        undo.callback(module.get_submodule(child).register_forward_hook(scatter_heads).remove)
    undo.callback(module.get_submodule(entry.out).register_forward_pre_hook(gather_heads).remove)
    setattr(module, entry.heads, num_own)
    undo.callback(setattr, module, entry.heads, num_heads)
