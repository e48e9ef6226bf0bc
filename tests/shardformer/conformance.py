"""A sharded model beside the same model on one device: output, input gradients and every parameter's gradient."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardformer
from opensora_accel import Plan, init_parallel, parallel_states
from opensora_accel.arguments import change_at, value_at
from opensora_accel.precision import LiftOperations, lift_casts
from shardformer.tensor_parallel import full_tensors
from tests.tolerances import relative_errors
from tests.video_models import CASES
from tests.video_models.case import Case, Inputs, change_tensors

Found = dict[str, Tensor]


def errors(name: str, plan: Plan, own_checkpointing: bool = False, device: str = "cpu") -> dict[str, float]:
    """Relative errors in fp64 of everything that can be wrong, on this rank of the plan's mesh."""
    init_parallel(plan, device)
    case = CASES[name]
    inputs = on_device(in_double(case.inputs()), device)
    with LiftOperations():  # Mochi makes its positions in fp32
        expected = of_first_rank(lambda: step(fp64_model(case).to(device), case, inputs), device)
        model = shardformer.shard(fp64_model(case).to(device), plan)
        if own_checkpointing:
            case.enable_checkpointing(model)
        found = step(model, case, inputs)
    return compare(dict(full_tensors(model, found)), expected)


def beside_one_device(
    make: Callable[[], nn.Module], plan: Plan, outputs_of: Callable[[nn.Module], list[Tensor]]
) -> dict[str, float]:
    """Relative errors in fp64 of what `outputs_of(model)` returns, which may call it several times, and of gradients.

    Args:
        make: the model in fp32.
    """
    init_parallel(plan)
    with LiftOperations():
        expected = of_first_rank(lambda: step_of(in_fp64(make()), outputs_of))
        model = shardformer.shard(in_fp64(make()), plan)
        return compare(dict(full_tensors(model, step_of(model, outputs_of))), expected)


def step_of(model: nn.Module, outputs_of: Callable[[nn.Module], list[Tensor]]) -> Found:
    """What `outputs_of(model)` returns, and every parameter's gradient of the sum of its mean squares."""
    outputs = outputs_of(model)
    torch.stack([out.square().mean() for out in outputs]).sum().backward()
    return {f"output {i}": out.detach() for i, out in enumerate(outputs)} | {
        name: _gradient(p) for name, p in model.named_parameters()
    }


def of_first_rank(make: Callable[[], Found], device: str = "cpu") -> Found:
    """What `make` returns on the first rank, on all of them: the others need not compute it again."""
    made = [{name: each.cpu() for name, each in make().items()} if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made, device=torch.device(device))
    assert made[0] is not None
    return {name: each.to(device) for name, each in made[0].items()}


def compare(found: Found, expected: Found) -> dict[str, float]:
    """Gradients are averaged over the ranks first, as DDP does; a text's is what passed through each rank."""
    group = parallel_states.get_data_parallel_group(get_mixed_dp_pg=True)
    by_dtype: dict[torch.dtype, Found] = defaultdict(dict)
    for name in sorted(name for name in found if not name.startswith("output ")):
        by_dtype[found[name].dtype][name] = found[name]
    for gradients in by_dtype.values():
        # In one message: hundreds of small ones would take as long as the model.
        flat = torch.cat([gradient.flatten() for gradient in gradients.values()])
        dist.all_reduce(flat, group=group)
        flat /= group.size()
        parts = flat.split([gradient.numel() for gradient in gradients.values()])
        for (name, gradient), part in zip(gradients.items(), parts, strict=True):
            found[name] = part.view_as(gradient)
    return relative_errors(found, expected)


def fp64_model(case: Case) -> nn.Module:
    return in_fp64(case.make())


def in_fp64(model: nn.Module) -> nn.Module:
    """The model itself, in fp64 also where its own code casts."""
    lift_casts(model.double())
    return model


def in_double(value: Any) -> Any:
    """The value with every floating-point tensor in fp64."""
    return change_tensors(value, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)


def on_device(value: Any, device: str) -> Any:
    """The value with every tensor there."""
    return change_tensors(value, lambda tensor: tensor.to(device))


def step(model: nn.Module, case: Case, inputs: Inputs) -> Found:
    """One training step: outputs, gradients of the inputs and of every parameter, zeros where there is none."""
    leaves, inputs = {name: _leaves(value_at(inputs, name)) for name in case.differentiated}, dict(inputs)
    for name, leaf in leaves.items():
        change_at(inputs, name, lambda _, leaf=leaf: leaf)
    extra = {"return_dict": False} if "return_dict" in inspect.signature(model.forward).parameters else {}
    outputs = list(_tensors(model(**inputs | extra)))
    generator = torch.Generator().manual_seed(2)
    targets = [torch.randn(out.shape, dtype=out.dtype, generator=generator).to(out.device) for out in outputs]
    loss = sum((out - target).square().mean() for out, target in zip(outputs, targets, strict=True))
    assert isinstance(loss, Tensor)
    loss.backward()
    found = {f"output {i}": out.detach() for i, out in enumerate(outputs)}
    found |= {
        f"input {name}": torch.cat([_gradient(leaf).flatten() for leaf in _tensors(value)])
        for name, value in leaves.items()
    }
    return found | {name: _gradient(p) for name, p in model.named_parameters() if p.requires_grad}


def _leaves(value: Any) -> Any:
    """Of a tensor, or of a list of them."""
    if isinstance(value, list):
        return [_leaves(item) for item in value]
    return value.clone().requires_grad_()


def _tensors(value: Any) -> Iterator[Tensor]:
    """Those of a tensor, tuple or list, where some may be None."""
    if isinstance(value, Tensor):
        yield value
    elif value is not None:
        for item in value:
            yield from _tensors(item)


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
