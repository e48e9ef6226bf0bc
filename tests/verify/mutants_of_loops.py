"""Mistakes of users' own loops: a wrong step each, where it is tried, and what an engineer would call it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from opensora_accel.communications import (
    gather_forward_split_backward,
    share_sizes,
    split_forward_gather_backward,
)
from opensora_accel.verify.meshes import Run
from opensora_accel.verify.results import Reference
from tests.verify import corners
from tests.verify.corners import batch, finish
from tests.verify.defects import Mutant
from tests.verify.loops import Small, split_small
from tests.verify.meshes import Meshes

DATA: Meshes = ({"data": 2}, {"data": 3})
SEQUENCE: Meshes = ({"data": 2, "sequence": 2}, {"data": 1, "sequence": 3}, {"data": 3, "sequence": 1})
"""As `meshes.ULYSSES`, for what is no Plan."""


@dataclass(frozen=True)
class Loop:
    """A user's two functions."""

    step: Callable[..., Any]
    model_fn: Callable[[], nn.Module] = Small

    def model(self) -> nn.Module:
        return self.model_fn()

    def __call__(self, model: nn.Module, run: Run) -> Any:
        return self.step(model, run)


def mutant(
    name: str,
    step: Callable[..., Any],
    kind: str,
    axes: tuple[str, ...],
    factor: str = "",
    *,
    model_fn: Callable[[], nn.Module] = Small,
    meshes: Meshes = DATA,
    reference: Reference | None = None,
) -> Mutant:
    return Mutant(
        f"loop: {name}",
        (),
        Loop(step, model_fn),
        meshes,
        kind,
        axes,
        factor,
        timeout_s=10,
        reference=reference,
    )


def average(tensor: Tensor | None) -> None:
    assert tensor is not None
    dist.all_reduce(tensor)
    tensor /= dist.get_world_size()


# What was taken for right.


class Hidden(nn.Module):
    """A weight, beside a layer that is called `module`, as torch's wrappers call what they wrap."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.module = nn.Parameter(torch.randn(8, 4)), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.module(x).tanh()


class WithHidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = Hidden(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x))


def forgets_the_hidden_weight(model: Any, run: Run) -> Tensor:
    loss = finish(model(batch()))
    if not run.is_reference:
        for name, parameter in model.named_parameters():
            if name != "layer.weight":
                average(parameter.grad)
    return loss


def averages_real_parts(model: Any, run: Run) -> Tensor:
    loss = finish(model(batch()))
    if not run.is_reference:
        for parameter in model.parameters():
            gradient = (
                torch.view_as_real(parameter.grad)[..., 0] if parameter.is_complex() else parameter.grad
            )
            real = gradient.contiguous()
            average(real)
            gradient.copy_(real)
    return loss


def trains_a_scale_beside_the_model(model: Any, run: Run) -> Tensor:
    """It is averaged by nobody."""
    torch.manual_seed(0)
    scale = nn.Parameter(torch.randn(4))
    torch.manual_seed(run.data_rank)
    forward = model if run.is_reference else DistributedDataParallel(model)
    return finish(forward(batch()) * scale)


def builds_the_optimizer_before_sharding(model: Any, run: Run) -> Tensor:
    optimizer = torch.optim.AdamW(model.parameters())
    if not run.is_reference:
        fully_shard(model, mesh=init_device_mesh("cpu", (run.world_size,)))
    loss = finish(model(batch()))
    optimizer.step()
    return loss


_TAKEN_FOR_RIGHT = [
    mutant(
        "a weight beside `module`", forgets_the_hidden_weight, "missing sum", ("data",), model_fn=WithHidden
    ),
    mutant(
        "imaginary parts not averaged",
        averages_real_parts,
        "missing sum",
        ("data",),
        model_fn=corners.Spectral,
    ),
    mutant("a parameter outside of the model", trains_a_scale_beside_the_model, "outside", ()),
    mutant("the optimizer before fully_shard", builds_the_optimizer_before_sharding, "optimizer", ("data",)),
]


# What clipping hides.


def clip(model: nn.Module, limit: float = 1e-3) -> None:
    """As every loop has it; small enough to change every gradient."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), limit)


def shared(model: Any, run: Run, scale_up: str | None = "up") -> Tensor:
    """Forward and backward of a sequence over ranks, averaged over all of them."""
    if run.is_reference:
        return finish(model(batch()))
    forward = DistributedDataParallel(split_small(model, run.mesh.get_group("sequence"), scale_up))
    return finish(forward(batch()))


def clips_what_is_too_small(model: Any, run: Run) -> Tensor:
    loss = shared(model, run, None)
    clip(model)
    return loss


