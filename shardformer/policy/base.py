"""A policy: what is split, gathered and swapped where, for one family of models. Data, no code."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SplitInput:
    """A tensor argument of a module's forward becomes this rank's share along `dim`."""

    module: str
    argument: str
    dim: int = 1


@dataclass(frozen=True)
class SplitOutput:
    """What a module returns becomes this rank's share along `dim`: outputs `indices` of a tuple, or the tensor.

    `ndim` limits it to tensors of that many dims, for outputs that have a token dimension only sometimes.
    """

    module: str
    indices: tuple[int, ...] = ()
    dim: int = 1
    ndim: int | None = None


@dataclass(frozen=True)
class GatherOutput:
    """What a module returns is joined over the ranks along `dim`."""

    module: str
    dim: int = 1


@dataclass(frozen=True)
class Blocks:
    """A list of repeated blocks, in the order they run, and the arguments that flow from block to block."""

    module: str
    boundary: tuple[str, ...] = ("hidden_states",)


@dataclass(frozen=True)
class NormSwap:
    """Norms of these class names, below `module`, are replaced by `shardformer.modeling`'s class `target`."""

    sources: tuple[str, ...]
    target: str
    module: str = ""


@dataclass(frozen=True)
class Policy:
    """One model family. Module paths may hold `*` for any one name: `blocks.*.attn1`.

    `split_inputs` meets the token dimension first, so the first entry fixes the number of tokens; every other
    tensor that is split must have as many.
    """

    models: tuple[str, ...]
    """Class names that the policy fits."""
    split_inputs: tuple[SplitInput, ...] = ()
    split_outputs: tuple[SplitOutput, ...] = ()
    gather_outputs: tuple[GatherOutput, ...] = ()
    self_attention: tuple[str, ...] = ()
    """Attention modules whose queries, keys and values all come from the split tokens. Cross-attention to
    replicated text needs nothing: its queries are local and its keys are whole."""
    blocks: tuple[Blocks, ...] = ()
    mlps: tuple[str, ...] = ()
    """Modules that treat every token alone: [B, S, C] → [B, S, C]."""
    norm_swaps: tuple[NormSwap, ...] = ()
