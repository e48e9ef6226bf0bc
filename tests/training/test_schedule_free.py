"""AdamW without a schedule: the average that it samples with, saved states, and sharded parameters."""

import threading
import time
import weakref

import pytest
import torch

from opensora_accel import Plan
from opensora_accel.training.optim import (
    FreeAverage,
    build_optimizer,
    check_schedule_free,
    numbers_of,
    set_numbers,
)
from opensora_accel.training.saved_state import read_record
from opensora_accel.training.sections import OptimConfig
from opensora_accel.verify.pool import RankError
from tests.tiers import some
from tests.training.runs import tiny_config

SHARDED = Plan(dp_shard=2, sharding="zero3")
FREE = {"optim.schedule": "free", "optim.ema_decay": 0.0, "optim.betas": [0.9, 0.99], "steps": 6}

schedulefree = pytest.importorskip("schedulefree")


def stepped(num_steps):
    """A small model after so many steps, its optimizer, and schedulefree's own after the same."""
    torch.manual_seed(0)
    models = [torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)]
    models[1].load_state_dict(models[0].state_dict())
    ours = build_optimizer(models[0], OptimConfig(lr=0.1, schedule="free", ema_decay=0.0, weight_decay=0.0))
    theirs = schedulefree.AdamWScheduleFree(models[1].parameters(), lr=0.1, betas=(0.9, 0.99))
    theirs.train()
    for number in range(num_steps):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
        for model, optimizer in zip(models, (ours, theirs), strict=True):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return models, ours, theirs


@pytest.mark.parametrize("num_steps", [0, 1, 5])
def test_the_average_is_the_optimizers_own(num_steps):
    models, ours, theirs = stepped(num_steps)
    live = [parameter.detach().clone() for parameter in models[0].parameters()]
    average = FreeAverage(models[0], ours)
    theirs.eval()
    with average.applied():
        for found, expected in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert all(map(torch.equal, models[0].parameters(), live)), "given back to the bit"
    if num_steps > 1:
        assert not any(map(torch.equal, average.weights.values(), live))


def trained(config, saved=None, until=None):
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config, saved, read_record(saved) if saved else None)
    losses = [trainer.step()["loss"] for _ in range((until or config.steps) - trainer.state.step)]
    folder = trainer.save()
    trainer.saver.wait()
    return losses, folder


@pytest.mark.prove
@pytest.mark.parametrize("plan", some([SHARDED, Plan(), Plan(ulysses=2)], SHARDED), ids=str)
def test_a_run_goes_on_and_has_the_losses_of_one_rank(ranks, clips, tmp_path, plan):
    config = tiny_config(clips, tmp_path / "whole", plan, **FREE)
    expected, folder = ranks(plan.world_size, trained, config)[0]
    one, _ = ranks(1, trained, tiny_config(clips, tmp_path / "one", Plan(), **FREE))[0]
    assert expected == pytest.approx(one, rel=1e-4)
    assert (folder / "transformer_ema").is_dir(), "what one samples with"
    first, saved = ranks(
        plan.world_size, trained, tiny_config(clips, tmp_path / "half", plan, **FREE), None, 3
    )[0]
    second, _ = ranks(plan.world_size, trained, tiny_config(clips, tmp_path / "half", plan, **FREE), saved)[0]
    assert first + second == expected


def test_another_schedule_cannot_go_on_from_it(ranks, clips, tmp_path):
    _, saved = ranks(1, trained, tiny_config(clips, tmp_path / "a", Plan(), **FREE), None, 1)[0]
    with pytest.raises(
        RankError, match=r'trained with optim\.schedule="free", and this run has AdamW and a schedule'
    ):
        ranks(1, trained, tiny_config(clips, tmp_path / "a", Plan(), steps=6), saved)


def test_what_does_not_go_together_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"averages weights by itself.*set optim.ema_decay to 0"):
        OptimConfig(schedule="free")
    with pytest.raises(ValueError, match="has no moments in 8bit"):
        OptimConfig(schedule="free", ema_decay=0.0, state="8bit")
    with pytest.raises(ValueError, match=r"divides by the first of optim.betas"):
        OptimConfig(schedule="free", ema_decay=0.0, betas=(0.0, 0.9))
    _, ours, _ = stepped(1)
    with pytest.raises(
        ValueError, match=r'with AdamW and a schedule, and this run has optim\.schedule="free"'
    ):
        set_numbers(ours, [{}, {}])
    set_numbers(ours, numbers_of(ours))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs schedulefree"):
        check_schedule_free(OptimConfig(schedule="free", ema_decay=0.0))


def alive_beside_a_save(config):
    """How many tensors of an average that was made for a save are there while its files are being written."""
    from opensora_accel.training.loop import Trainer
    from opensora_accel.training.saved_state.save import Saver

    made, may_write, make, write = [], threading.Event(), FreeAverage.weights.fget, Saver._write_tensors

    def weights(average):
        found = make(average)
        made.extend(map(weakref.ref, found.values()))
        return found

    def waits(saver, begun):
        may_write.wait()
        return write(saver, begun)

    trainer = Trainer(config)
    trainer.step()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FreeAverage, "weights", property(weights))
        patch.setattr(Saver, "_write_tensors", waits)
        trainer.save()
        trainer.saver.wait_for_copy()
        deadline = time.monotonic() + 20
        while any(each() is not None for each in made) and time.monotonic() < deadline:
            time.sleep(0.01)
        alive = sum(each() is not None for each in made)
        may_write.set()
        trainer.saver.wait()
    return alive, len(made)


def test_an_average_is_gone_when_it_is_copied(ranks, clips, tmp_path):
    alive, num_made = ranks(1, alive_beside_a_save, tiny_config(clips, tmp_path / "run", **FREE))[0]
    assert alive == 0 and num_made > 10
