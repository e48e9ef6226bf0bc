"""Where a model's layers are cut for tensor parallelism: the part of a policy table that says it. Data, no code."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ColumnParallel:
    """A linear layer, or an embedding, of whose outputs every rank computes its share.

    `segments` are the outputs of layers fused into one, each shared by itself: attributes of the region's module
    that hold their sizes, in order. Without them all outputs are one segment.
    """

    module: str
    segments: tuple[str, ...] = ()
    # Some of the blocks, or of the configurations, do without it.
    optional: bool = False


@dataclass(frozen=True)
class RowParallel:
    """A linear layer that takes the shares, and whose terms are summed over the ranks; its bias is added once.

    `segments` are the tensors joined in its input, as in `ColumnParallel`.
    """

    module: str
    segments: tuple[str, ...] = ()
    optional: bool = False


TensorLayer = ColumnParallel | RowParallel


@dataclass(frozen=True)
class TensorRegion:
    """A module in which shares run from layer to layer. Its input and its output are whole on every rank.

    Paths are relative to `module`, which may hold `*` for any one name.
    """

    module: str
    # One after another; the layers of a step stand side by side, as those of queries, keys and values.
    steps: tuple[tuple[TensorLayer, ...], ...]
    # Attributes that count the heads: they become this rank's number. Without them single channels are shared.
    heads: tuple[str, ...] = ()
    # Attributes that count the channels of all heads, and become this rank's.
    head_widths: tuple[str, ...] = ()
    # Attributes that count other channels (an MLP's), and become this rank's.
    widths: tuple[str, ...] = ()
    # Modules, whole on every rank, that are applied to shares: norms of single heads. Each rank's share gives a term
    # of their gradient, and the terms are summed.
    shared: tuple[str, ...] = ()
