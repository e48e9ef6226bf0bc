"""Tables for a model that has none, drafted from what two traced forwards show: the likeliest first.

    lists of blocks    ModuleLists in whose items attention is called
    tokens             the dimension, of what flows from block to block, that has as many rows as attention has queries
    attention          S queries and S keys: of tokens alone; both longer: text has joined them; fewer keys: to a text
    splits             what has a row for every token where blocks run, and was made beside the tokens (see trace.py)
    gather             the last module behind the blocks that returns a row for every token

What a trace does not show is drafted in several ways, and the proof decides: whether tables of positions are split
where blocks get them or where they are made, behind which module tokens are whole again, and which function inside
attention counts positions.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from opensora_accel.proposal.trace import AttentionCall, Call, Leaf, Noise, Trace, trace
from shardformer.policy import (
    Blocks,
    GatherOutput,
    JointAttention,
    Policy,
    Positions,
    SplitInput,
    SplitOutput,
    Text,
    counts,
)
from shardformer.spread import Spread

# How many modules behind the blocks are tried as the place where tokens are whole again.
_MAX_GATHERS = 3
# Names of arguments that hold a caption where it is longer than the clip, as in a toy it may be.
_TEXT = re.compile(r"encoder|txt|text|caption|prompt")


@dataclass(frozen=True)
class BlockList:
    """Blocks that run one after another, and what flows from each to the next."""

    path: str
    calls: tuple[Call, ...]
    # Names of the arguments that one block returns and the next one gets.
    flows: tuple[str, ...]
    hidden: Leaf
    # The dim of `hidden` that holds the tokens, and how many there are.
    dim: int
    num_tokens: int

    def first(self) -> str:
        return self.calls[0].path


@dataclass
class Draft:
    """All that the traces show; `policies` makes tables of it."""

    base: Policy
    # Where tokens enter the blocks.
    enters: SplitInput
    # What else is split where blocks get it; or where modules return it, and what is left to the blocks then.
    block_splits: list[SplitInput]
    module_splits: list[SplitOutput]
    other_splits: list[SplitInput]
    gathers: list[GatherOutput]
    positions: list[Positions]
    unsure: list[str]

    def policies(self) -> Iterator[Policy]:
        """Every table that the traces allow, the likeliest first."""
        for gather in self.gathers:
            yield replace(self.base, split_inputs=(self.enters, *self.block_splits), gather_outputs=(gather,))
            if self.module_splits:
                yield replace(
                    self.base,
                    split_inputs=(self.enters, *self.other_splits),
                    split_outputs=tuple(self.module_splits),
                    gather_outputs=(gather,),
                )


def draft(model: nn.Module, inputs: Mapping[str, Any]) -> Draft:
    """What two forwards of the model show of its policy.

    Raises:
        ValueError: no attention was called, no blocks were found, or tokens cannot be told from other dims.
    """
    try:
        plain = trace(model, inputs)
    except (TypeError, RuntimeError, AttributeError, IndexError, KeyError) as error:
        raise ValueError(
            f"the forward of {type(model).__name__} fails on these inputs, on one device: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not plain.attentions:
        raise ValueError(
            f"{type(model).__name__} called neither scaled_dot_product_attention nor a function of its package that "
            "takes q and k: attention that is written out cannot be spread over ranks; let it call torch's function"
        )
    lists = _block_lists(model, plain)
    first = lists[0]
    noisy = trace(model, inputs, Noise(first.first(), first.hidden.name))
    if len(noisy.calls) != len(plain.calls) or len(noisy.attentions) != len(plain.attentions):
        raise ValueError(
            f"{type(model).__name__} calls other modules when its tokens have other values; it cannot be traced"
        )
    return _Drafter(model, inputs, plain, noisy, lists).draft()


def _block_lists(model: nn.Module, plain: Trace) -> list[BlockList]:
    """The lists whose blocks attend to the tokens, in the order in which they run."""
    attending = {path for call in plain.attentions for path in call.within}
    lists: list[BlockList] = []
    for path, module in model.named_modules():
        within_another = any(path.startswith(f"{known.path}.") for known in lists)
        if not isinstance(module, nn.ModuleList) or within_another:
            continue
        paths = [f"{path}.{name}" for name, _child in module.named_children()]
        calls = [plain.calls_of(each) for each in paths]
        if not paths or not all(calls) or not all(each in attending for each in paths):
            continue
        blocks = _block_list(path, tuple(each[0] for each in calls), plain)
        if blocks is not None:
            lists.append(blocks)
    if not lists:
        raise ValueError(
            f"{type(model).__name__} has no torch.nn.ModuleList whose items attend to all tokens that go from one to "
            "the next: name its blocks by hand; where they attend along one dimension of a grid of tokens, by "
            "`spread_grid` (docs/policies.md)"
        )
    longest = max(each.num_tokens for each in lists)
    # Captions are refined by blocks of their own, and are shorter than what is generated.
    lists = [each for each in lists if 2 * each.num_tokens > longest]
    # And where they are not much shorter, what is generated is not computed from what they return.
    video = next(each for each in lists if each.num_tokens == longest)
    returned = {each.path: [leaf.tensor for leaf in each.calls[-1].outputs] for each in lists}
    lists = [
        each
        for each in lists
        if each.num_tokens == longest
        or _is_made_of(video.hidden.tensor, returned[each.path])
        or _is_made_of(each.hidden.tensor, returned[video.path])
    ]
    return sorted(lists, key=lambda each: plain.calls.index(each.calls[0]))


def _block_list(path: str, calls: tuple[Call, ...], plain: Trace) -> BlockList | None:
    flows: list[str] = []
    if len(calls) > 1:
        returned = {id(leaf.tensor) for leaf in calls[0].outputs}
        flows = [
            leaf.name for leaf in calls[1].arguments if id(leaf.tensor) in returned and leaf.index is None
        ]
    # A clip may come without a batch: only where nothing with one is attended to.
    return _block_list_of(path, calls, plain, flows, 3) or _block_list_of(path, calls, plain, flows, 2)


def _block_list_of(
    path: str, calls: tuple[Call, ...], plain: Trace, flows: list[str], num_dims: int
) -> BlockList | None:
    """The list, if one of its arguments of at least so many dims holds the tokens that its blocks attend to."""
    candidates = [
        leaf
        for leaf in calls[0].arguments
        if leaf.index is None and leaf.tensor.is_floating_point() and leaf.tensor.dim() >= num_dims
    ]
    own = [name for name in flows if not _TEXT.search(name)]
    if not own:  # between the blocks something is added to the tokens
        own = [leaf.name for leaf in candidates if not _TEXT.search(leaf.name)][:1]
    names = [*own, *(name for name in flows if name not in own)]
    best: tuple[int, int, Leaf] | None = None
    for leaf in candidates:
        if leaf.name not in names or (best is not None and _TEXT.search(leaf.name)):
            continue
        others = [0, *(other.tensor.size(1) for other in candidates if other is not leaf)]
        for dim in (1, 0) if leaf.tensor.dim() > 2 else (0,):
            size = leaf.tensor.size(dim)
            queries = {call.lengths(_batch(leaf.tensor, dim))[0] for call in plain.attentions}
            # All queries are these tokens, or these and those of another argument.
            if any(size + other in queries for other in others) and (best is None or size > best[0]):
                best = size, dim, leaf
                break
    if best is None:
        return None
    num_tokens, dim, hidden = best
    # What holds the tokens comes first.
    ordered = (hidden.name, *(name for name in names if name != hidden.name))
    return BlockList(path, calls, ordered, hidden, dim, num_tokens)


def _batch(tensor: Tensor, dim: int) -> int:
    """How many samples a tensor of tokens [B, S, C], [S, B, C] or [S, C] has, whose dim `dim` holds the tokens."""
    return tensor.size(1 - dim) if tensor.dim() > 2 else 1


def _is_made_of(tensor: Tensor, parts: list[Tensor]) -> bool:
    """Whether a tensor was computed from one of the others; taken for granted where no gradient shows it."""
    parts = [part for part in parts if part.requires_grad]
    if not parts or not tensor.requires_grad:
        return True
    grads = torch.autograd.grad(tensor.sum(), parts, allow_unused=True, retain_graph=True)
    return any(grad is not None for grad in grads)


class _Drafter:
    """Turns two traces into a draft."""

    def __init__(
        self, model: nn.Module, inputs: Mapping[str, Any], plain: Trace, noisy: Trace, lists: list[BlockList]
    ):
        self.model, self.inputs, self.plain, self.noisy, self.lists = model, inputs, plain, noisy, lists
        self.num_tokens = lists[0].num_tokens
        self.batch = _batch(lists[0].hidden.tensor, lists[0].dim)
        self.unsure: list[str] = []
        self.text: Text = "first"

    def draft(self) -> Draft:
        attention = self._attention_entries()
        first = self.lists[0]
        block_splits = self._block_splits(self.noisy)
        module_splits = self._module_splits()
        # With noise in what those modules return, what stays as it was is not made by them.
        elsewhere = trace(
            self.model, self.inputs, Noise(outputs_of=tuple(split.module for split in module_splits))
        )
        left = self._block_splits(elsewhere) if len(elsewhere.calls) == len(self.plain.calls) else []
        base = Policy(
            models=(type(self.model).__name__,),
            arguments=" ".join(
                dict.fromkeys([*self.inputs, *(["return_dict"] if self._has_return_dict() else [])])
            ),
            blocks=tuple(Blocks(each.path, each.flows) for each in self.lists),
            mlps=self._mlps(),
            functions=tuple(self._counts()),
            **attention,
        )
        return Draft(
            base=base,
            enters=SplitInput(first.first(), first.hidden.name, dim=first.dim),
            block_splits=block_splits,
            module_splits=module_splits,
            other_splits=[split for split in block_splits if split in left],
            gathers=self._gathers(),
            positions=self._positions(),
            unsure=list(dict.fromkeys(self.unsure)),
        )

    def _has_return_dict(self) -> bool:
        return "return_dict" in inspect.signature(self.model.forward).parameters

    # Attention

    def _attention_entries(self) -> dict[str, Any]:
        own: dict[str, None] = {}
        whole: dict[str, None] = {}
        functions: dict[str, None] = {}
        joint: dict[str, tuple[AttentionCall, AttentionCall]] = {}
        started = self.plain.calls.index(self.lists[0].calls[0])
        for call, noisy in zip(self.plain.attentions, self.noisy.attentions, strict=True):
            if call.order <= started or torch.equal(call.keys, noisy.keys):
                continue  # tokens are whole there; or its keys are a text's, whole on every rank
            num_queries, num_keys = call.lengths(self.batch)
            path = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", call.within[-1])  # `blocks.3.attn` → `blocks.*.attn`
            if (
                call.queries.dim() == 4
                and call.queries.size(0) != self.batch
                and num_queries < self.num_tokens
            ):
                raise ValueError(
                    f"{call.within[-1]} attends along one dimension of a grid of tokens ({num_queries} of "
                    f"{self.num_tokens}, {call.queries.size(0)} times): that takes a function with `spread_grid` or "
                    "`split_frames`, which is written by hand (docs/policies.md); shardformer/policy/latte.py has one"
                )
            if num_queries == self.num_tokens and num_keys == self.num_tokens:
                own[path] = None
            elif num_keys > self.num_tokens and num_queries >= self.num_tokens:
                joint.setdefault(path, (call, noisy))
            elif num_keys == self.num_tokens:
                whole[path] = None
            else:
                continue  # of text alone
            if call.function is not None:
                functions[call.function] = None
        for path in set(own) & set(joint):
            self.unsure.append(f"{path} attends with and without text; it is taken as joint attention")
            del own[path]
        if joint:
            call, noisy = next(iter(joint.values()))
            self.text = self._place_of_text(call, noisy)
        return {
            "self_attention": tuple(own),
            "joint_attention": tuple(JointAttention(path, self.text) for path in joint),
            "whole_queries": tuple(whole),
            "kernel_functions": tuple(functions),
        }

    def _place_of_text(self, call: AttentionCall, noisy: AttentionCall) -> Text:
        """Rows of the first queries that noise in the tokens left alone are the text's."""
        dim = call.queries.dim() - 3
        changed = (call.queries != noisy.queries).flatten(dim + 1).any(-1)
        changed = changed if changed.dim() == 1 else changed.any(0)
        return "last" if bool(changed[0]) else "first"

    # Splits

    def _block_splits(self, noisy_trace: Trace) -> list[SplitInput]:
        """What has a row for each token where the blocks and the modules behind them get it, and no noise."""
        first = self.lists[0]
        splits: list[SplitInput] = []
        started = self.plain.calls.index(first.calls[0])
        in_blocks = {call.path: each for each in self.lists for call in each.calls}
        seen: set[tuple[str, str]] = set()
        for call, noisy in list(zip(self.plain.calls, noisy_trace.calls, strict=True))[started:]:
            blocks = in_blocks.get(call.path)
            is_of_model = call.within == ("",)
            if blocks is None and not is_of_model:
                continue
            unchanged = [a for a, b in zip(call.arguments, noisy.arguments, strict=True) if _same(a, b)]
            if len(unchanged) == len(call.arguments) and blocks is None:
                continue  # no tokens go in
            for name in dict.fromkeys(leaf.name for leaf in unchanged):
                path = call.path if blocks is None else f"{blocks.path}.*"
                if (call is first.calls[0] and name == first.hidden.name) or (path, name) in seen:
                    continue
                seen.add((path, name))
                if blocks is not None and name in blocks.flows and len(blocks.calls) > 1:
                    path = call.path  # later blocks get it from this one
                splits += self._splits_of(path, name, [each for each in call.arguments if each.name == name])
        return splits

    def _splits_of(self, path: str, name: str, leaves: list[Leaf]) -> Iterator[SplitInput]:
        """Entries for one argument: for all of a tuple, or for the items that have a row for every token."""
        places = {leaf.index: self._place(f"{path}'s {name}", leaf.tensor) for leaf in leaves}
        dims = {index: place for index, place in places.items() if place is not None}
        if not dims:
            return
        if len(set(places.values())) == 1:
            dim, text = next(iter(dims.values()))
            yield SplitInput(path, name, dim=dim, text=text)
            return
        for index, (dim, text) in dims.items():
            yield SplitInput(path, f"{name}.{index}", dim=dim, text=text)

    def _place(self, what: str, tensor: Tensor) -> tuple[int, Text | None] | None:
        """The dim of a tensor that holds the tokens, and whether text stands there too."""
        own = [dim for dim, size in enumerate(tensor.shape) if size == self.num_tokens]
        joint = [dim for dim, size in enumerate(tensor.shape) if size in self._joint_lengths()]
        if len(own) + len(joint) > 1:
            self.unsure.append(
                f"{what} {tuple(tensor.shape)} has several dims of as many rows as tokens: it is left whole, as masks "
                "of queries and keys are"
            )
            return None
        if not own and not joint:
            return None
        if _is_mask(what, tensor) and (own or joint)[0] == tensor.dim() - 1:
            self.unsure.append(
                f"{what} {tuple(tensor.shape)} looks like a mask of keys and is left whole: attention takes this "
                "rank's part of it"
            )
            return None
        return (own[0], None) if own else (joint[0], self.text)

    def _joint_lengths(self) -> set[int]:
        lengths = {call.lengths(self.batch)[1] for call in self.plain.attentions}
        return {length for length in lengths if self.num_tokens < length < 2 * self.num_tokens}

    def _module_splits(self) -> list[SplitOutput]:
        """What modules of the model return with a row for every token, where the tokens are not made of it."""
        splits = []
        hidden = self.lists[0].hidden.tensor
        started = self.plain.calls.index(self.lists[0].calls[0])
        for call in self.plain.calls[:started]:
            if call.within != ("",) or any(leaf.tensor is hidden for leaf in call.outputs):
                continue
            places = {leaf.index: self._place(f"{call.path}'s output", leaf.tensor) for leaf in call.outputs}
            indices = tuple(
                index for index, place in places.items() if place is not None and index is not None
            )
            chosen = [place for place in places.values() if place is not None]
            if not chosen or self._makes_tokens(call):
                continue
            dim, text = chosen[0]
            splits.append(SplitOutput(call.path, indices, dim=dim, text=text))
        return splits

    def _makes_tokens(self, call: Call) -> bool:
        """Whether the first block's tokens were computed from what the call returned."""
        hidden = self.lists[0].hidden.tensor
        made = [leaf.tensor for leaf in call.outputs if leaf.tensor.requires_grad]
        return bool(made) and hidden.requires_grad and _is_made_of(hidden, made)

    def _counts(self) -> Iterator[Callable[[Spread], None]]:
        """What changes the numbers of tokens that blocks get."""
        for each in self.lists:
            for name, number in each.calls[0].numbers.items():
                if number == self.num_tokens:
                    yield partial(counts.count_own, module=f"{each.path}.*", argument=name)
                elif number in self._joint_lengths():
                    yield partial(counts.count_own, module=f"{each.path}.*", argument=name, text=True)

    # Gathers

    def _gathers(self) -> list[GatherOutput]:
        """Behind which module tokens may be whole again: the last one first, at last the last block."""
        last = max((each.calls[-1] for each in self.lists), key=self.plain.calls.index)
        ended = self.plain.calls.index(last)
        gathers: list[GatherOutput] = []
        for call, noisy in list(zip(self.plain.calls, self.noisy.calls, strict=True))[ended + 1 :]:
            if call.within != ("",):
                continue
            for plain, other in zip(call.outputs, noisy.outputs, strict=True):
                dims = [dim for dim, size in enumerate(plain.tensor.shape) if size == self.num_tokens]
                if dims and not _same(plain, other):
                    gathers.append(GatherOutput(call.path, dim=dims[0], index=plain.index))
                    break
        gathers = gathers[::-1][:_MAX_GATHERS]
        path = re.sub(r"\.[^.]+$", ".-1", last.path)
        for leaf in last.outputs:
            for dim, size in enumerate(leaf.tensor.shape):
                if size == self.num_tokens:
                    gathers.append(GatherOutput(path, dim=dim, index=leaf.index))
                elif size in self._joint_lengths():
                    gathers.append(GatherOutput(path, dim=dim, index=leaf.index, text=self.text))
        if not gathers:
            raise ValueError(
                f"nothing behind {last.path} returns a row for each of the {self.num_tokens} tokens, nor does that "
                "block: where tokens are whole again is written by hand (docs/policies.md)"
            )
        return gathers

    # The rest

    def _positions(self) -> list[Positions]:
        """Functions, called inside attention, that may give tokens their positions: the outermost first."""
        entries: dict[Positions, int] = {}
        attending = {call.within[-1] for call in self.plain.attentions}
        for call in self.plain.functions:
            if not attending & set(call.within) or self.num_tokens not in call.shape:
                continue
            entry = Positions(call.name, tokens=(call.argument,), dim=call.shape.index(self.num_tokens))
            entries[entry] = min(entries.get(entry, call.depth), call.depth)
        return sorted(entries, key=lambda entry: entries[entry])

    def _mlps(self) -> tuple[str, ...]:
        """Direct children of blocks that treat tokens one by one, with more than one linear layer."""
        attending = {path for call in self.plain.attentions for path in call.within}
        paths: dict[str, None] = {}
        for each in self.lists:
            for block in each.calls:
                for name, child in block.module.named_children():
                    path = f"{block.path}.{name}"
                    num_layers = sum(isinstance(module, nn.Linear) for module in child.modules())
                    calls = self.plain.calls_of(path)
                    if path in attending or num_layers < 2 or len(calls) != 1:
                        continue
                    shapes = [leaf.tensor.shape for leaf in (*calls[0].arguments, *calls[0].outputs)]
                    if len(shapes) == 2 and len(set(shapes)) == 1 and self.num_tokens in shapes[0]:
                        paths[f"{each.path}.*.{name}"] = None
        return tuple(paths)


def _same(plain: Leaf, noisy: Leaf) -> bool:
    return plain.value.shape == noisy.value.shape and torch.equal(plain.value, noisy.value)


def _is_mask(what: str, tensor: Tensor) -> bool:
    """Truth values, or zeros and large negative numbers; zeros alone are a mask if they are called one."""
    if tensor.dtype == torch.bool:
        return True
    hides = tensor < -1e3 if tensor.is_floating_point() else torch.tensor(False)
    return bool(((tensor == 0) | hides).all()) and ("mask" in what or bool(hides.any()))
