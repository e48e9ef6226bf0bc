"""Several samples in one row of a model's input, or a mask of one's own: what `run_packed` puts on a model.

The row of two clips with 3 and 2 tokens goes through the model as one clip with 5 tokens. What treats tokens one by one
need not know. Attention is told who sees whom (`spread/streams.py`), and a module that makes positions out of a clip's
shape runs once for each of the two shapes:

    positions          (3, 1, 1), (2, 1, 1)    →   0 1 2 0 1, in the place of 0 1 2 3 4
    self-attention     5 queries, 5 keys       →   tokens of one clip see each other
    cross-attention    5 queries, 2 captions   →   tokens of a clip see its caption
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from opensora_accel.arguments import Arguments
from opensora_accel.attention import local_attention, slices, torch_attention
from opensora_accel.communications import compare_facts
from opensora_accel.wrapping import Forward, wrap_forward
from shardformer.modeling import Attention, redirect_attention
from shardformer.paths import check_argument, find
from shardformer.policy import BlockMask, PackedAttention, PackedPositions, Policy
from shardformer.spread import Spread, Tokens, streams

# Of a stream: every sample's number of tokens or shape (T, H, W), with a mask of its own or without; or who sees whom.
Samples = Sequence[Any] | slices.AttentionSlices


def tell_samples_apart(spread: Spread, policy: Policy) -> None:
    """Puts on what a forward has to know before its tokens are split: the row's positions, the model's block mask.

    Raises:
        ValueError: rows are asked for, and the table does not say how the tokens of their samples are told apart.
    """
    if spread.tokens.are_packed:
        _check_packs(spread.model, policy)
        _join_positions(spread, policy)
    if policy.block_mask is not None:
        _read_block_mask(spread, policy.block_mask)


def _check_packs(model: nn.Module, policy: Policy) -> None:
    if policy.packed_attention:
        return
    reason = policy.unpacked or (
        "its table does not say which streams of tokens its attention modules take (Policy.packed_attention)"
    )
    raise ValueError(
        f"{type(model).__name__} takes no rows of several samples: {reason}. Leave packed=True out, and give the model "
        "one sample a row"
    )


def spread_stream(policy: Policy) -> str:
    """The stream that is spread over the ranks."""
    return next(entry.queries for entry in policy.packed_attention if entry.module in policy.self_attention)


def _join_positions(spread: Spread, policy: Policy) -> None:
    """The module of positions returns those of the row's samples, which hooks behind it split."""
    entry = policy.packed_positions
    if entry is None:
        return

    def joined(original: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            packed = spread.tokens.state.packed
            if packed is None or entry.module not in packed.positions:
                return original(*args, **kwargs)
            return packed.positions[entry.module]

        return forward

    for _name, module in spread.modules(entry.module):
        spread.undo.callback(wrap_forward(module, joined))


def _read_block_mask(spread: Spread, entry: BlockMask) -> None:
    """The model's block mask becomes slices, before the first block's tokens are split."""
    if entry.of_clip is not None:
        return _expect_dense_mask(spread, entry, entry.of_clip)
    tokens = spread.tokens
    # A model keeps its mask from forward to forward, and every layer has the same.
    known: WeakKeyDictionary[object, slices.AttentionSlices] = WeakKeyDictionary()

    def read(block_mask: Any, num_queries: int, num_keys: int, what: str) -> slices.AttentionSlices:
        if not hasattr(block_mask, "mask_mod"):
            raise ValueError(
                f"{what} is a {type(block_mask).__name__}, and self-attention over ranks goes by a block mask of flex "
                "attention: pass one, or leave the mask to the model"
            )
        seen = known.get(block_mask)
        if seen is None or (seen.num_queries, seen.num_keys) != (num_queries, num_keys):
            seen = slices.AttentionSlices.from_block_mask(block_mask, num_queries, num_keys)
            known[block_mask] = seen
        return seen

    def told_by(arguments: Arguments, name: str) -> streams.Packed | None:
        block_mask, stream = arguments.get(entry.argument), entry.tokens
        if block_mask is None:
            return None
        what, num_tokens = f"{name}'s {entry.argument}", arguments[stream].size(1)
        if entry.buffers is None:
            seen, more_keys = read(block_mask, num_tokens, num_tokens, what), None
        else:
            at = entry.buffers(tokens, arguments, name)
            whole = read(block_mask, at.num_queries, at.num_keys, what)
            seen, more_keys = streams.laid_out(whole, at)
        return streams.Packed({}, {stream: seen}, stream, block_mask=block_mask, more_keys=more_keys)

    def change(arguments: Arguments, name: str) -> None:
        block_mask, told = arguments.get(entry.argument), tokens.state.packed
        if told is not None and told.block_mask is block_mask:
            return  # a checkpoint of the model's own runs the block again, or the model makes no mask
        if told is not None and block_mask is not None:
            raise ValueError(f"{name} has a mask of its own ({entry.argument}); leave run_packed out")
        what = f"{name}'s {entry.argument}"
        tokens.state.packed = _same_on_all(tokens, what, lambda: told_by(arguments, name))

    spread.change_arguments(entry.module, f"{entry.argument} {entry.tokens}", change)


def _same_on_all(
    tokens: Tokens, what: str, read: Callable[[], streams.Packed | None]
) -> streams.Packed | None:
    """What `read` returns: in forwards whose inputs are compared the same on all ranks, as are its errors.

    A mask is no tensor among the inputs, and ranks that share tokens out by other masks would wait for each other.

    Raises:
        ValueError: `read` raises it, on any rank, or the ranks have other masks.
    """
    if not tokens.state.is_compared:
        return read()
    told, problem = None, ""
    try:
        told = read()
    except ValueError as error:
        problem = str(error)
    fact = (None, "None") if told is None else (told.digest, repr(told.own))
    with _disable_current_modes():  # it is no part of the step, which somebody may record
        compare_facts({what: fact}, [tokens.group], problem, lambda _: "; pass the same mask on all of them")
    return told


def _expect_dense_mask(
    spread: Spread,
    entry: BlockMask,
    of_clip: Callable[[nn.Module, Arguments], slices.AttentionSlices | None],
) -> None:
    """Before anything is split the forward is told of the mask that its model is going to make."""
    tokens, stream = spread.tokens, entry.tokens
    compared: set[str] = set()

    def tell(arguments: Arguments, _name: str) -> None:
        # Within run_packed there are slices already: attention refuses the model's mask beside them.
        seen = of_clip(spread.model, arguments) if tokens.packed is None else None
        if seen is not None:
            tokens.state.packed = streams.Packed({}, {stream: seen}, stream)

    def compare(arguments: Arguments, name: str) -> None:
        packed, mask = tokens.state.packed, arguments.get(entry.argument)
        if packed is None or tokens.packed is not None:
            return
        seen = packed.masks[stream]
        if mask is None or (seen.digest not in compared and not _is_dense(mask, seen)):
            raise ValueError(
                f"the policy says that {name} gets {seen!r} as its {entry.argument}, and the model made another mask: "
                "leave block_mask out of its table"
            )
        compared.add(seen.digest)
        tokens.state.packed = replace(packed, block_mask=mask)

    spread.change_arguments("", stream, tell)
    spread.change_arguments(entry.module, entry.argument, compare)


def _is_dense(mask: Tensor, seen: slices.AttentionSlices) -> bool:
    """Whether a mask [1, 1, S_q, S_kv] shows these full slices and nothing else, without making another like it."""
    if mask.dtype != torch.bool or mask.shape != (1, 1, seen.num_queries, seen.num_keys):
        return False
    assert all(each.kind == "full" for each in seen.slices)
    # Asked at once, because each answer waits for the device.
    shown = [mask[0, 0, each.q_start : each.q_stop, each.k_start : each.k_stop].all() for each in seen.slices]
    return bool(torch.stack([*shown, mask.count_nonzero() == seen.area]).all())


def attend_to_whole_keys(spread: Spread, policy: Policy) -> None:
    """Attention to keys that every rank has whole, by the queries of a stream that is spread or is not."""
    if not spread.tokens.are_packed:
        return
    tokens, own = spread.tokens, spread_stream(policy)
    for entry in policy.packed_attention:
        for stream in filter(None, (entry.queries, entry.keys)):
            check_argument("", spread.model, stream)
        if entry.module in policy.attentions:
            continue  # its keys are spread
        for name, module in find(spread.model, entry.module):
            attention = _attention(tokens, entry, name, own)
            spread.undo.callback(
                redirect_attention(
                    module, name, attention, tokens.own_counts, tokens.total, tokens.are_followed
                )
            )


def _attention(tokens: Tokens, entry: PackedAttention, name: str, own: str) -> Attention:
    def attention(
        q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool, scale: float | None
    ) -> Tensor:
        """q: [B, S_q, H, D], of this rank or whole; k, v: [B, S_kv, H, D], whole → [B, S_q, H, D]."""
        seen = slices_between(tokens, entry, name)
        if seen is None:
            q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
            grouped = q.size(1) != k.size(1)
            out = torch_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)
            return out.transpose(1, 2)
        refuse_masks(name, tokens, mask, causal)
        deal = tokens.state.deal
        keys = entry.keys or entry.queries
        _check_length(name, "keys", k.size(1), seen.num_keys, keys)
        if entry.queries != own or deal is None:
            _check_length(name, "queries", q.size(1), seen.num_queries, entry.queries)
            return local_attention(q, k, v, scale=scale, slices=seen)
        own_seen = streams.of_runs(seen, deal.runs[tokens.group.rank()], (range(seen.num_keys),))
        return local_attention(q, k, v, scale=scale, slices=own_seen)

    return attention


