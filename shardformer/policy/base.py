"""A policy: what is split, gathered and swapped where, for one family of models. It is data, and hardly any code.

Module paths start at the model (`""`); `*` stands for any one name, `-1` for the last of a list and `0::2` for every
second one: `blocks.*.attn1`, `blocks.-1`. Arguments are named by paths too, into what they hold: `video.x`, `grid.0`
(`opensora_accel.arguments`). The smallest policy, for a DiT whose blocks attend to nothing but their own tokens:

    Policy(
        models=("TinyDiT",),
        arguments="hidden_states timestep",
        split_inputs=(SplitInput("blocks.0", "hidden_states"),),   # tokens are split where the first block begins
        self_attention=("blocks.*.attn",),                         # each block attends over all ranks' tokens
        gather_outputs=(GatherOutput("blocks.-1"),),               # and the caller gets all tokens back
        blocks=(Blocks("blocks"),),                                # what is checkpointed, offloaded, sharded
    )

What one family alone needs is no field here but a function beside its table. Say the blocks get the number of their
tokens, and this rank has fewer:

    def count_tokens(spread: Spread) -> None:
        def change(arguments: Arguments, name: str) -> None:
            spread.tokens.check_known(name)
            arguments["num_tokens"] = spread.tokens.state.splits[spread.tokens.group.rank()]

        spread.change_arguments("blocks.*", "num_tokens", change)

    Policy(..., functions=(count_tokens,))

`shard` calls it once, when the hooks that split are on the model and those that gather are not yet
(`shardformer.spread`). So its own find a module's arguments split and its output not gathered. What a split has to know
before, the number of frames for one, they find earlier in the forward, at the model itself (`""`).

A table of this package stands in a module of its family, and its models' names in `FAMILIES` of `policy/__init__.py`.
What functions of several families share stands beside them: `counts.py`, `frames.py` and `grids.py`. A table of your
own is passed on: `shardformer.shard(model, plan, policy=…)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from shardformer.policy.tensors import TensorRegion

if TYPE_CHECKING:
    from opensora_accel.arguments import Arguments
    from opensora_accel.attention import slices
    from shardformer.spread import Spread, Tokens, streams

# Where the text tokens stand that share a dimension with the video tokens.
Text = Literal["first", "last"]


@dataclass(frozen=True)
class SplitInput:
    """An argument of a module's forward becomes this rank's share along `dim`.

    In a tuple, list or dict every tensor is split; `"rotary_emb.0"` names one item alone. None stays None. A tensor of
    size 1 along `dim` stays as it is, because it is broadcast over the tokens. A tensor that every block gets is split
    once.
    """

    module: str
    argument: str
    dim: int = 1
    # A tensor of so many dims is split and one of fewer stays whole, where tokens have a dimension only sometimes.
    ndim: int | None = None
    # Text tokens stand before or after the video tokens along `dim`: they stay, on every rank.
    text: Text | None = None


@dataclass(frozen=True)
class SplitOutput:
    """What a module returns becomes this rank's share along `dim`: outputs `indices` of a tuple, or the tensor.

    `ndim` and `text` as in `SplitInput`.
    """

    module: str
    indices: tuple[int, ...] = ()
    dim: int = 1
    ndim: int | None = None
    text: Text | None = None


@dataclass(frozen=True)
class GatherOutput:
    """What a module returns, or item `index` of it, is joined over the ranks along `dim`.

    `text` as in `SplitInput`: those tokens are whole on every rank already.
    """

    module: str
    dim: int = 1
    index: int | None = None
    text: Text | None = None
    # The model goes on with whole tensors, and what is split behind this module may have another number of tokens.
    ends: bool = False


@dataclass(frozen=True)
class Positions:
    """A function that gives tokens their positions inside attention, where they are split already.

    Wan's own `rope_apply(x, grid_sizes, freqs)` is one. Left alone, it would count from 0 on every rank. Arguments
    named in `tables` have a row for every token of the clip along `dim`; the function gets this rank's rows of them.
    Arguments named in `tokens` have this rank's tokens along `dim`; the function gets as many rows as the clip has,
    and this rank's rows of its result are kept. The latter serves any function that treats tokens one by one, but it
    computes every rank's rows: a model whose code can be changed had better call `shardformer.local_tokens`.
    """

    # A name in the model's package: "rope_apply", or of a method, "RoPE3D.forward".
    function: str
    tables: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    dim: int = 1
    # The function changes its first tensor of tokens, and its caller goes on with that.
    in_place: bool = False
    # The argument with the shape of a clip [B, 3]: the sequence may hold several of it, a clean one and a noisy one,
    # which have the same positions.
    grid: str | None = None


@dataclass(frozen=True)
class JointAttention:
    """Attention over video tokens, which are spread, and text tokens, which are whole, in one sequence.

    Text may stand among the keys alone: then only the video asks.
    """

    module: str
    text: Text
    # A causal call of the kernel is the text's own, whose queries and keys every rank has.
    text_alone: bool = False
    # Attribute of the model, a number: so many of these modules, the last ones, are a decoder's, which attend to
    # [video, video] in place of [video, text].
    decoders: str | None = None


@dataclass(frozen=True)
class WholeSequence:
    """Self-attention whose own code needs every token, and treats every head by itself.

    What `projections` return, [B, S/P, C], becomes the channels of this rank's heads, of all tokens: [B, S, C/P]. What
    enters `out` becomes all channels of this rank's tokens again. In between the module's code runs as on one device:
    masks of blocks, positions, caches of keys, a choice of blocks by what the queries are. So nothing that it gets
    besides its tokens is split by tokens.
    """

    module: str
    # Children of the module. Norms over all channels of a token are behind the projections, and stand here then.
    projections: tuple[str, ...] = ("to_q", "to_k", "to_v")
    out: str = "to_out.0"
    # Attribute of the module: the number of heads, which becomes this rank's.
    heads: str = "heads"
    # Keyword arguments of the module that hold something of every head, [B, S, C] or [B, H, S, D], of which the module
    # gets its rank's heads.
    tables: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        """Those of the modules that the exchanges are put on."""
        return tuple(f"{self.module}.{child}" for child in (*self.projections, self.out))


@dataclass(frozen=True)
class PackedAttention:
    """An attention module, by the streams of tokens that its queries and its keys come from (`spread/streams.py`).

    A stream has the name of the argument of the model's forward by which it enters.
    """

    module: str
    queries: str
    # By default those of the queries: self-attention.
    keys: str = ""


@dataclass(frozen=True)
class PackedPositions:
    """A module that makes positions out of a clip's shape: a row of several clips has what it returns of each.

    It gets an empty tensor of each clip's shape, and what it returns is joined along `dim`.
    """

    module: str
    # The stream that is a grid, [B, C, T, H, W], and no sequence.
    stream: str
    dim: int = 1


@dataclass(frozen=True)
class BlockMask:
    """A mask that the model makes for its whole sequence, as the first block gets it: self-attention goes by slices.

    A block mask of flex attention is read into them before tokens are split (`AttentionSlices.from_block_mask`). A
    dense one, [1, 1, S, S], is too large to be read in every forward, and tokens may be split before it is made:
    `of_clip` says what it will be, and what the model makes is compared with that once for each.

    A block mask may be made for buffers that a call's tokens do not fill, with keys of a cache beside theirs: `buffers`
    says where what stands. Attention modules are then called with a rank's own queries, and behind its own keys with
    those that it holds of the cache and with zeros, as many as the deal says (`Tokens.state`).
    """

    module: str
    argument: str
    # The argument with the tokens, [B, S, C].
    tokens: str
    # (the model, its forward's arguments) → who sees whom, in full slices; None where there is no mask.
    of_clip: Callable[[nn.Module, Arguments], slices.AttentionSlices | None] | None = None
    # (the tokens, the module's arguments, its name) → where the tokens stand.
    buffers: Callable[[Tokens, Arguments, str], streams.Buffers] | None = None


@dataclass(frozen=True)
class Blocks:
    """A list of repeated blocks, in the order they run, and the arguments that flow from block to block.

    What flows may be a field of an argument: `video.x`. `alternating` names further lists whose blocks run in turn with
    these: first of each, second of each, …
    """

    module: str
    boundary: tuple[str, ...] = ("hidden_states",)
    alternating: tuple[str, ...] = ()


@dataclass(frozen=True)
class Policy:
    """One model family.

    What is split first fixes the number of tokens; every other tensor that is split must have as many.
    """

    # Class names of the models that the policy fits, if they are built as it says: see `find_policy`.
    models: tuple[str, ...]
    # Packages whose classes these are: a class of the same name from elsewhere is another one, and so is the code of a
    # forward or an attention processor that was put into the model (`policy/identity.py`). Empty: of any package.
    origin: tuple[str, ...] = ()
    # Names of the arguments of the model's forward that the table was made for, with blanks between. Any other must
    # stay None or False: it may index frames or tokens by their place in the clip. Empty: every argument is taken.
    arguments: str = ""
    # Settings of the model, in its config or its attributes, with which it does not fit, each with the reason.
    unfit: tuple[tuple[str, str], ...] = ()
    split_inputs: tuple[SplitInput, ...] = ()
    split_outputs: tuple[SplitOutput, ...] = ()
    gather_outputs: tuple[GatherOutput, ...] = ()
    # Attention modules whose queries, keys and values all come from the split tokens. Cross-attention to replicated
    # text needs nothing: its queries are local and its keys are whole.
    self_attention: tuple[str, ...] = ()
    # Children of these that make the values: with `overlap_ulysses` they wait until queries and keys have left.
    value_projections: tuple[str, ...] = ("to_v",)
    joint_attention: tuple[JointAttention, ...] = ()
    # Attention modules whose queries every rank holds (audio, say) and whose keys are the split tokens.
    whole_queries: tuple[str, ...] = ()
    # Functions that the model's own package calls in place of torch's attention, with flash-attn's arguments:
    # `flash_attn_func`, `flash_attn_varlen_func`, their packed ones, or one of its own that takes samples' lengths,
    # `k_lens`, and q, k, v one by one or in a list. One that is imported where it is called is named with its package:
    # "flash_attn.flash_attn_func".
    kernel_functions: tuple[str, ...] = ()
    positions: tuple[Positions, ...] = ()
    # As `self_attention`, of modules that sum over the tokens instead of taking a softmax.
    linear_attention: tuple[str, ...] = ()
    whole_sequences: tuple[WholeSequence, ...] = ()
    # Where layers are cut for tensor parallelism.
    tensors: tuple[TensorRegion, ...] = ()
    blocks: tuple[Blocks, ...] = ()
    # Every attention module of the model, if all else in it treats tokens one by one: then several samples may stand in
    # one row (`shardformer.packing`). Where it does not, why not, for the error message.
    packed_attention: tuple[PackedAttention, ...] = ()
    packed_positions: PackedPositions | None = None
    unpacked: str = ""
    # By which `self_attention` goes, where the model makes one.
    block_mask: BlockMask | None = None
    # For a profiler, attention whose module no entry above names: its module; or, where a block calls the kernel
    # itself, the module that runs just before it and the one that runs just after, with their block's path in front.
    attention_regions: tuple[str | tuple[str, str], ...] = ()
    # Modules that treat every token alone: [B, S, C] → [B, S, C], or without the batch.
    mlps: tuple[str, ...] = ()
    # Below these modules `shard(…, norms=…)` may swap norms for kernels that compute the same, found by probing.
    norms: tuple[str, ...] = ("",)
    # Arguments of the model's forward that cannot be split, each with the reason: they must be None or False.
    refuses: tuple[tuple[str, str], ...] = ()
    # Functions that replace layers of the model, before all else and on every plan; each returns what puts them back.
    replacements: tuple[Callable[[nn.Module], Callable[[], None]], ...] = ()
    # Functions that put on what no field above says of tokens; see the opening of this module.
    functions: tuple[Callable[[Spread], None], ...] = ()
    # Modules that the functions name, and without which the table does not fit.
    needs: tuple[str, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        """Every module path that must be there for the tokens to be spread, or for blocks to be found."""
        entries: tuple[Any, ...] = (
            *self.split_inputs,
            *self.split_outputs,
            *self.gather_outputs,
            *self.joint_attention,
            *self.blocks,
        )
        paths = [entry.module for entry in entries] + [
            path for entry in self.blocks for path in entry.alternating
        ]
        paths += [*self.self_attention, *self.whole_queries, *self.linear_attention]
        paths += [path for entry in self.whole_sequences for path in entry.paths]
        return tuple(dict.fromkeys(path for path in (*paths, *self.needs) if path))

    @property
    def attentions(self) -> tuple[str, ...]:
        """The paths of every module that attends to tokens of other ranks."""
        return (
            *self.self_attention,
            *self.whole_queries,
            *self.linear_attention,
            *(entry.module for entry in self.joint_attention),
            *(entry.module for entry in self.whole_sequences),
        )
