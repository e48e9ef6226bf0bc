"""A run that is asked to stop, and one that goes wrong: what is saved, what is skipped, and what is said of it."""

import contextlib
import dataclasses
import io
import itertools
import json
import logging
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from opensora_accel import Plan
from opensora_accel.training.tiny_run import write_clips
from tests.tiers import some
from tests.training.runs import tiny_config
from tests.training.test_loop import trained


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_clips(tmp_path_factory.mktemp("clips"))


def stopped(config, at_loss, signals, checkpoint=None):
    """Signals come to rank 1 before the loss of number `at_loss`; the losses until the run ends."""
    from opensora_accel.training import ranks as ranks_of_training
    from opensora_accel.training.loop import Trainer
    from opensora_accel.training.saved_state import read_record

    trainer = Trainer(config, checkpoint, None if checkpoint is None else read_record(checkpoint))
    original, count, one_press_s = trainer.objective.loss, itertools.count(1), ranks_of_training.ONE_PRESS_S
    ranks_of_training.ONE_PRESS_S = 0.2

    def loss(batch):
        if next(count) == at_loss and dist.get_rank() == dist.get_world_size() - 1:
            for number, pause_s in signals:  # one rank is told, all of them stop
                os.kill(os.getpid(), number)
                time.sleep(pause_s)
        return original(batch)

    trainer.objective.loss = loss
    before = [signal.getsignal(number) for number, _ in signals]
    try:
        losses = trainer.train()
    except KeyboardInterrupt:
        return "interrupted"
    finally:
        ranks_of_training.ONE_PRESS_S = one_press_s
        assert [signal.getsignal(number) for number, _ in signals] == before
    return losses