def _check_length(name: str, what: str, found: int, told: int, stream: str) -> None:
    if found != told:
        raise ValueError(f"{name} has {found} {what}, and run_packed was told of {told} in {stream}")


def slices_between(tokens: Tokens, entry: PackedAttention | None, name: str) -> slices.AttentionSlices | None:
    """Who sees whom in a module, in the forward that runs; None where all see all, or the model has no such entry."""
    if entry is None:
        return None
    # Of a recomputation that brought no state along it is not known whether its forward was packed.
    tokens.check_known(name)
    packed = tokens.state.packed
    return None if packed is None else packed.between(entry.queries, entry.keys or entry.queries)


def refuse_masks(name: str, tokens: Tokens, mask: Any, causal: bool) -> None:
    """Refuses a mask of the model's own beside slices, which say by themselves who sees whom.

    Raises:
        ValueError: there is one, and it is not what the slices were read from.
    """
    packed = tokens.state.packed
    own = None if packed is None else packed.block_mask
    if own is not None and mask is not own:
        raise ValueError(
            f"{name} passed another mask than the first block gets, by which all self-attention of this model goes: "
            "give all blocks one mask, or keep this model on one device a sequence"
        )
    if own is None and (mask is not None or causal):
        raise ValueError(
            f"{name} passed {'is_causal' if mask is None else 'a mask'} within run_packed, which says by itself who "
            "sees whom; leave the model's mask out: a row of samples has no padding"
        )


