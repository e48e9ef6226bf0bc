"""Prodigy: its library's steps on one device, the same steps on any mesh, and saved states."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from opensora_accel import Plan
from opensora_accel.profiler.out_of_memory import _state_ratio
from opensora_accel.training.optim import build_optimizer, learning_rate
from opensora_accel.training.planned import job_of
from opensora_accel.training.prodigy import Prodigy
from opensora_accel.training.saved_state import read_record
from opensora_accel.training.sections import OptimConfig
from opensora_accel.verify.pool import RankError
from tests.tiers import PROVE
from tests.training.runs import SHARDED, tiny_config

PRODIGY = {
    "optim.algorithm": "prodigy",
    "optim.lr": 1.0,
    "optim.weight_decay": 0.1,
    "optim.schedule": "constant",
    "optim.warmup_steps": 2,
    # It looks around for four of them.
    "steps": 8,
}
MESHES = [*SHARDED, Plan(dp_shard=2, sharding="zero3", cpu_offload=True)]


def test_steps_are_those_of_the_library():
    prodigyopt = pytest.importorskip("prodigyopt")
    torch.manual_seed(0)
    ours, theirs = (
        nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 1)).double() for _ in range(2)
    )
    theirs.load_state_dict(ours.state_dict())
    config = OptimConfig(algorithm="prodigy", lr=1.0, weight_decay=0.1, warmup_steps=10)
    optimizer = build_optimizer(ours, config)
    groups = [
        {"params": [p for p in theirs.parameters() if (p.dim() >= 2) == is_matrix], "weight_decay": decay}
        for is_matrix, decay in ((True, 0.1), (False, 0.0))
    ]
    library = prodigyopt.Prodigy(groups, betas=config.betas, safeguard_warmup=True, use_bias_correction=True)
    found = []
    for number in range(60):
        for model, each in ((ours, optimizer), (theirs, library)):
            for group in each.param_groups:
                group["lr"] = learning_rate(config, number, 60)
            x = torch.randn(8, 5, generator=torch.Generator().manual_seed(number)).double()
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            each.step()
            each.zero_grad()
        found.append(optimizer.param_groups[1]["d"])
        assert found[-1] == pytest.approx(library.param_groups[0]["d"], rel=1e-12)
        for own, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(own, expected, rtol=1e-12, atol=1e-14)
    assert found[0] == 1e-6 and found[-1] > 20e-6


def stepped(shape, sharded_dims):
    """Steps of weights of awkward sizes on a mesh, as this rank has them whole, and each d.

    Copies that are not the first get gradients of another rounding: a sum over each copy's ranks would be another d.
    """
    mesh = init_device_mesh("cpu", shape) if shape else None
    generator = torch.Generator().manual_seed(0)
    sizes = [(3, 4), (11, 2), (6,), (2, 10), (5, 3)]
    weights = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    aims = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    placements = [
        [Replicate()] * (mesh.ndim - 1) + [Shard(dim)] if mesh and dim is not None else None
        for dim in sharded_dims
    ]

    def placed(tensor, places):
        return tensor if places is None else distribute_tensor(tensor, mesh, places, src_data_rank=None)

    parameters = [
        nn.Parameter(placed(weight.clone(), places))
        for weight, places in zip(weights, placements, strict=True)
    ]
    groups = [{"params": parameters[:3], "weight_decay": 0.1}, {"params": parameters[3:]}]
    optimizer, found = Prodigy(groups, lr=1.0, betas=(0.9, 0.99), eps=1e-8), []
    rounding = 1 + 1e-15 * (dist.get_rank() if mesh else 0)

    def whole(parameter):
        return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().clone()

    for _ in range(12):
        for parameter, aim, places in zip(parameters, aims, placements, strict=True):
            gradient = (whole(parameter) - aim) * rounding
            parameter.grad = placed(gradient, places)
        optimizer.step()
        found.append(optimizer.param_groups[0]["d"])
    return found, [whole(each) for each in parameters]


# Of 3 rows one of 4 ranks has none, and two of 5. The weights without a dim are whole on every rank.
@pytest.mark.parametrize(
    "shape, sharded_dims",
    [
        ((4,), (0, 0, None, 0, 0)),
        pytest.param((5,), (0, 0, None, 0, 0), marks=PROVE),
        ((2, 2), (0, 0, 0, 1, None)),
        ((4, 1), (0, 0, 0, 0, 0)),
        ((3,), (None, None, None, None, None)),
    ],
)
def test_every_number_counts_once(ranks, shape, sharded_dims):
    expected, weights = stepped((), [None] * 5)
    assert expected[-1] > 5 * expected[0]
    of_ranks = ranks(torch.Size(shape).numel(), stepped, shape, sharded_dims)
    assert all(found == of_ranks[0][0] for found, _ in of_ranks), "another d on another rank"
    assert of_ranks[0][0] == pytest.approx(expected, rel=1e-12)
    for found, whole in zip(of_ranks[0][1], weights, strict=True):
        assert torch.allclose(found, whole, rtol=1e-12, atol=1e-15)


def trained(config, saved=None, until=None):
    """Losses and rates of the steps, the weights in the end, and a saved state."""
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config, saved, read_record(saved) if saved else None)
    metrics = [trainer.step() for _ in range((until or config.steps) - trainer.state.step)]
    folder = trainer.save()
    trainer.saver.wait()
    weights = {
        name: (each.full_tensor() if hasattr(each, "full_tensor") else each).detach().clone()
        for name, each in trainer.state.model.named_parameters()
    }
    return [(each["loss"], each["lr"]) for each in metrics], weights, folder


def assert_one_run(one, other):
    (expected, weights), (found, others) = one, other
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=1e-9)
    assert [rate for _, rate in found] == pytest.approx([rate for _, rate in expected], rel=1e-9)
    assert all(torch.allclose(others[name], each, rtol=1e-8, atol=1e-11) for name, each in weights.items())


@PROVE
@pytest.mark.parametrize(
    "plan, lora",
    [
        *((plan, False) if plan == MESHES[0] else pytest.param(plan, False, marks=PROVE) for plan in MESHES),
        *(pytest.param(plan, True, marks=PROVE) for plan in MESHES[1:4]),
    ],
    ids=str,
)
def test_a_run_is_one_on_any_mesh(ranks, clips, tmp_path, plan, lora):
    changes = {
        **PRODIGY,
        "plan.precision": "fp64",
        "optim.accumulation": 2,
        "optim.clip_norm": 0.1,
        "lora.rank": 3 if lora else 0,
    }
    configs = [
        tiny_config(clips, tmp_path / str(number), each, **changes)
        for number, each in enumerate((Plan(), plan))
    ]
    expected, weights, _ = ranks(1, trained, configs[0])[0]
    found, others, saved = ranks(plan.world_size, trained, configs[1], None, 6)[0]
    # The rest runs on one rank, from what several have saved.
    config = tiny_config(clips, tmp_path / "1", Plan(), **changes)
    rest, others, _ = ranks(1, trained, config, saved)[0]
    assert_one_run((expected, weights), (found + rest, others))
    rates = [rate for _, rate in expected]
    assert rates[0] == 1e-6 / 2 and rates[-1] > 2 * rates[0]


@PROVE
# Of an adapter of 3 rows two ranks of 5 have none.
@pytest.mark.parametrize(("num_ranks", "lora"), [(2, False), pytest.param(5, True, marks=PROVE)])
def test_a_run_goes_on_bit_by_bit(ranks, clips, tmp_path, num_ranks, lora):
    plan = Plan(ulysses=num_ranks, sharding="zero3")
    changes = PRODIGY | ({"lora.rank": 3} if lora else {})
    config = tiny_config(clips, tmp_path / "run", plan, **changes)
    whole, weights, _ = ranks(num_ranks, trained, config)[0]
    half = tiny_config(clips, tmp_path / "half", plan, **changes)
    first, _, saved = ranks(num_ranks, trained, half, None, 5)[0]
    second, found, _ = ranks(num_ranks, trained, half, saved)[0]
    assert first + second == whole and all(torch.equal(found[name], weights[name]) for name in weights)


def test_a_state_of_adamw_is_not_taken_for_one_of_prodigy(ranks, clips, tmp_path):
    _, _, saved = ranks(1, trained, tiny_config(clips, tmp_path / "a", Plan()), None, 1)[0]
    message = (
        'was trained with AdamW and a schedule, and this run has optim.algorithm="prodigy", whose optimizer'
    )
    with pytest.raises(RankError, match=re.escape(message)):
        ranks(1, trained, tiny_config(clips, tmp_path / "a", Plan(), **PRODIGY), saved)


def test_what_does_not_go_together_is_refused(clips, tmp_path):
    for wrong in ({"state": "8bit"}, {"schedule": "free", "ema_decay": 0.0}):
        with pytest.raises(
            ValueError, match=r'optim\.algorithm="prodigy" keeps what it has in fp32 and has a s'
        ):
            OptimConfig(algorithm="prodigy", lr=1.0, **wrong)
    with pytest.raises(
        ValueError, match=r"by optim\.lr, and 0\.001 is a learning rate of AdamW; set --optim\.lr 1$"
    ):
        OptimConfig(algorithm="prodigy")
    with pytest.raises(
        ValueError, match=r"adds up over whole parameters, which plan\.tp cuts; set plan\.tp to 1"
    ):
        tiny_config(clips, tmp_path, Plan(tp=3), **PRODIGY)


def bytes_of_state(config):
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config)
    metrics = [trainer.step(), trainer.step()]
    optimizer = trainer.state.optimizer
    kept = sum(each.nbytes for of_one in optimizer.state.values() for each in of_one.values())
    size = sum(each.numel() for group in optimizer.param_groups for each in group["params"])
    return kept / size, _state_ratio(optimizer), [each["lr"] for each in metrics]


def test_what_it_keeps_is_counted_and_its_rate_is_shown(ranks, clips, tmp_path):
    config = tiny_config(clips, tmp_path, Plan(), **PRODIGY)
    of_a_parameter, ratio, rates = ranks(1, bytes_of_state, config)[0]
    residents = job_of(config).residents
    assert of_a_parameter == 16 and ratio == residents.state_ratio == 4.0 and residents.optimizer == "prodigy"
    # Half and all of d by the warm-up; the first step looks around.
    assert rates == [0.5e-6, 1e-6]