def in_a_terminal(*arguments):
    """The shell of the tests may be under nohup itself."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    return stopped(*arguments)


def saved_steps(output):
    folder = output / "checkpoints"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


@pytest.mark.faults
@pytest.mark.parametrize("name", some(["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"], "SIGTERM"))
def test_a_signal_saves_and_stops_all_ranks(ranks, folder, tmp_path, name, fault):
    config = tiny_config(folder, tmp_path, Plan(ulysses=2), steps=9)
    found = ranks(2, in_a_terminal, config, 4, [(getattr(signal, name), 0)])
    assert [len(losses) for losses in found] == [4, 4] and saved_steps(tmp_path) == ["step_000004"]
    fault(f"{name} sent to a rank")


def test_one_ctrl_c_that_comes_twice_is_one(ranks, folder, tmp_path):
    """From the terminal and from the launcher; also with the SIGTERM that a launcher sends after it."""
    config = tiny_config(folder, tmp_path, Plan(ulysses=2), steps=9)
    signals = [(signal.SIGINT, 0.05), (signal.SIGINT, 0.3), (signal.SIGTERM, 0)]
    assert [len(losses) for losses in ranks(2, stopped, config, 4, signals)] == [4, 4]
    assert saved_steps(tmp_path) == ["step_000004"]


@pytest.mark.faults
def test_a_second_ctrl_c_stops_at_once(ranks, folder, tmp_path, fault):
    config = tiny_config(folder, tmp_path, steps=9)
    signals = [(signal.SIGINT, 0.3), (signal.SIGINT, 0)]
    assert ranks(1, stopped, config, 4, signals) == ["interrupted"] and saved_steps(tmp_path) == []
    fault("Ctrl-C twice")


def under_nohup(config):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        return len(stopped(config, 1, [(signal.SIGHUP, 0)]))
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_a_run_under_nohup_outlives_the_terminal(ranks, folder, tmp_path):
    assert ranks(1, under_nohup, tiny_config(folder, tmp_path, steps=2)) == [2]


def test_a_step_is_given_up_between_its_batches_and_comes_again(ranks, folder, tmp_path):
    plan = Plan(dp_replicate=2)
    changes = {"steps": 4, "optim.accumulation": 3, "data.batch_size": 2}
    expected = ranks(2, trained, tiny_config(folder, tmp_path / "whole", plan, **changes))[0]
    config = tiny_config(folder, tmp_path / "stopped", plan, **changes)
    losses = ranks(2, stopped, config, 3 + 3 + 2, [(signal.SIGINT, 0)])[
        0
    ]  # in the second batch of the third step
    assert losses == expected[0][:2] and saved_steps(tmp_path / "stopped") == ["step_000002"]
    checkpoint = tmp_path / "stopped" / "checkpoints" / "step_000002"
    losses, weights, _ = ranks(2, trained, config, checkpoint)[0]
    assert losses == expected[0][2:]
    assert all(torch.equal(weights[name], weight) for name, weight in expected[1].items())


def profile_stopped(file):
    """The status of a profile of four steps that is asked to stop in the second."""
    from opensora_accel.training.command import main
    from opensora_accel.training.config import ProfileOptions
    from opensora_accel.training.objective import Objective

    original, count = Objective.loss, itertools.count(1)

    def loss(self, batch):
        if next(count) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Objective, "loss", loss)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            return main(["--config", str(file)], ProfileOptions(4)), out.getvalue()


def test_a_profile_that_was_stopped_is_no_success(ranks, folder, tmp_path):
    config = tiny_config(folder, tmp_path / "run", steps=5)
    (tmp_path / "run.json").write_text(json.dumps(dataclasses.asdict(config)))
    status, told = ranks(1, profile_stopped, tmp_path / "run.json")[0]
    assert status == 1 and "recorded 2 steps of the 4 that were asked for" in told


@pytest.mark.parametrize(("error", "is_aborted"), [(RuntimeError("no memory"), True), (None, False)])
def test_groups_are_aborted_where_the_training_failed(monkeypatch, folder, tmp_path, error, is_aborted):
    from opensora_accel import parallel_states
    from opensora_accel.training import command

    def train(*_):
        if error is not None:
            raise error
        return 0

    told, reset = [], parallel_states.reset
    monkeypatch.setattr(command, "_train", train)
    monkeypatch.setattr(
        parallel_states, "reset", lambda **options: told.append(options["abort"]) or reset(**options)
    )
    config = tiny_config(folder, tmp_path / "run")
    (tmp_path / "run.json").write_text(json.dumps(dataclasses.asdict(config)))
    with pytest.raises(RuntimeError) if error else contextlib.nullcontext():
        command.main(["--config", str(tmp_path / "run.json")])
    assert told == [is_aborted]


def test_what_is_saved_already_is_not_saved_again(ranks, folder, tmp_path):
    config = tiny_config(folder, tmp_path, steps=6, save_every=3, **{"optim.accumulation": 2})
    ranks(1, stopped, config, 7, [(signal.SIGINT, 0)])
    assert saved_steps(tmp_path) == ["step_000003"]
    checkpoint = tmp_path / "checkpoints" / "step_000003"
    assert ranks(1, stopped, config, 1, [(signal.SIGINT, 0)], checkpoint) == [[]]
    assert saved_steps(tmp_path) == ["step_000003"]
    config = tiny_config(folder, tmp_path / "new", steps=6, **{"optim.accumulation": 2})
    assert ranks(1, stopped, config, 1, [(signal.SIGINT, 0)]) == [[]] and saved_steps(tmp_path / "new") == []


def not_finite(config):
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config)
    before = {n: p.detach().clone() for n, p in trainer.state.model.named_parameters()}
    original = trainer.objective.loss
    trainer.objective.loss = lambda batch: original(batch) * float("nan")
    trainer.step()
    assert all(torch.equal(p, before[n]) for n, p in trainer.state.model.named_parameters())
    with pytest.raises(ValueError, match="10 steps in a row"):
        for _ in range(10):
            trainer.step()
    trainer.objective.loss = original
    trainer.experts[0].skipped_in_a_row = 5
    trainer.step()
    return trainer.experts[0].skipped_in_a_row


def all_skipped(config):
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config)
    original = trainer.objective.loss
    trainer.objective.loss = lambda batch: original(batch) * float("nan")
    with pytest.raises(ValueError, match="all 3 steps were skipped, because their gradients were not finite"):
        trainer.train()


def test_a_run_whose_every_step_was_skipped_fails_and_writes_no_weights(ranks, folder, tmp_path):
    changes = {"steps": 3, "save_every": 2, "num_samples": 1, "sample_every": 2, "lora.rank": 2}
    ranks(2, all_skipped, tiny_config(folder, tmp_path / "run", Plan(dp_replicate=2), **changes))
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == [None] * 3
    assert not [path for path in (tmp_path / "run").rglob("*.safetensors")]
    assert not (tmp_path / "run/checkpoints").exists() and not (tmp_path / "run/lora").exists()


@pytest.mark.faults
def test_a_step_that_is_not_finite_is_skipped(ranks, folder, tmp_path, fault):
    assert ranks(1, not_finite, tiny_config(folder, tmp_path)) == [0]
    fault("steps that are not finite")


def told_of(config, steps, spoil):
    """What rank 0 tells of 25 steps of which rank 1's loss is spoiled in some; the norms that are remembered."""
    from opensora_accel.training import expert
    from opensora_accel.training.loop import Trainer

    trainer, told = Trainer(config), []
    original, warning = trainer.objective.loss, expert.logger.warning
    expert.logger.warning = lambda text, *values: told.append(text % values)

    def loss(batch):
        # One rank's samples alone, as a broken clip is.
        is_broken = trainer.state.step in steps and dist.get_rank() == 1
        return original(batch) * (spoil if is_broken else 1.0)

    trainer.objective.loss = loss
    try:
        for _ in range(25):
            trainer.step()
    finally:
        expert.logger.warning = warning
    return told, list(trainer.experts[0].norms)