def clips_what_is_too_large(model: Any, run: Run) -> Tensor:
    """Of another limit than the single device, too."""
    forward = model if run.is_reference else DistributedDataParallel(model)
    loss = finish(forward(batch()) * 1.0)
    if not run.is_reference:
        for parameter in model.parameters():
            parameter.grad *= run.data_size
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-4)
    return loss


def clips_by_the_norm_of_a_shard(model: Any, run: Run) -> Tensor:
    if not run.is_reference:
        fully_shard(model, mesh=init_device_mesh("cpu", (run.world_size,)))
    loss = finish(model(batch()))
    gradients = [parameter.grad for parameter in model.parameters()]
    norm = torch.nn.utils.get_total_norm([g if run.is_reference else g.to_local() for g in gradients])
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1e-3, norm)
    return loss


def clips_before_it_averages(model: Any, run: Run) -> Tensor:
    loss = finish(model(batch()))
    clip(model)
    if not run.is_reference:
        for parameter in model.parameters():
            average(parameter.grad)
    return loss


_CLIPPED = [
    mutant(
        "1/sp beneath clipping",
        clips_what_is_too_small,
        "scale",
        ("sequence",),
        "sequence⁻¹",
        meshes=SEQUENCE,
    ),
    mutant("a sum beneath clipped values", clips_what_is_too_large, "scale", ("data",), "data"),
    mutant("clipped by the norm of a shard", clips_by_the_norm_of_a_shard, "clipping", ("data",)),
    mutant("clipped before the average", clips_before_it_averages, "clipping", ("data",)),
]


# What one cause hides of another.


@dataclass
class Conditions:
    """As models of diffusers hand them on: nested, and no dict."""

    text: dict[str, list[Tensor]]


class Placed(Small):
    """Every token is told its place; a rank is told where its tokens begin."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.pool, self.text = nn.Linear(1, 8), nn.Linear(8, 8), nn.Linear(4, 4)
        self.is_pooled, self.mean = False, lambda x: x.mean(1, keepdim=True)

    def forward(self, x: Tensor, offset: Tensor, conditions: Conditions | None = None) -> Tensor:  # type: ignore[override]
        enter, leave = self.region or (lambda x: x, lambda x: x)
        if conditions is not None:
            x = x + self.text(conditions.text["clip"][0])
        x = enter(self.embed(x))
        at = torch.arange(x.size(1), dtype=x.dtype) + offset
        x = x + self.places(at[:, None] / 7)
        if self.is_pooled:
            x = x + self.pool(self.mean(x))
        return leave(self.out(x + torch.tanh(self.mlp(self.norm(x)))))


def offset_of(run: Run, num_tokens: int = 11) -> Tensor:
    """Where this rank's tokens begin."""
    if run.is_reference or run.shape.degree("sequence") == 1:
        return torch.tensor(0)
    group = run.mesh.get_group("sequence")
    return torch.tensor(sum(share_sizes(num_tokens, group.size())[: group.rank()]))


def placed(model: Any, run: Run, scale_up: str | None = "up", offset: Tensor | None = None) -> Tensor:
    forward = model
    if not run.is_reference:
        model = split_small(model, run.mesh.get_group("sequence"), scale_up)
        forward = DistributedDataParallel(model, find_unused_parameters=True)
    return finish(forward(batch(), offset_of(run) if offset is None else offset))


def told_its_place_and_scaled(model: Any, run: Run) -> Tensor:
    return placed(model, run, None)


class _Rolled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.roll(1, 1)


def told_its_place_and_mixed_in_backward(model: Any, run: Run) -> Tensor:
    if not run.is_reference and run.shape.degree("sequence") > 1:
        model.mlp.register_forward_hook(lambda _module, _args, output: _Rolled.apply(output))
    return placed(model, run)


def told_its_place_and_pools_its_own(model: Any, run: Run) -> Tensor:
    model.is_pooled = True
    return placed(model, run)


def microbatches(model: Any, run: Run, seed_by_rank: Callable[[int], bool], nested: bool = False) -> Tensor:
    forward, total = model, torch.zeros(())
    if not run.is_reference:
        model = split_small(model, run.mesh.get_group("sequence"))
        forward = DistributedDataParallel(model, find_unused_parameters=True)
    for micro in range(2):
        seed = run.rank if seed_by_rank(micro) and not run.is_reference else run.data_rank
        noise = torch.randn(2, 11, 4, generator=torch.Generator().manual_seed(100 * micro + seed))
        conditions = Conditions({"clip": [noise]}) if nested else None
        x = torch.randn(2, 11, 4, generator=torch.Generator().manual_seed(7 + run.data_rank))
        arguments = (x, offset_of(run), conditions) if nested else (x + noise, offset_of(run))
        loss = forward(*arguments).square().mean() / 2
        loss.backward()
        total += loss.detach()
    return total


