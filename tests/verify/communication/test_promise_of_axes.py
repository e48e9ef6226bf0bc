"""What a mesh of named axes promises, without a Plan: gradients are reduced over the axes of the data."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from opensora_accel.verify.communication.promise import broken_promises
from opensora_accel.verify.communication.record_step import record_step
from tests.verify import loops
from tests.verify.communication.recorded_steps import (
    Two,
    average,
    linear,
)


def test_a_mesh_of_axes_promises_its_groups():
    def step(model, run):
        dist.all_reduce(torch.ones(2), group=run.mesh["cp"].get_group())
        dist.all_reduce(torch.ones(2), group=dist.new_group([0, 3]))

    (violation,) = broken_promises(record_step(step, linear, {"dp": 2, "cp": 2}))
    assert (
        "1 × all-reduce over ranks 0, 3 (differ along dp and cp, but are not all of them)" in violation.actual
    )


def trained_over(*axes, ends=lambda model, run: None):
    """Axes are averaged over by hand, one after the other."""

    def step(model, run):
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 6)).sum().backward()
        for axis in axes:
            average(model, run.mesh[axis].get_group())
        ends(model, run)
        optimizer.step()
        optimizer.zero_grad()

    return step


def flattened(model, run):
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=run.mesh["data"].get_group())
    for gradient, part in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def packed_without_a_trace(model, run):
    """Into a sum, which is not followed: it may be anything."""
    flat = torch.zeros(sum(parameter.numel() for parameter in model.parameters()))
    flat = flat + torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    dist.all_reduce(flat, group=run.mesh["data"].get_group())


def weights_averaged(model, run):
    for parameter in model.parameters():
        dist.all_reduce(parameter.data, group=run.mesh["data"].get_group())


def gathered_and_averaged(model, run):
    group = run.mesh["data"].get_group()
    for parameter in model.parameters():
        everyones = [torch.empty_like(parameter.grad) for _ in range(group.size())]
        dist.all_gather(everyones, parameter.grad, group=group)
        parameter.grad = torch.stack(everyones).mean(0)


def loss_summed(model, run):
    dist.all_reduce(torch.ones(()), group=run.mesh["data"].get_group())


def norm_summed(model, run):
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    dist.all_reduce(norm, group=run.mesh["data"].get_group())


def ddp_over(group_of, hook=False, microbatches=1, **options):
    def step(model, run):
        wrapped = DistributedDataParallel(model, process_group=group_of(run), **options)
        if hook:
            state = powerSGD_hook.PowerSGDState(group_of(run), start_powerSGD_iter=2)
            wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        for _ in range(microbatches):
            wrapped(torch.ones(2, 6)).sum().backward()

    return step


def over_data(run):
    return run.mesh["data"].get_group()


def whole_beside_sharded(model, run):
    fully_shard(model.last, mesh=run.mesh["data"])
    model(torch.ones(2, 6)).sum().backward()
    if run.shape.degree("cp") == 1:
        dist.all_reduce(model.first.weight.grad, group=over_data(run))


def sharded_by_default(model, run):
    fully_shard(model, mesh=run.mesh["data"])
    model(torch.ones(2, 6)).sum().backward()


def copied(model, run):
    """What trains is not the model that was recorded."""
    trained_over()(copy.deepcopy(model), run)


DATA, DATA_AND_CP = {"data": 2}, {"data": 2, "cp": 2}
REDUCED = {
    "by hand": (trained_over("data"), DATA),
    "by hand, over both": (trained_over("cp", "data"), DATA_AND_CP),
    "in one buffer": (trained_over(ends=flattened), DATA_AND_CP),
    "in one buffer, without a trace": (trained_over(ends=packed_without_a_trace), DATA),
    "as averages of weights": (trained_over(ends=weights_averaged), DATA),
    "by all-gather": (trained_over(ends=gathered_and_averaged), DATA),
    "by DDP": (ddp_over(over_data), DATA_AND_CP),
    "by DDP over the world": (ddp_over(lambda run: None), DATA_AND_CP),
    "by DDP, twice": (ddp_over(over_data, microbatches=2), DATA),
    "by DDP in views of its bucket": (ddp_over(over_data, gradient_as_bucket_view=True), DATA),
    "by DDP with a static graph": (ddp_over(over_data, microbatches=2, static_graph=True), DATA),
    "by DDP with PowerSGD": (ddp_over(over_data, hook=True, microbatches=3), DATA),
    "by FSDP2": (sharded_by_default, DATA_AND_CP),
    "by FSDP2 and by hand": (whole_beside_sharded, DATA),
    "of nobody": (copied, DATA),
    "over no data axis": (trained_over(), {"cp": 2}),
    "over one data rank": (trained_over(), {"data": 1, "cp": 2}),
}


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("name", REDUCED)
def test_gradients_of_a_mesh_of_axes_are_reduced_over_data(name, fake):
    step, mesh = REDUCED[name]
    fake = fake and "PowerSGD" not in name  # it draws with numpy
    assert broken_promises(record_step(step, Two, mesh, ranks=[0, 1], fake_tensors=fake)) == []


UNREDUCED = {
    "never": (trained_over(), DATA, "first.weight, last.weight, last.bias (3 of 3 parameters)"),
    "over another axis": (trained_over("cp"), DATA_AND_CP, "(3 of 3 parameters)"),
    "only their norm": (trained_over(ends=norm_summed), DATA, "(3 of 3 parameters)"),
    "only the loss": (trained_over(ends=loss_summed), DATA, "(3 of 3 parameters)"),
    "only one": (
        trained_over(ends=lambda model, run: average(model.last, over_data(run))),
        DATA,
        "first.weight (1 of 3 parameters)",
    ),
    "only the sharded": (whole_beside_sharded, DATA_AND_CP, "first.weight (1 of 1 parameters)"),
    "DDP over another axis": (
        ddp_over(lambda run: run.mesh["cp"].get_group()),
        DATA_AND_CP,
        "(3 of 3 parameters)",
    ),
}


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("name", UNREDUCED)
def test_gradients_that_are_not_reduced_over_data_are_told(name, fake):
    step, mesh, words = UNREDUCED[name]
    (violation,) = broken_promises(record_step(step, Two, mesh, fake_tensors=fake))
    assert violation.rule == "the gradient of every whole parameter is reduced over every data axis (data=2)"
    assert violation.actual.startswith("the gradient of ") and words in violation.actual
    assert violation.actual.endswith("is never reduced over data")
    assert "data_axes" in violation.remedy


def test_data_axes_are_those_that_were_named():
    def record(data_axes):
        return record_step(trained_over("data"), Two, {"data": 2, "dp": 2}, data_axes=data_axes)

    assert broken_promises(record(["data"])) == []
    (violation,) = broken_promises(record(["dp"]))
    assert violation.actual.endswith("is never reduced over dp")


@pytest.mark.parametrize(
    ("step", "mesh"),
    [
        (loops.plain_ddp, {"data": 4}),
        (loops.with_optimizer, {"data": 4}),
        (loops.plain_fsdp2, {"data": 4}),
        (loops.sequence_parallel, {"data": 2, "sequence": 2}),
        (loops.own_gradients, {"data": 2, "sequence": 2}),
        (loops.accelerated, {"data": 2}),
    ],
)
def test_loops_as_users_have_them_keep_the_promises_of_their_axes(step, mesh):
    if step is loops.accelerated:
        pytest.importorskip("accelerate")
    fake = step is not loops.accelerated  # there DDP's own comparison of shapes reads memory
    assert broken_promises(record_step(step, loops.Small, mesh, ranks=[0, 1], fake_tensors=fake)) == []
