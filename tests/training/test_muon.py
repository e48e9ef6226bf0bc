"""Muon: torch's own steps on one device, the same steps on any mesh, and saved states."""

import re

import pytest
import torch
from torch import nn

from opensora_accel import Plan
from opensora_accel.profiler.out_of_memory import _state_ratio
from opensora_accel.training.config import config_from_dict
from opensora_accel.training.muon import Muon, hidden_matrices
from opensora_accel.training.optim import ShardwiseAdamW, build_optimizer
from opensora_accel.training.planned import job_of
from opensora_accel.training.saved_state import read_record
from opensora_accel.training.sections import OptimConfig
from opensora_accel.verify.pool import RankError
from shardformer import blocks_of
from tests.tiers import PROVE, some
from tests.training.runs import SHARDED, tiny_config

MUON = {"optim.algorithm": "muon", "optim.lr": 0.02, "optim.weight_decay": 0.1}


class TinyBlocks(nn.Module):
    """A tall, a wide and a square matrix, and what is none, in two blocks."""

    def __init__(self):
        super().__init__()
        made = [
            nn.Sequential(nn.Linear(6, 11), nn.LayerNorm(11), nn.Linear(11, 6, bias=False), nn.Linear(6, 6))
            for _ in range(2)
        ]
        self.first, self.blocks = nn.Linear(5, 6), nn.ModuleList(made)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x


def test_steps_are_those_of_torch_bit_by_bit():
    torch.manual_seed(0)
    ours, theirs = TinyBlocks(), TinyBlocks()
    theirs.load_state_dict(ours.state_dict())
    of_ours, of_theirs = (hidden_matrices(model.blocks) for model in (ours, theirs))
    assert [tuple(each.shape) for each in of_ours] == [(11, 6), (6, 11), (6, 6)] * 2
    rest, other_rest = (
        [p for p in model.parameters() if not any(p is each for each in found)]
        for model, found in ((ours, of_ours), (theirs, of_theirs))
    )
    groups = [{"params": of_ours, "is_matrix": True}, {"params": rest, "is_matrix": False}]
    optimizer = Muon(groups, lr=0.02, betas=(0.9, 0.99), weight_decay=0.1)
    muon = torch.optim.Muon(of_theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(other_rest, lr=0.02, betas=(0.9, 0.99), weight_decay=0.1)
    for number in range(4):
        x = torch.randn(8, 5, generator=torch.Generator().manual_seed(number))
        for model, optimizers in ((ours, (optimizer,)), (theirs, (muon, adamw))):
            model(x).square().mean().backward()
            for each in optimizers:
                each.step()
                each.zero_grad()
        for found, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(found, expected)


def trained(config, saved=None, until=None):
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config, saved, read_record(saved) if saved else None)
    losses = [trainer.step()["loss"] for _ in range((until or config.steps) - trainer.state.step)]
    folder = trainer.save()
    trainer.saver.wait()
    weights = {
        name: (each.full_tensor() if hasattr(each, "full_tensor") else each).detach().clone()
        for name, each in trainer.state.model.named_parameters()
    }
    return losses, weights, folder


@pytest.mark.parametrize("plan", some(SHARDED, SHARDED[0], SHARDED[1]), ids=str)
def test_a_run_is_one_on_any_mesh(ranks, clips, tmp_path, plan):
    configs = [
        tiny_config(clips, tmp_path / str(number), each, steps=4, **MUON, **{"plan.precision": "fp64"})
        for number, each in enumerate((Plan(), plan))
    ]
    losses, weights, _ = ranks(1, trained, configs[0])[0]
    others, found, _ = ranks(plan.world_size, trained, configs[1])[0]
    assert others == pytest.approx(losses, rel=1e-9)
    assert all(torch.allclose(found[name], each, rtol=1e-8, atol=1e-11) for name, each in weights.items())


def steps_by(config):
    """By how much matrices of blocks and other weights move in a step, the root of the mean square over the rate."""
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config)
    model = trainer.state.model
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    hidden = {id(each) for each in hidden_matrices(blocks_of(model))}
    trainer.step()
    return {
        name: (id(each) in hidden, float((each - before[name]).square().mean().sqrt() / config.optim.lr))
        for name, each in model.named_parameters()
    }


