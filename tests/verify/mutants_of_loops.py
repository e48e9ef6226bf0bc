"""Mistakes of users' own loops: a wrong step each, where it is tried, and what an engineer would call it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from opensora_accel.communications import gather_forward_split_backward, split_forward_gather_backward
from opensora_accel.observe.meshes import Run
from opensora_accel.verify.results import Reference
from tests.verify import corners, parted_loops, sharded_loops
from tests.verify.defects import Mutant
from tests.verify.loops import Small, average, averaged, batch, finish, plain_ddp, sharded, spread
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
    loop, options = Loop(step, model_fn), {"reference": reference}
    return Mutant(f"loop: {name}", (), loop, meshes, kind, axes, factor, **options)


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
        average(parameter for name, parameter in model.named_parameters() if name != "layer.weight")
    return loss


def averages_real_parts(model: Any, run: Run) -> Tensor:
    loss = finish(model(batch()))
    if not run.is_reference:
        for parameter in model.parameters():
            gradient = parameter.grad.real  # a view of a complex one, itself of a real one
            real = gradient.contiguous()
            dist.all_reduce(real)
            gradient.copy_(real / run.world_size)
    return loss


def trains_a_scale_beside_the_model(model: Any, run: Run) -> Tensor:
    """It is averaged by nobody."""
    torch.manual_seed(0)
    scale = nn.Parameter(torch.randn(4))
    torch.manual_seed(run.data_rank)
    forward = averaged(model, run)
    return finish(forward(batch()) * scale)


def builds_the_optimizer_before_sharding(model: Any, run: Run) -> Tensor:
    optimizer = torch.optim.AdamW(model.parameters())
    sharded(model, run)
    loss = finish(model(batch()))
    optimizer.step()
    return loss


_TAKEN_FOR_RIGHT = [
    mutant("a weight beside `module`", forgets_the_hidden_weight, "missing sum", ("data",), model_fn=WithHidden),
    mutant("imaginary parts not averaged", averages_real_parts, "missing sum", ("data",), model_fn=corners.Spectral),
    mutant("a parameter outside of the model", trains_a_scale_beside_the_model, "outside", ()),
    mutant("the optimizer before fully_shard", builds_the_optimizer_before_sharding, "optimizer", ("data",)),
]  # fmt: skip


# What clipping hides.


def clip(model: nn.Module, limit: float = 1e-3) -> None:
    """As every loop has it; small enough to change every gradient."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), limit)


def clips_what_is_too_small(model: Any, run: Run) -> Tensor:
    forward = spread(model, run, None)
    loss = finish(forward(batch()))
    clip(model)
    return loss


def clips_what_is_too_large(model: Any, run: Run) -> Tensor:
    """Summed, where it should be averaged."""
    forward = averaged(model, run)
    loss = finish(forward(batch()) * 1.0)
    if not run.is_reference:
        for parameter in model.parameters():
            parameter.grad *= run.data_size
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-4)
    return loss


def clips_by_the_norm_of_a_shard(model: Any, run: Run) -> Tensor:
    sharded(model, run)
    loss = finish(model(batch()))
    gradients = [parameter.grad for parameter in model.parameters()]
    norm = torch.nn.utils.get_total_norm([g if run.is_reference else g.to_local() for g in gradients])
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1e-3, norm)
    return loss


def clips_before_it_averages(model: Any, run: Run) -> Tensor:
    loss = finish(model(batch()))
    clip(model)
    if not run.is_reference:
        average(model.parameters())
    return loss


_CLIPPED = [
    mutant("1/sp beneath clipping", clips_what_is_too_small, "scale", ("sequence",), "sequence⁻¹", meshes=SEQUENCE),
    mutant("a sum beneath clipped values", clips_what_is_too_large, "scale", ("data",), "data"),
    mutant("clipped by the norm of a shard", clips_by_the_norm_of_a_shard, "clipping", ("data",)),
    mutant("clipped before the average", clips_before_it_averages, "clipping", ("data",)),
]  # fmt: skip


