"""The first module, and the first rank, at which a step met NaN or an infinity.

When it shows in the norm of the gradients it is everywhere: attention spreads one bad token over a clip, collectives
spread it over the ranks. So the step is run once more from the inputs that it had, with a look at every module's
output, and then at every gradient on the way back:

    module       blocks.0.norm   blocks.0.attn   blocks.0.mlp   blocks.1.norm   …
    rank 0       finite          finite          finite         NaN                  it came through attention, …
    rank 1       finite          finite          NaN            NaN                  … from here

Every rank counts the looks alike, as all run the same modules in the same order. Whoever has the lowest number that is
not finite was first.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from opensora_accel.arguments import tensors_in
from opensora_accel.communications import gather_objects
from opensora_accel.watchdog import named


@dataclass
class ForwardCall:
    """One forward of the model: what it was called with, and the gradients of what it returned."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random_state: tuple[Tensor, Tensor | None]
    # Whether autocast was on for the model's device, and to which type.
    autocast: tuple[bool, torch.dtype]
    gradients: dict[int, Tensor]


class StepInputs:
    """Within it, keeps what the model is called with in each step, without copies.

    What takes memory by it are inputs and the gradients of outputs, of each microbatch until the step ends.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self.calls: list[ForwardCall] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> StepInputs:
        @torch.compiler.disable(reason="keeps the inputs of a step")
        def before(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # A copy that the loop makes of the model has its hooks.
            if torch.is_grad_enabled() and model is self._model:
                parameter = next(self._model.parameters())
                on_gpu = torch.cuda.get_rng_state(parameter.device) if parameter.is_cuda else None
                kind = parameter.device.type
                autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
                self.calls.append(ForwardCall(args, kwargs, (torch.get_rng_state(), on_gpu), autocast, {}))

        @torch.compiler.disable(reason="keeps the gradients of a step's outputs")
        def after(model: nn.Module, _args: Any, output: Any) -> None:
            if not torch.is_grad_enabled() or model is not self._model:
                return
            # By a weak reference: an output's hook must not keep the call, which keeps the inputs of an earlier step.
            call = weakref.ref(self.calls[-1])
            for index, tensor in enumerate(tensors_in(output)):
                if tensor.requires_grad:
                    tensor.register_hook(_keeper(call, index))

        self._hooks = [
            # Before any other hook: what is called again passes through the others again.
            self._model.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            self._model.register_forward_hook(after),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self.calls.clear()


def _keeper(call: weakref.ref[ForwardCall], index: int) -> Any:
    def keep(gradient: Tensor) -> None:
        known = call()
        if known is not None:
            known.gradients[index] = gradient

    return keep


def trace_nonfinite(model: nn.Module, calls: list[ForwardCall]) -> str:
    """Runs a step's forwards and backwards again, and names the first module and rank that is not finite.

    Gradients, buffers' random state and the model's hooks are left as they were. All ranks call it together.

    Communication: that of the step, and an object all-gather.
    """
    looks: list[tuple[str, Tensor]] = []

    def look(what: str, tensor: Tensor) -> None:
        looks.append((what, torch.isfinite(tensor.detach()).all()))

    gradients: dict[nn.Parameter, Tensor | None] = {each: each.grad for each in model.parameters()}
    watched = [call for call in calls if call.gradients]
    try:
        for parameter in gradients:
            parameter.grad = None
        for call in watched:
            # Inside of a compiled block no hook is called.
            with as_then(model, call), _looking(model, look), torch.compiler.set_stance("force_eager"):
                for index, tensor in enumerate(tensors_in((call.args, call.kwargs))):
                    if tensor.is_floating_point():
                        look(f"tensor {index} that the model was called with", tensor)
                with torch.enable_grad():
                    outputs = tensors_in(model(*call.args, **call.kwargs))
                chosen = {index: outputs[index] for index in call.gradients}
                for index, gradient in call.gradients.items():
                    look(f"the loss: the gradient of the model's output {index}", gradient)
                torch.autograd.backward(list(chosen.values()), [call.gradients[index] for index in chosen])
    finally:
        for parameter, before in gradients.items():
            parameter.grad = before
    bad = next((number for number, (_, finite) in enumerate(looks) if not finite), None)
    weights = [
        name for name, parameter in model.named_parameters() if not torch.isfinite(parameter.detach()).all()
    ]
    mine: Any = (bad, "" if bad is None else looks[bad][0], weights[:1])
    everyone = gather_objects(mine)
    by_rank = {rank: each for rank, each in enumerate(everyone) if each[0] is not None}
    broken = {rank: each[2][0] for rank, each in enumerate(everyone) if each[2]}
    broken_weight = (
        f"; the weight {next(iter(broken.values()))} itself is not finite on {named([*broken], 'rank')}"
        if broken
        else ""
    )
    if not by_rank:
        return (
            f"run again, the step of {len(watched)} forwards was finite in every module: the reduction of gradients "
            f"over ranks overflowed, or it does not repeat itself{broken_weight}"
        )
    first = min(number for number, _, _ in by_rank.values())
    ranks = [rank for rank, each in by_rank.items() if each[0] == first]
    return f"first in {by_rank[ranks[0]][1]}, on {named(ranks, 'rank')}{broken_weight}"


@contextmanager
def as_then(model: nn.Module, call: ForwardCall) -> Iterator[None]:
    """Within it, random numbers and autocast are those of the call."""
    device = next(model.parameters()).device
    is_on, dtype = call.autocast
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        # Without the cache, which would outlive a step along a gradient.
        torch.autocast(device.type, dtype, enabled=is_on, cache_enabled=False),
    ):
        on_host, on_gpu = call.random_state
        torch.set_rng_state(on_host)
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu, device)
        yield


@contextmanager
def _looking(model: nn.Module, look: Any) -> Iterator[None]:
    """Within it, `look(what, tensor)` sees the outputs of every module and their gradients, in order."""

    def hook(name: str) -> Any:
        def after(_module: nn.Module, args: Any, output: Any) -> None:
            for tensor in tensors_in(output):
                if not tensor.is_floating_point():
                    continue
                look(f"{name}, forward", tensor)
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient: look(f"what follows {name}, backward", gradient))
            for tensor in tensors_in(args):
                if tensor.requires_grad and tensor.is_floating_point():
                    tensor.register_hook(lambda gradient: look(f"{name}, backward", gradient))

        return after

    with ExitStack() as undo:
        for name, module in model.named_modules():
            # What a module's parts return says more than what it returns itself; its own expressions come last.
            if name:
                undo.callback(module.register_forward_hook(hook(name)).remove)
        yield