def test_steps_are_as_long_as_those_of_adamw(ranks, clips, tmp_path):
    changes = MUON | {"optim.weight_decay": 0.0, "optim.warmup_steps": 0}
    moved = ranks(1, steps_by, tiny_config(clips, tmp_path, Plan(), **changes))[0]
    # AdamW's first step is the rate, whatever the gradient; Muon's is a fifth of it, as those of AdamW are later on.
    assert {name for name, (is_hidden, _) in moved.items() if is_hidden} == {
        name
        for name in moved
        if name.startswith("blocks.") and name.endswith("weight") and "norm" not in name
    }
    assert all(0.1 < by < 0.3 for is_hidden, by in moved.values() if is_hidden)
    assert all(by == pytest.approx(1, rel=0.05) for is_hidden, by in moved.values() if not is_hidden)


@PROVE
# Of an adapter of 3 rows two ranks of 5 have none.
@pytest.mark.parametrize(("num_ranks", "lora"), [(2, False), pytest.param(5, True, marks=PROVE)])
def test_a_run_goes_on_bit_by_bit(ranks, clips, tmp_path, num_ranks, lora):
    plan = Plan(ulysses=num_ranks, sharding="zero3")
    changes = MUON | ({"lora.rank": 3} if lora else {})
    config = tiny_config(clips, tmp_path / "run", plan, steps=4, **changes)
    whole, weights, _ = ranks(num_ranks, trained, config)[0]
    half = tiny_config(clips, tmp_path / "half", plan, steps=4, **changes)
    first, _, saved = ranks(num_ranks, trained, half, None, 2)[0]
    second, found, _ = ranks(num_ranks, trained, half, saved)[0]
    assert first + second == whole and all(torch.equal(found[name], weights[name]) for name in weights)


def test_a_state_of_adamw_is_not_taken_for_one_of_muon(ranks, clips, tmp_path):
    _, _, saved = ranks(1, trained, tiny_config(clips, tmp_path / "a", Plan(), steps=4), None, 1)[0]
    with pytest.raises(
        RankError, match=r"has 2 groups of parameters, and this optimizer has 3; resume with the op"
    ):
        ranks(1, trained, tiny_config(clips, tmp_path / "a", Plan(), steps=4, **MUON), saved)


def test_what_does_not_go_together_is_refused(clips, tmp_path):
    for wrong in ({"state": "8bit"}, {"schedule": "free", "ema_decay": 0.0}):
        with pytest.raises(
            ValueError, match=r'optim\.algorithm="muon" keeps its average in fp32 and has a sch'
        ):
            OptimConfig(algorithm="muon", **wrong)
    for plan in (Plan(tp=3), Plan(dp_shard=2, sharding="zero3", cpu_offload=True)):
        with pytest.raises(ValueError, match=re.escape("takes whole matrices, on the device that trains")):
            tiny_config(clips, tmp_path, plan, **MUON)


def bytes_of_state(config):
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config)
    trainer.step()
    optimizer = trainer.state.optimizer
    moments = [each for of_one in optimizer.state.values() for each in of_one.values() if each.dim()]
    hidden = sum(each.numel() for each in optimizer.param_groups[0]["params"])
    everything = sum(each.numel() for group in optimizer.param_groups for each in group["params"])
    return (
        sum(each.nbytes for each in moments),
        4 * hidden + 8 * (everything - hidden),
        _state_ratio(optimizer),
    )


def test_matrices_have_one_average(ranks, clips, tmp_path):
    config = tiny_config(clips, tmp_path, Plan(), **MUON)
    found, expected, ratio = ranks(1, bytes_of_state, config)[0]
    assert found == expected and ratio == 1.0
    residents = job_of(config).residents
    assert residents.optimizer == "muon" and residents.state_ratio == pytest.approx(4.1 / 4)


def test_without_it_all_is_adamws():
    config = config_from_dict({}, "the test").optim
    assert type(build_optimizer(nn.Linear(2, 2), config)) is ShardwiseAdamW