@contextmanager
def run_packed(
    model: nn.Module, policy: Policy, tokens: Tokens, balanced: bool, told: Mapping[str, Samples]
) -> Iterator[None]:
    """`shardformer.packing.run_packed` of a model that was sharded for it."""
    known = tuple(
        dict.fromkeys(name for e in policy.packed_attention for name in (e.queries, e.keys) if name)
    )
    for name in told:
        if name not in known:
            raise ValueError(
                f"{type(model).__name__} has the streams {', '.join(known)}; run_packed got {name!r}"
            )
    lengths: dict[str, tuple[int, ...]] = {}
    masks: dict[str, slices.AttentionSlices] = {}
    positions: dict[str, object] = {}
    grid = policy.packed_positions
    for name, samples in told.items():
        if isinstance(samples, slices.AttentionSlices):
            masks[name] = samples
            _check_square(name, samples)
        else:
            shapes = [each[0] if _has_mask(each) else each for each in samples]
            if grid is not None and grid.stream == name:
                lengths[name], positions[grid.module] = _of_grids(model, grid, shapes)
            else:
                lengths[name] = _of_numbers(name, shapes)
            if any(map(_has_mask, samples)):
                masks[name] = _of_samples(name, samples, lengths[name])
    _check_together(lengths, masks, known, policy)
    before, tokens.packed = (
        tokens.packed,
        streams.Packed(lengths, masks, spread_stream(policy), balanced, positions),
    )
    try:
        yield
    finally:
        tokens.packed = before


