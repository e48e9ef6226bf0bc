"""Which modules of a model a step is in: blocks, their attention and their MLPs, forward, recomputed and backward.

The modules are those of the model's policy; hooks show when each runs. What a module does in backward begins when the
gradient of its output is there, and ends when that of its input is. Where a forward runs within a backward, it is a
recomputation. Profiler and planner follow the same modules, so that what one measures the other can foresee.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from posixpath import commonpath
from typing import Any

import torch
from torch import Tensor, nn

from opensora_accel.observe.kinds import BACKWARD, FORWARD, RECOMPUTE
from opensora_accel.observe.places import find_blocks
from shardformer import blocks_of
from shardformer.paths import find
from shardformer.policy import Policy

# Gets the values that go into a region, or come out of it.
_See = Callable[[list[Any]], None]
# Is told the region, the path of its module, and the phase.
Tell = Callable[[str, str, str], None]


@contextmanager
def follow_modules(model: nn.Module, policy: Policy | None, begin: Tell, end: Tell) -> Iterator[None]:
    """Within it, `begin` and `end` are called where the step comes to a block, an attention or an MLP, and leaves it.

    Where gradients come in parts, `begin` may be called for a region that has begun already. A recomputation that stops
    as soon as it has what backward needs ends no region: the backward of its block begins.
    """
    with ExitStack() as undo:
        for region, name, begins_at, ends_at in _regions(model, policy):
            begins, ends = _hooks(region, name, begin, end)
            if begins_at is ends_at:
                undo.callback(begins_at.register_forward_pre_hook(_inputs(begins), with_kwargs=True).remove)
                undo.callback(ends_at.register_forward_hook(_outputs(ends)).remove)
            else:
                undo.callback(begins_at.register_forward_hook(_outputs(begins)).remove)
                undo.callback(ends_at.register_forward_pre_hook(_inputs(ends), with_kwargs=True).remove)
        yield


def _hooks(region: str, name: str, begin: Tell, end: Tell) -> tuple[_See, _See]:
    """The functions to call with the values that go into a region, and with those that come out."""

    def begins(values: list[Any]) -> None:
        phase = phase_of_modules()
        # The gradient of what goes in is the last that a region's backward computes.
        tensor = _first_with_gradient(values)
        if tensor is not None:
            tensor.register_hook(lambda _gradient: end(region, name, BACKWARD))
        begin(region, name, phase)

    def ends(values: list[Any]) -> None:
        phase = phase_of_modules()
        end(region, name, phase)
        tensor = _first_with_gradient(values)
        if tensor is not None:
            tensor.register_hook(lambda _gradient: begin(region, name, BACKWARD))

    return begins, ends


def phase_of_modules() -> str:
    """Autograd runs on this thread only within a backward, and a forward there is a recomputation."""
    return RECOMPUTE if torch._C._current_graph_task_id() != -1 else FORWARD


def _first_with_gradient(values: list[Any]) -> Tensor | None:
    """The first tensor in nested lists, tuples and dicts whose gradient autograd will compute."""
    for value in values:
        if isinstance(value, Tensor):
            if value.requires_grad:
                return value
        elif isinstance(value, (list, tuple, dict)):
            first = _first_with_gradient([*(value.values() if isinstance(value, dict) else value)])
            if first is not None:
                return first
    return None


def _inputs(see: _See) -> Callable[..., None]:
    """A hook that shows what goes into a module."""

    @torch.compiler.disable(reason="a profiler looks at the time")
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        see([*args, *kwargs.values()])

    return hook


def _outputs(see: _See) -> Callable[..., None]:
    """A hook that shows what comes out of a module."""

    @torch.compiler.disable(reason="a profiler looks at the time")
    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        see([output])

    return hook


def blocks_by_policy(model: nn.Module, policy: Policy | None) -> dict[str, nn.Module]:
    return find_blocks(model, None if policy is None else blocks_of(model, policy))


def _regions(model: nn.Module, policy: Policy | None) -> Iterator[tuple[str, str, nn.Module, nn.Module]]:
    """Region and path of each block, attention and MLP, and its module twice; one that is two of them is the first.

    Where a block calls the attention kernel itself, the path is the block's, and the modules are the one that runs
    just before the kernel and the one that runs just after.
    """
    found = [("block", name, module, module) for name, module in blocks_by_policy(model, policy).items()]
    if policy is not None:
        attentions = [*policy.self_attention, *policy.whole_queries, *policy.linear_attention]
        attentions += [entry.module for entry in policy.joint_attention]
        attentions += [entry.module for entry in policy.whole_sequences]
        for region, paths in (("attention", [*attentions, *policy.attention_regions]), ("mlp", policy.mlps)):
            for path in paths:
                first, last = (path, path) if isinstance(path, str) else path
                pairs = zip(find(model, first), find(model, last), strict=True)
                for (name, begins_at), (other_name, ends_at) in pairs:
                    # Names of modules are no paths of files, but share their parents as those do.
                    shared = commonpath([name.replace(".", "/"), other_name.replace(".", "/")])
                    found.append((region, shared.replace("/", "."), begins_at, ends_at))
    seen = set()
    for region, name, begins_at, ends_at in found:
        if (begins_at, ends_at) not in seen:
            seen.add((begins_at, ends_at))
            yield region, name, begins_at, ends_at
