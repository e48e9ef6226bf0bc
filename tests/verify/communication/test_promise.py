"""What a step communicates, held against its plan: right steps keep every promise, each broken one breaks its own."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from opensora_accel import Plan, init_parallel
from opensora_accel.attention import ring_attention, ulysses_attention
from opensora_accel.communications import ring_exchange
from opensora_accel.parallel_states import get_mesh, get_parallel_group
from opensora_accel.verify.communication.promise import broken_promises
from opensora_accel.verify.communication.record_step import record_step
from tests.tiers import some
from tests.verify.communication.recorded_steps import (
    Attending,
    Two,
    attending_step,
    average,
    linear,
    tiny_wan,
    wan_step,
    whole_attention,
)


def short(plan):
    return " ".join(
        f"{field}={value}" for field, value in plan.to_dict().items() if value != getattr(Plan, field)
    )


def violations(step, plan, model_fn=Attending, ranks=None, **options):
    ranks = range(min(plan.world_size, 4)) if ranks is None else ranks
    return broken_promises(record_step(step, model_fn, plan, ranks=ranks, fake_tensors=False, **options))


# ---- right steps

RIGHT = [
    Plan(),
    Plan(dp_replicate=4),
    Plan(ulysses=3),
    Plan(ring=3),
    Plan(ring=2, ulysses=2),
    Plan(dp_replicate=2, ring=2, ulysses=2),
    Plan(dp_replicate=2, ulysses=2, checkpoint="full"),
    Plan(ring=4, checkpoint="selective"),
    Plan(ring=2, ulysses=2, checkpoint="selective", offload=1.0),
    Plan(ulysses=2, checkpoint="full", offload=1.0, mlp_chunks=2),
    Plan(ulysses=3, overlap_ulysses=True, checkpoint="full"),
    Plan(dp_shard=4, sharding="zero3"),
    Plan(dp_shard=2, ulysses=2, sharding="zero3", checkpoint="full"),
    Plan(dp_shard=2, ring=2, ulysses=2, sharding="zero2"),
    Plan(dp_replicate=2, dp_shard=2, ulysses=3, sharding="zero3", checkpoint="selective", offload=1.0),
    Plan(dp_replicate=2, sharding="zero2", ring=3),
    Plan(sharding="zero3"),
    Plan(dp_replicate=8, dp_shard=32, ring=2, ulysses=2, sharding="zero3"),
]


@pytest.mark.parametrize("plan", some(RIGHT, *RIGHT[::3]), ids=short)
def test_shardformer_keeps_the_promises_of_its_plan(plan):
    assert violations(wan_step, plan, tiny_wan) == []


@pytest.mark.parametrize("plan", [Plan(ulysses=4), Plan(dp_replicate=2, ring=2, ulysses=2)], ids=short)
def test_a_step_written_by_hand_keeps_them(plan):
    assert violations(attending_step, plan) == []


def test_gradients_may_be_averaged_in_stages_and_in_one_piece():
    def in_stages(model, run):
        flat = torch.cat([parameter.grad.view(-1) for parameter in model.parameters()])
        for name in ("sequence", "data"):
            dist.all_reduce(flat, group=get_parallel_group(name))

    def step(model, run):
        attending_step(model, run, averaging=in_stages)

    assert violations(step, Plan(dp_replicate=2, ring=2, ulysses=2)) == []


def test_microbatches_may_reduce_each_time():
    def step(model, run):
        init_parallel(run.plan, "cpu")
        wrapped = DistributedDataParallel(model, process_group=get_parallel_group("mixed"))
        for _ in range(3):
            wrapped(torch.ones(2, 4)).sum().backward()

    assert violations(step, Plan(dp_replicate=4), lambda: nn.Linear(4, 4)) == []


def test_frozen_parameters_have_nothing_to_reduce():
    def frozen():
        model = Attending()
        model.project.bias.requires_grad_(False)
        return model

    def step(model, run):
        attending_step(model, run, averaging=lambda model, run: average_trained(model))

    def average_trained(model):
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=get_parallel_group("mixed"))

    assert violations(step, Plan(ulysses=2), frozen) == []


def fsdp_as_it_comes(model, run, microbatches=1, **options):
    init_parallel(run.plan, "cpu")
    mesh = get_mesh()["dp_replicate", "dp_shard"] if run.plan.dp_replicate > 1 else get_mesh("dp_shard")
    fully_shard(model.first, mesh=mesh, **options)
    fully_shard(model, mesh=mesh)
    for _ in range(microbatches):
        model(torch.ones(2, 6)).sum().backward()


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize(
    "plan",
    [Plan(dp_shard=2, sharding="zero3"), Plan(dp_replicate=2, dp_shard=2, sharding="zero3")],
    ids=short,
)
def test_fsdp2_may_keep_what_the_root_holds_itself(plan, microbatches):
    def step(model, run):
        fsdp_as_it_comes(model, run, microbatches)

    assert violations(step, plan, Two) == []


def test_fsdp2_may_not_keep_what_other_modules_hold():
    def step(model, run):
        fsdp_as_it_comes(model, run, reshard_after_forward=False)

    (violation, *_) = violations(step, Plan(dp_shard=2, sharding="zero3"), Two)
    assert "zero3 gathers every parameter twice" in violation.rule
    assert violation.actual == "78 elements were gathered"  # 36, and 42 of 35 with padding


@pytest.mark.parametrize("clears", [False, True])
def test_the_map_of_used_parameters_is_no_gradient(clears):
    def step(model, run):
        init_parallel(run.plan, "cpu")
        group = get_parallel_group("mixed")
        model.forward = model.first
        optimizer = torch.optim.AdamW(model.parameters())
        wrapped = DistributedDataParallel(model, process_group=group, find_unused_parameters=True)
        wrapped(torch.ones(2, 6)).sum().backward()
        if clears:
            optimizer.step()
            optimizer.zero_grad()

    assert violations(step, Plan(dp_replicate=2), Two) == []


# ---- broken steps


class Exchange(torch.autograd.Function):
    """An all-to-all, with none or another one in backward."""

    @staticmethod
    def forward(ctx, x, group, backward_group):
        ctx.group = backward_group
        return exchanged(x, group)

    @staticmethod
    def backward(ctx, grad):
        return (grad if ctx.group is None else exchanged(grad, ctx.group)), None, None


def exchanged(x, group):
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x.contiguous(), group=group)
    return received


def dropped_all_to_all(model, run):
    def attention(q, k, v):
        return Exchange.apply(v, get_parallel_group("ulysses"), None)

    attending_step(model, run, attention)


def all_to_all_over_ring(model, run):
    group = get_parallel_group
    attending_step(
        model, run, lambda q, k, v: Exchange.apply(whole_attention(q, k, v), group("ring"), group("ring"))
    )


def no_attention_over_ring(model, run):
    def attention(q, k, v):
        shares = [q.size(1)] * get_parallel_group("ulysses").size()
        return ulysses_attention(q, k, v, get_parallel_group("ulysses"), splits=shares, kv_splits=shares)

    attending_step(model, run, attention)


def no_attention_over_ulysses(model, run):
    def attention(q, k, v):
        shares = [q.size(1)] * get_parallel_group("ring").size()
        return ring_attention(q, k, v, get_parallel_group("ring"), splits=shares, kv_splits=shares)

    attending_step(model, run, attention)


def hop_missing(model, run):
    def attention(q, k, v):
        return v + ring_exchange(k, get_parallel_group("ring"))  # one hop where there are degree - 1

    attending_step(model, run, attention)


def hop_without_gradient(model, run):
    def attention(q, k, v):
        with torch.no_grad():
            others = ring_exchange(k, get_parallel_group("ring"))
        return v + others

    attending_step(model, run, attention)


def averaged_over(*names):
    def step(model, run):
        attending_step(
            model, run, averaging=lambda model, run: [average(model, get_parallel_group(n)) for n in names]
        )

    return step


def averaged_in_part(model, run):
    attending_step(model, run, averaging=lambda model, run: average(model.out, get_parallel_group("mixed")))


def averaged_over_wrong_ranks(model, run):
    def averaging(model, run):
        groups = [dist.new_group(ranks) for ranks in ([0, 1, 2], [3, 4, 5, 6, 7])]
        average(model, groups[0] if run.rank < 3 else groups[1])

    attending_step(model, run, averaging=averaging)


def averaged_over_another_plans_axes(model, run):
    def averaging(model, run):
        average(model, get_parallel_group("mixed"))
        group = get_mesh()["dp_replicate", "ulysses"]._flatten("strange").get_group()
        dist.all_reduce(torch.ones(3), group=group)

    attending_step(model, run, averaging=averaging)


def sharded_over(axes, reshard=True):
    def step(model, run):
        init_parallel(run.plan, "cpu")
        mesh = get_mesh(axes) if isinstance(axes, str) else get_mesh()[axes]
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        model(torch.ones(2, 6)).sum().backward()

    return step


def ddp_over_data(model, run):
    init_parallel(run.plan, "cpu")
    wrapped = DistributedDataParallel(model, process_group=get_parallel_group("data"))
    wrapped(torch.ones(2, 6)).sum().backward()


USP = Plan(dp_replicate=2, ring=2, ulysses=2)
BROKEN = [
    # name, step, plan, model, words of one violation
    ("all-to-all dropped in backward", dropped_all_to_all, Plan(ulysses=2), Attending,
     ["over ulysses in forward has its gradient travel back", "1 all-to-alls over ulysses in forward, and 0 in"]),
    ("all-to-all over the ring", all_to_all_over_ring, USP, Attending,
     ["exchanged over ulysses only (ulysses=2)", "2 × all-to-all over ring"]),
    ("no sends on the ring", no_attention_over_ring, USP, Attending,
     ["needs sends over ring (ring=2)", "the forward has none"]),
    ("no all-to-all", no_attention_over_ulysses, USP, Attending,
     ["needs all-to-alls over ulysses (ulysses=2)", "the forward has none"]),
    ("ring on another axis", lambda m, r: attending_step(m, r, lambda q, k, v: v + ring_exchange(
        k, get_parallel_group("ulysses"))), Plan(ulysses=2), Attending,
     ["messages travel along ring only (ring=1)", "2 × send over ulysses"]),
    ("ring hop missing", hop_missing, Plan(ring=4), Attending,
     ["each block on 3 times", "forward has 1 sends along ring, 1 more than whole rounds"]),
    ("ring hop without gradient", hop_without_gradient, Plan(ring=2), Attending,
     ["over ring in forward has its gradient travel back", "1 sends over ring in forward, and 0 in backward"]),
    ("averaged over data only", averaged_over("data"), USP, Attending,
     ["exactly once over mixed (dp_replicate × ring × ulysses)", "never over ring and never over ulysses"]),
    ("averaged over sequence only", averaged_over("sequence"), USP, Attending, ["never over dp_replicate"]),
    ("averaged twice", averaged_over("mixed", "mixed"), USP, Attending,
     ["4 of 4 parameters", "twice over dp_replicate and twice over ring and twice over ulysses"]),
    ("averaged once more over ulysses", averaged_over("mixed", "ulysses"), USP, Attending,
     ["is reduced twice over ulysses"]),
    ("never averaged", averaged_over(), Plan(ulysses=2), Attending, ["4 of 4 parameters", "never over ulysses"]),
    ("averaged in part", averaged_in_part, Plan(dp_replicate=2), Attending,
     ["2 of 4 parameters (project.weight, project.bias)", "never over dp_replicate"]),
    ("a group of wrong ranks", averaged_over_wrong_ranks, USP, Attending,
     ["the groups of the mesh only", "4 × all-reduce over ranks 0, 1, 2 (differ along ring and ulysses"]),
    ("an extra all-reduce over a strange group", averaged_over_another_plans_axes, USP, Attending,
     ["the groups of the mesh only", "1 × all-reduce over dp_replicate × ulysses"]),
    ("DDP over data only", ddp_over_data, Plan(dp_replicate=2, ulysses=2), linear,
     ["2 of 2 parameters (weight, bias)", "never over ulysses"]),
    ("FSDP2 over data only", sharded_over("dp_shard"), Plan(dp_shard=2, ulysses=2, sharding="zero3"), linear,
     ["exactly once over mixed (dp_shard × ulysses): 35 elements (up to 42 with padding)",
      "FSDP2 reduces 0 elements over ulysses"]),
    ("FSDP2 over data only, gathers", sharded_over("dp_shard"), Plan(dp_shard=2, ulysses=2, sharding="zero3"), linear,
     ["parameters are sharded over mixed (dp_shard × ulysses)", "gathers them over dp_shard"]),
    ("HSDP without its replicas", sharded_over("dp_shard"),
     Plan(dp_replicate=2, dp_shard=2, sharding="zero3"), linear,
     ["35 elements (up to 42 with padding)", "FSDP2 reduces 0 elements over dp_replicate"]),
    ("zero3 that keeps parameters", sharded_over("mixed", reshard=False), Plan(dp_shard=2, sharding="zero3"), linear,
     ["zero3 gathers every parameter twice a step over dp_shard: 84 elements", "42 elements were gathered"]),
    ("zero2 that gathers twice", sharded_over("mixed"), Plan(dp_shard=2, sharding="zero2"), linear,
     ["zero2 gathers every parameter once a step over dp_shard: 42 elements", "84 elements were gathered"]),
    ("nothing sharded", ddp_over_data, Plan(dp_shard=2, sharding="zero3"), linear,
     ["zero3 gathers every parameter twice", "no parameter is sharded"]),
    ("sharded against the plan", sharded_over("mixed"), Plan(dp_replicate=2), linear,
     ['parameters are whole on every rank (sharding="none"', "FSDP gathers them over dp_replicate"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("step", "plan", "model_fn", "words"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN]
)
def test_a_broken_step_is_told_what_it_broke(step, plan, model_fn, words):
    found = [str(violation) for violation in violations(step, plan, model_fn)]
    assert any(all(word in text for word in words) for text in found), found


def test_a_violation_says_where():
    (violation,) = violations(averaged_over("data"), Plan(dp_replicate=2, ulysses=2))
    (line,) = violation.sources
    assert line.startswith("tests/verify/communication/recorded_steps.py:") and line.endswith(" in average")
    assert 'get_parallel_group("mixed")' in violation.remedy and line in str(violation)