def _check_together(
    lengths: Mapping[str, tuple[int, ...]],
    masks: Mapping[str, slices.AttentionSlices],
    known: Sequence[str],
    policy: Policy,
) -> None:
    """Raises ValueError unless what was told of the streams is of one row."""
    counts = {name: len(each) for name, each in lengths.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(f"every stream of a row has the same samples; run_packed got {counts} of them")
    missing = [name for name in known if name not in lengths]
    if lengths and missing:
        alone = [name for name in missing if name in masks]
        raise ValueError(
            f"run_packed was not told the lengths of {', '.join(missing)}, which the row has too"
            + (f"; of {alone[0]} pass each sample's length or shape in a pair with its mask" if alone else "")
        )
    own = {e.queries for e in policy.packed_attention if e.keys in ("", e.queries)}
    for name in masks:
        if name not in own:
            raise ValueError(
                f"{name} does not attend to itself, and its mask would not be attended by; leave it out (there are "
                f"masks of {', '.join(sorted(own))})"
            )


def _has_mask(sample: Any) -> bool:
    return isinstance(sample, tuple) and len(sample) == 2 and isinstance(sample[1], slices.AttentionSlices)


def _of_samples(name: str, samples: Sequence[Any], lengths: Sequence[int]) -> slices.AttentionSlices:
    """Who sees whom in a row of these samples, some of which have a mask of their own."""
    parts: list[int | slices.AttentionSlices] = []
    for number, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
        parts.append(sample[1] if _has_mask(sample) else length)
        if _has_mask(sample) and (sample[1].num_queries, sample[1].num_keys) != (length, length):
            raise ValueError(
                f"sample {number} of {name} has {length} tokens, and its mask is {sample[1]!r}; make it for that sample"
            )
    return slices.AttentionSlices.packed(parts)


def _check_square(name: str, mask: slices.AttentionSlices) -> None:
    if mask.num_queries != mask.num_keys:
        raise ValueError(f"{name} attends to itself, and its mask has other queries than keys: {mask!r}")


def _of_numbers(name: str, samples: Sequence[Any]) -> tuple[int, ...]:
    if not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in samples):
        raise ValueError(f"run_packed takes the number of {name} of each sample; got {list(samples)}")
    return tuple(samples)


def _of_grids(
    model: nn.Module, entry: PackedPositions, samples: Sequence[Any]
) -> tuple[tuple[int, ...], object]:
    """Every sample's number of tokens, and their positions in a row."""
    if not all(isinstance(each, Sequence) and len(each) == 3 and min(each) > 0 for each in samples):
        raise ValueError(
            f"{type(model).__name__} knows a clip's positions by its shape: run_packed takes (T, H, W) of each one's "
            f"{entry.stream}; got {list(samples)}"
        )
    ((_name, module),) = find(model, entry.module)
    device = next((each.device for each in (*module.buffers(), *model.parameters())), torch.device("cpu"))
    # Its hooks are about the row, and so is what is put around its forward, but not yet: no forward runs.
    parts = [module.forward(torch.empty((), device=device).expand(1, 1, *shape)) for shape in samples]
    is_single = isinstance(parts[0], Tensor)
    columns = [[part] if is_single else list(part) for part in parts]
    joined = tuple(torch.cat(each, entry.dim) for each in zip(*columns, strict=True))
    return tuple(each[0].size(entry.dim) for each in columns), joined[0] if is_single else joined