def second_microbatchs_noise_by_rank(model: Any, run: Run) -> Tensor:
    return microbatches(model, run, lambda micro: micro == 1)


def nested_noise_by_rank(model: Any, run: Run) -> Tensor:
    return microbatches(model, run, lambda micro: True, nested=True)


def refuses_heads_and_scales(model: Any, run: Run) -> Tensor:
    if run.shape.degree("sequence") == 3:
        raise ValueError("4 heads do not divide by 3 ranks")
    return shared(model, run, None)


def drops_heads_and_scales(model: Any, run: Run) -> Tensor:
    """Channels of 8: with 3 ranks, the last 2 are left out."""
    degree = run.shape.degree("sequence")
    if degree > 1:
        kept = torch.arange(8) < 8 // degree * degree
        model.mlp.register_forward_hook(lambda _module, _args, output: output * kept)
    return shared(model, run, None)


HEADS: Meshes = (
    {"data": 2, "sequence": 2},
    {"data": 1, "sequence": 4},
    {"data": 1, "sequence": 3},
    {"data": 3, "sequence": 1},
)

_HIDDEN = [
    mutant(
        "an exact factor, and a place for each rank", told_its_place_and_scaled, "scale", ("sequence",),
        "sequence⁻¹", model_fn=Placed, meshes=SEQUENCE,
    ),
    mutant(
        "mixed in backward, and a place for each rank", told_its_place_and_mixed_in_backward, "values",
        ("sequence",), model_fn=Placed, meshes=SEQUENCE,
    ),
    mutant(
        "pooled over its own tokens, and a place for each rank", told_its_place_and_pools_its_own, "values",
        ("sequence",), model_fn=Placed, meshes=SEQUENCE,
    ),
    mutant(
        "noise by rank in the second microbatch", second_microbatchs_noise_by_rank, "inputs", ("sequence",),
        model_fn=Placed, meshes=SEQUENCE,
    ),
    mutant(
        "noise by rank in a nested argument", nested_noise_by_rank, "inputs", ("sequence",),
        model_fn=Placed, meshes=SEQUENCE,
    ),
    mutant(
        "1/sp, and heads that are refused", refuses_heads_and_scales, "scale", ("sequence",), "sequence⁻¹",
        meshes=HEADS,
    ),
    mutant(
        "1/sp, and heads that are dropped", drops_heads_and_scales, "scale", ("sequence",), "sequence⁻¹",
        meshes=HEADS,
    ),
]  # fmt: skip


# What was called by another name.


def clips_by_hand(model: Any, run: Run) -> Tensor:
    """On ranks only, which the verifier does not see: a factor, the same on all ranks, that goes with no degree."""
    forward = model if run.is_reference else DistributedDataParallel(model)
    loss = finish(forward(batch()))
    if not run.is_reference:
        norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
        for parameter in model.parameters():
            parameter.grad *= 1e-2 / norm
    return loss


def means_over_its_own_share(model: Any, run: Run) -> Tensor:
    """Of 5 samples; ranks have 3 and 2."""
    forward = model if run.is_reference else DistributedDataParallel(model)
    return finish(forward(torch.randn(5, 11, 4).tensor_split(run.data_size)[run.data_rank]))


def means_over_its_own_tokens(model: Any, run: Run) -> Tensor:
    """Valid ones, of which ranks have different numbers; one device counts those of all."""
    x, valid = torch.randn(4, 11, 4), torch.arange(11) < torch.tensor([[11], [7], [5], [10]])
    share = (t.tensor_split(run.data_size)[run.data_rank] for t in (x, valid))
    forward = model if run.is_reference else DistributedDataParallel(model)
    x, valid = share
    loss = (forward(x).square().mean(-1) * valid).sum() / valid.sum()
    loss.backward()
    return loss


def hybrid(model: Any, run: Run) -> Any:
    return model if run.is_reference else fully_shard(model, mesh=run.mesh["replicate", "shard"])


def leaves_out_the_all_reduce(model: Any, run: Run) -> Tensor:
    model = hybrid(model, run)
    if not run.is_reference:
        model.set_requires_all_reduce(False)
    return finish(model(batch()).clone())


def shards_in_each_replica_only(model: Any, run: Run) -> Tensor:
    if not run.is_reference:
        fully_shard(model, mesh=run.mesh["shard"])
    return finish(model(batch()).clone())


def skips_one_of_two_collectives(model: Any, run: Run) -> Tensor:
    """So that its second meets the others' first, which is of another size."""
    loss = finish(model(batch()))
    if not run.is_reference and run.rank != 1:
        dist.all_reduce(torch.zeros(3))
    for parameter in () if run.is_reference else model.parameters():
        average(parameter.grad)
    return loss