@pytest.mark.faults
def test_a_spike_is_skipped_and_its_clips_are_named(ranks, folder, tmp_path, fault):
    config = tiny_config(folder, tmp_path, Plan(dp_replicate=2), steps=30, **{"optim.skip_factor": 20.0})
    (told, norms), (nothing, others) = ranks(2, told_of, config, [3, 22], 1000.0)
    # The fourth step has too few before it to be compared with.
    (line,) = told
    assert "step 23 skipped: its gradient norm is" in line and "times the median of 22 steps" in line
    assert 2 <= line.count(".mp4") <= 4 and nothing == [] and norms == others and len(norms) == 24
    fault("a loss spike")


@pytest.mark.faults
def test_clips_of_the_rank_whose_loss_is_not_finite_are_named(ranks, folder, tmp_path, fault):
    config = tiny_config(folder, tmp_path, Plan(dp_replicate=2), steps=30)
    (line,) = ranks(2, told_of, config, [1], float("nan"))[0][0]
    assert "step 2 skipped: its gradient norm is nan; its clips: " in line and 1 <= line.count(".mp4") <= 2
    fault("a batch whose loss is NaN")


def watched(config, spoil):
    """Trains; what is logged, and the error that ends it, where one does. `spoil(trainer)` is called in each step."""
    from opensora_accel.training.loop import Trainer

    trainer, told = Trainer(config), []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger = logging.getLogger("opensora_accel")
    logger.addHandler(handler)
    original = trainer.objective.loss

    def loss(batch):
        return original(batch) * spoil(trainer)

    trainer.objective.loss = loss
    try:
        trainer.train()
    except ValueError as error:
        return told, str(error)
    finally:
        logger.removeHandler(handler)
    return told, None


def nan_in_step_three(trainer):
    return float("nan") if trainer.state.step == 2 and dist.get_rank() == 1 else 1.0


def drifts_in_step_three(trainer):
    if trainer.state.step == 2 and dist.get_rank() == 1:
        with torch.no_grad():
            next(trainer.state.model.parameters()).view(-1)[0] += 1e-6
    return 1.0


@pytest.mark.faults
def test_a_watched_run_names_what_goes_wrong(ranks, folder, tmp_path, fault):
    options = {"steps": 6, "watch": 2, "num_samples": 0}
    config = tiny_config(folder, tmp_path / "nan", Plan(dp_replicate=2), **options)
    (told, error), _ = ranks(2, watched, config, nan_in_step_three)
    assert error is None and len(told) == 2
    assert "the gradient norm of step 3 is nan: first in the loss" in told[0] and "on rank 1" in told[0]
    assert ".mp4" in told[0] and told[1].startswith("step 3 skipped")
    rows = [json.loads(line) for line in (tmp_path / "nan" / "metrics.jsonl").read_text().splitlines()]
    assert [any(name.startswith("grad_norm/") for name in row) for row in rows] == [True, False] * 3
    # The third step's has no norms of blocks that are finite.
    norms = [value for name, value in rows[4].items() if name.startswith("grad_norm/")]
    assert sum(norm**2 for norm in norms) ** 0.5 == pytest.approx(rows[4]["grad_norm"], rel=1e-5)
    fault("a batch whose loss is NaN, watched")
    config = tiny_config(folder, tmp_path / "drift", Plan(dp_replicate=2), **options)
    for told, error in ranks(2, watched, config, drifts_in_step_three):
        assert (
            not told
            and error.startswith("in step 3 ")
            and "the weight of " in error
            and "equal in step 1" in error
        )
    fault("weights that drift apart")