# What was called by another name.


def clips_by_hand(model: Any, run: Run) -> Tensor:
    """On ranks only, which the verifier does not see: a factor, the same on all ranks, that goes with no degree."""
    loss = plain_ddp(model, run)
    if not run.is_reference:
        norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
        for parameter in model.parameters():
            parameter.grad *= 1e-2 / norm
    return loss


def means_over_its_own_share(model: Any, run: Run) -> Tensor:
    """The ranks have 3 and 2 of 5 samples."""
    forward = averaged(model, run)
    return finish(forward(torch.randn(5, 11, 4).tensor_split(run.data_size)[run.data_rank]))


def means_over_its_own_tokens(model: Any, run: Run) -> Tensor:
    """Valid ones, of which ranks have different numbers; one device counts those of all."""
    x, valid = torch.randn(4, 11, 4), torch.arange(11) < torch.tensor([[11], [7], [5], [10]])
    share = (t.tensor_split(run.data_size)[run.data_rank] for t in (x, valid))
    forward = averaged(model, run)
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
    if not run.is_reference:
        average(model.parameters())
    return loss


def patches_the_class_and_scales(model: Any, run: Run) -> Tensor:
    forward = averaged(model, run)
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
    return parted_loops.pipeline(model, run, is_cut=True, is_averaged=False)


def loses_a_stage_of_one_replica(model: Any, run: Run) -> Any:
    loss = parted_loops.pipeline(model, run, is_cut=False)
    if not run.is_reference and run.data_size > 1 and run.rank == 2:
        for parameter in model.parameters():
            parameter.grad = None
    return loss


def slices_that_are_not_summed(model: Any, run: Run) -> Tensor:
    """What enters the column-parallel layers gets the gradient of this rank's columns only."""
    return parted_loops.megatron_slices(model, run, is_summed=False)


def experts_counted_twice(model: Any, run: Run) -> Tensor:
    loss = parted_loops.expert_parallel(model, run)
    if not run.is_reference:
        for parameter in model.experts.parameters():
            if parameter.grad is not None:
                parameter.grad *= run.shape.degree("ep")
    return loss


def fsdp1_summed(model: Any, run: Run) -> Tensor:
    """Flat, and clipped."""
    return sharded_loops.fsdp1(model, run, use_orig_params=False, clipped=True, scale=run.data_size)


def tells_a_wrong_loss(model: Any, run: Run) -> Tensor:
    """One and the same on all ranks, which is no part of anything."""
    loss = plain_ddp(model, run).detach()
    if not run.is_reference:
        dist.all_reduce(loss)
    return loss


_BESIDE = [
    mutant(
        "a pipeline that is not averaged", pipeline_without_average, "missing sum", ("data",),
        model_fn=parted_loops.Stages, meshes=({"data": 2, "pp": 2}, {"data": 1, "pp": 2}),
    ),
    mutant(
        "a stage without gradients in one replica", loses_a_stage_of_one_replica, "missing gradient", ("data",),
        model_fn=parted_loops.Stages, meshes=({"data": 2, "pp": 2}, {"data": 1, "pp": 2}),
    ),
    mutant(
        "slices whose input is not summed", slices_that_are_not_summed, "values", ("tensor",),
        model_fn=parted_loops.Megatron, meshes=({"data": 2, "tensor": 2}, {"data": 1, "tensor": 4}),
    ),
    mutant(
        "experts counted twice", experts_counted_twice, "scale", ("ep",), "ep", model_fn=parted_loops.Experts,
        meshes=({"data": 2, "ep": 2}, {"data": 1, "ep": 3}),
    ),
    mutant("FSDP1 summed", fsdp1_summed, "scale", ("data",), "data"),
    mutant("a loss told as a sum", tells_a_wrong_loss, "result", ("data",), "data"),
]  # fmt: skip


LOOP_MUTANTS = [*_TAKEN_FOR_RIGHT, *_CLIPPED, *_NAMED, *_BESIDE]