def patches_the_class_and_scales(model: Any, run: Run) -> Tensor:
    forward = model if run.is_reference else DistributedDataParallel(model)
    if run.is_reference or run.shape.degree("sequence") == 1:
        return finish(forward(batch()))
    original, group = corners.Patched.forward, run.mesh.get_group("sequence")

    def spread(self: Any, x: Tensor) -> Tensor:
        x = original(self, split_forward_gather_backward(x, group, 1, "down"))
        return gather_forward_split_backward(x, group, 1)

    corners.Patched.forward = spread  # type: ignore[method-assign]
    return finish(forward(batch()))


HYBRID: Meshes = ({"replicate": 2, "shard": 2}, {"replicate": 1, "shard": 3}, {"replicate": 3, "shard": 1})

_NAMED = [
    mutant("clipped by hand", clips_by_hand, "scale", ("data",)),
    mutant(
        "the mean of a rank's own samples", means_over_its_own_share, "shares", ("data",), "share", reference="whole"
    ),
    mutant(
        "the mean of a rank's own tokens", means_over_its_own_tokens, "shares", ("data",), "share",
        reference="whole", meshes=({"data": 2}, {"data": 4}),
    ),
    mutant("HSDP without its all-reduce", leaves_out_the_all_reduce, "missing sum", ("replicate",), meshes=HYBRID),
    mutant("HSDP within replicas", shards_in_each_replica_only, "missing sum", ("replicate",), meshes=HYBRID),
    mutant("one of two collectives skipped", skips_one_of_two_collectives, "failure", ("data",)),
    mutant(
        "1/sp in a patched class", patches_the_class_and_scales, "scale", ("sequence",), "sequence⁻¹",
        model_fn=corners.Patched, meshes=SEQUENCE,
    ),
]  # fmt: skip


# Beside what was no mistake.


def pipeline_without_average(model: Any, run: Run) -> Any:
    return corners.pipeline(model, run, is_cut=True, is_averaged=False)


def loses_a_stage_of_one_replica(model: Any, run: Run) -> Any:
    loss = corners.pipeline(model, run, is_cut=False)
    if not run.is_reference and run.data_size > 1 and run.rank == 2:
        for parameter in model.parameters():
            parameter.grad = None
    return loss


def slices_that_are_not_summed(model: Any, run: Run) -> Tensor:
    """What enters the column-parallel layers gets the gradient of this rank's columns only."""
    return corners.megatron_slices(model, run, is_summed=False)


def experts_counted_twice(model: Any, run: Run) -> Tensor:
    loss = corners.expert_parallel(model, run)
    if not run.is_reference:
        for parameter in model.experts.parameters():
            if parameter.grad is not None:
                parameter.grad *= run.shape.degree("ep")
    return loss


def fsdp1_summed(model: Any, run: Run) -> Tensor:
    """Flat, and clipped."""
    return corners.fsdp1(model, run, use_orig_params=False, clipped=True, scale=run.data_size)


def tells_a_wrong_loss(model: Any, run: Run) -> Tensor:
    """One and the same on all ranks, which is no part of anything."""
    forward = model if run.is_reference else DistributedDataParallel(model)
    loss = finish(forward(batch())).detach()
    if not run.is_reference:
        dist.all_reduce(loss)
    return loss


_BESIDE = [
    mutant(
        "a pipeline that is not averaged", pipeline_without_average, "missing sum", ("data",),
        model_fn=corners.Stages, meshes=({"data": 2, "pp": 2}, {"data": 1, "pp": 2}),
    ),
    mutant(
        "a stage without gradients in one replica", loses_a_stage_of_one_replica, "missing gradient", ("data",),
        model_fn=corners.Stages, meshes=({"data": 2, "pp": 2}, {"data": 1, "pp": 2}),
    ),
    mutant(
        "slices whose input is not summed", slices_that_are_not_summed, "values", ("tensor",),
        model_fn=corners.Megatron, meshes=({"data": 2, "tensor": 2}, {"data": 1, "tensor": 4}),
    ),
    mutant(
        "experts counted twice", experts_counted_twice, "scale", ("ep",), "ep", model_fn=corners.Experts,
        meshes=({"data": 2, "ep": 2}, {"data": 1, "ep": 3}),
    ),
    mutant("FSDP1 summed", fsdp1_summed, "scale", ("data",), "data"),
    mutant("a loss told as a sum", tells_a_wrong_loss, "result", ("data",), "data"),
]  # fmt: skip


LOOP_MUTANTS = [*_TAKEN_FOR_RIGHT, *_CLIPPED, *_HIDDEN, *_NAMED, *_BESIDE]
