"""Changing one module's forward, or an attribute for a while, and refusing what would go unnoticed after that."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

Forward = Callable[..., Any]
StepArguments = tuple[tuple[Any, ...], dict[str, Any]]


def wrap_forward(module: nn.Module, wrap: Callable[[Forward], Forward]) -> Callable[[], None]:
    """Replaces `module.forward` by `wrap(module.forward)` on this instance; returns the function that undoes it.

    Wrappers nest; they are undone in reverse order. Module hooks run outside of the wrapper. Until then the module
    refuses `copy.deepcopy`.
    """
    before = {name: vars(module).get(name) for name in ("forward", "__deepcopy__")}
    original = module.forward
    module.forward = functools.wraps(original)(wrap(original))
    module.__deepcopy__ = refuse_copy  # type: ignore[assignment]

    def undo() -> None:
        for name, value in before.items():
            if value is None:
                delattr(module, name)
            else:
                setattr(module, name, value)

    return undo


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within it `owner.name` is `value`; afterwards it is what it was, or inherited where it was."""
    own = vars(owner)  # of a class as it stands there: a static method, a property
    was_own, before = name in own, own.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if was_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def refuse_pickle(_protocol: int) -> None:
    """Stands for `__reduce_ex__` of a sharded model: what would be read back is not this model.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        "a sharded model cannot be pickled whole, as by torch.save(model); save its weights, "
        "torch.save(model.state_dict(), path) or model.save_pretrained(folder), and shard the model that loads them"
    )


def refuse_copy(_memo: dict[int, Any]) -> None:
    """Stands for `__deepcopy__` of a wrapped model, whose copy would run the original's weights.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        "a model whose forward was wrapped (sharded or checkpointed) cannot be deep-copied; copy it before "
        "shardformer.shard() or checkpoint_blocks(), or build a second model and load this one's state_dict()"
    )


class ReplacedParameter(nn.Parameter):
    """A parameter whose place in the model another has taken: no backward gives it a gradient.

    An optimizer that holds it would step nothing, without a word. Every optimizer asks for the gradient.
    """

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """Raises ValueError, always."""
        raise ValueError(
            "this optimizer was made before shardformer.shard(model, plan), which has replaced the parameters that it "
            "holds: it would train nothing. Make the optimizer after shard, from model.parameters()"
        )


def refuse_old_parameters(before: Iterable[Tensor | None], model: nn.Module) -> None:
    """Makes those of `before` that `model` does not have any more parameters that no optimizer steps."""
    now = {id(parameter) for parameter in model.parameters()}
    for parameter in before:
        # A tensor of a class of its own is not ours to change.
        if type(parameter) is nn.Parameter and id(parameter) not in now:
            parameter.__class__ = ReplacedParameter


def when_gradients_are_there(
    args: tuple[Any, ...], kwargs: dict[str, Any], look: Callable[[], None]
) -> StepArguments | None:
    """Calls `look` when an optimizer that is about to step has its gradients.

    That is now, or, where `optimizer.step(closure)` has a closure make them, when that has run for the first time. For
    hooks of `register_optimizer_step_pre_hook`, which return what this returns.

    Args:
        args, kwargs: those of `step`; the optimizer itself is the first.
    """
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        look()
        return None
    has_looked = False

    @functools.wraps(closure)
    def looked_at() -> Any:
        nonlocal has_looked
        loss = closure()
        # Called again, as by a line search, it is at other weights.
        if not has_looked:
            has_looked = True
            look()
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": looked_at}
    return (args[0], looked_at, *args[2:]), kwargs
