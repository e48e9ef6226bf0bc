"""The trainer: one job, whatever the mesh; resumed as if it had never stopped; stopped without loss."""

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
from opensora_accel.checkpoint import GLOBAL_ACTIVATION_MANAGER
from opensora_accel.precision import LiftOperations
from opensora_accel.training import summary
from opensora_accel.training.recipes import RECIPES
from opensora_accel.training.tiny_run import write_clips
from tests.fsdp.autocast import CastByAutocast
from tests.tiers import PROVE, some
from tests.tolerances import RELATIVE
from tests.training.runs import tiny_config

PRECISION = {"fp64": torch.float64, "fp32": torch.float32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_clips(tmp_path_factory.mktemp("clips"))


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def first_gradients(trainer):
    trainer.objective.loss(trainer.objective.encoders.encode(next(trainer.loader))).backward()
    grads = {
        name.removeprefix("module."): whole(p.grad).clone()
        for name, p in trainer.state.model.named_parameters()
        if p.requires_grad
    }
    trainer.state.optimizer.zero_grad()
    return grads


def curve(config, steps, gradients=True):
    """Loss and gradient norm of every step, and the gradients of the first batch."""
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config)
    grads = {}
    if gradients:
        position = trainer.loader.state_dict()
        grads = first_gradients(trainer)
        trainer.loader.load_state_dict(position)
    steps = [trainer.step() for _ in range(steps)]
    return [s["loss"] for s in steps], [s["grad_norm"] for s in steps], grads


PLANS = [
    Plan(),
    Plan(ulysses=2),
    Plan(ulysses=4),
    Plan(ring=2),
    Plan(ring=2, ulysses=2, checkpoint="selective", offload=1.0),
    Plan(dp_replicate=2, ulysses=2),
    Plan(dp_shard=2, ulysses=2, sharding="zero3", checkpoint="full", offload=1.0),
]


@pytest.mark.parametrize(
    ("precision", "plans", "steps"),
    [
        ("fp64", [PLANS[0], PLANS[4], PLANS[6]], 5),
        pytest.param("fp64", PLANS, 20, marks=PROVE),
        pytest.param("fp32", PLANS, 20, marks=PROVE),
    ],
)
def test_one_job_whatever_the_mesh(ranks, folder, tmp_path, precision, plans, steps):
    results = []
    for plan in plans:
        config = tiny_config(folder, tmp_path, plan.replace(precision=precision))
        found = ranks(plan.world_size, curve, config, steps)
        assert all(rank[:2] == found[0][:2] for rank in found), "ranks report different losses"
        results.append(found[0])
    losses, norms, grads = results[0]
    assert losses[-1] < losses[0]
    tolerance = RELATIVE[PRECISION[precision]]
    for plan, (other, other_norms, other_grads) in zip(plans[1:], results[1:], strict=True):
        assert other == pytest.approx(losses, rel=tolerance), plan
        # Adam divides small gradients by their own size, so the norm of a later step carries their noise too.
        assert other_norms == pytest.approx(norms, rel=10 * tolerance), plan
        if precision == "fp64":
            for name, grad in grads.items():
                error = (other_grads[name] - grad).abs().max() / grad.abs().max()
                assert error < tolerance, f"{plan}: {name} {error}"


def test_checkpointing_and_offload_change_no_bit(ranks, folder, tmp_path):
    plain, saving = (
        ranks(2, curve, tiny_config(folder, tmp_path, plan), 3)[0]
        for plan in (Plan(ulysses=2), Plan(ulysses=2, checkpoint="full", offload=1.0))
    )
    assert plain[0] == saving[0]
    assert all(torch.equal(saving[2][name], grad) for name, grad in plain[2].items())


def test_accumulation_is_a_larger_batch(ranks, folder, tmp_path):
    """Two global batches of 2 are one of 4: the same draws, the same gradients."""
    large = tiny_config(folder, tmp_path, Plan(precision="fp64"))
    for plan in (Plan(precision="fp64"), Plan(dp_replicate=2, precision="fp64")):
        small = tiny_config(folder, tmp_path, plan, **{"data.batch_size": 2, "optim.accumulation": 2})
        expected, found = (
            ranks(1, curve, large, 5, False)[0],
            ranks(plan.world_size, curve, small, 5, False)[0],
        )
        assert found[0] == pytest.approx(expected[0], rel=1e-9)
        assert found[1] == pytest.approx(expected[1], rel=1e-9)
    sharded = Plan(dp_shard=2, sharding="zero2", precision="fp64")
    small = tiny_config(folder, tmp_path, sharded, **{"data.batch_size": 2, "optim.accumulation": 2})
    assert ranks(2, curve, small, 5, False)[0][1] == pytest.approx(expected[1], rel=1e-9)


def trained(config, checkpoint=None):
    from opensora_accel.training.loop import Trainer
    from opensora_accel.training.saved_state import read_record

    trainer = Trainer(config, checkpoint, None if checkpoint is None else read_record(checkpoint))
    losses = trainer.train()
    weights = {name: whole(p.detach()).clone() for name, p in trainer.state.model.named_parameters()}
    averaged = {name: whole(p).clone() for name, p in trainer.state.ema.weights.items()}
    return losses, weights, averaged


RESUMES = {
    "one rank": (Plan(), Plan()),
    "sequence": (Plan(ulysses=2, checkpoint="full", offload=1.0),) * 2,
    "sharded": (Plan(dp_shard=2, sharding="zero3"),) * 2,
    "another mesh": (Plan(ulysses=2), Plan(dp_shard=2, ulysses=2, sharding="zero3")),
}


@pytest.mark.parametrize("name", some(RESUMES, "another mesh"))
def test_a_resumed_run_is_the_run(ranks, folder, tmp_path, name):
    before, after = RESUMES[name]
    saving = tiny_config(folder, tmp_path / "a", before, steps=6, save_every=3, keep_checkpoints=9)
    whole_run = ranks(before.world_size, trained, saving)[0]
    checkpoint = tmp_path / "a" / "checkpoints" / "step_000003"
    resumed = tiny_config(folder, tmp_path / "b", after, steps=6)
    losses, weights, averaged = ranks(after.world_size, trained, resumed, checkpoint)[0]
    assert len(losses) == 3
    if before == after:
        assert losses == whole_run[0][3:], "not the same bits"
        assert all(torch.equal(weights[n], w) for n, w in whole_run[1].items())
        assert all(torch.equal(averaged[n], w) for n, w in whole_run[2].items())
    else:
        assert losses == pytest.approx(whole_run[0][3:], rel=RELATIVE[torch.float32])
        for name, weight in whole_run[1].items():
            # Adam's first steps move a weight by lr (3e-3) whatever its gradient's size, noise included.
            assert torch.allclose(weights[name], weight, atol=1e-4), name
            assert torch.allclose(averaged[name], whole_run[2][name], atol=1e-4), name


def test_checkpoints_are_kept_and_removed(ranks, folder, tmp_path):
    config = tiny_config(folder, tmp_path, steps=5, save_every=2, keep_checkpoints=2)
    ranks(1, trained, config)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step_000004", "step_000005"]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert {"loss", "grad_norm", "lr", "tokens_per_s", "memory_gib"} <= set(lines[0])
    assert list((tmp_path / "tensorboard").glob("events*"))
    assert json.loads((tmp_path / "config.json").read_text())["steps"] == 5


def clip_norms(plan, config):
    """A norm far below the gradient's: the update shows whether all ranks clipped by the whole norm."""
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config)
    norms = [trainer.step()["grad_norm"] for _ in range(3)]
    return norms, {n: whole(p.detach()).clone() for n, p in trainer.state.model.named_parameters()}


@PROVE
def test_clipping_is_right_under_sharding(ranks, folder, tmp_path):
    changes = {"optim.clip_norm": 0.01, "optim.ema_decay": 0.0}
    reference = None
    for plan in (
        Plan(),
        Plan(dp_shard=4, sharding="zero3"),
        Plan(dp_replicate=2, dp_shard=2, sharding="zero3"),
    ):
        plan = plan.replace(precision="fp64")
        norms, weights = ranks(
            plan.world_size, clip_norms, plan, tiny_config(folder, tmp_path, plan, **changes)
        )[0]
        if reference is None:
            reference = norms, weights
            assert min(norms) > 0.01
        assert norms == pytest.approx(reference[0], rel=1e-9)
        for name, weight in weights.items():
            assert torch.allclose(weight, reference[1][name], rtol=1e-7, atol=1e-9), name


def first_losses(config):
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config)
    with LiftOperations():  # Mochi makes its positions in fp32
        return trainer.train()


def test_a_loss_of_another_kind_is_that_of_one_rank(ranks, folder, tmp_path):
    changes = {"steps": 2, "flow.huber": 0.5, "flow.noise_offset": 0.1, "flow.weighting": "bell"}
    plans = [Plan(precision="fp64"), Plan(precision="fp64", ulysses=2)]
    losses = [
        ranks(plan.world_size, first_losses, tiny_config(folder, tmp_path / str(number), plan, **changes))[0]
        for number, plan in enumerate(plans)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
    plain = ranks(1, first_losses, tiny_config(folder, tmp_path / "plain", plans[0], steps=2))[0]
    assert losses[0] != pytest.approx(plain, rel=0.01)


OTHER_MODELS = [name for name in RECIPES if name != "WanTransformer3DModel"]


@pytest.mark.parametrize("degrees", some([{"ring": 2}, {"ulysses": 3}]), ids=str)
@pytest.mark.parametrize("name", some(OTHER_MODELS, "LTXVideoTransformer3DModel"))
def test_other_models_train_as_on_one_rank(ranks, folder, tmp_path, name, degrees):
    """Two ranks share a clip, three share it unevenly; what is sampled at the end is decoded."""
    changes = {"steps": 3, "model.class_name": name, "model.config": dict(RECIPES[name].tiny)}
    changes |= {"num_samples": 1, "flow.sample_steps": 2}
    losses = []
    for number, plan in enumerate((Plan(precision="fp64"), Plan(precision="fp64", **degrees))):
        config = tiny_config(folder, tmp_path / str(number), plan, **changes)
        losses.append(ranks(plan.world_size, first_losses, config)[0])
        assert (tmp_path / str(number) / "samples" / "step_000003" / "clip_1.mp4").is_file()
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)


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


def bf16(config):
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config)
    with CastByAutocast() as mode:
        losses = [trainer.step()["loss"] for _ in range(10)]
    assert mode.found == set()
    return (
        losses,
        {p.dtype for p in trainer.state.model.parameters()},
        GLOBAL_ACTIVATION_MANAGER.counters.moved,
    )


@PROVE
def test_bf16_keeps_fp32_weights_and_follows_fp32(ranks, folder, tmp_path):
    plan = Plan(ulysses=2, checkpoint="full", offload="auto", precision="bf16")
    losses, dtypes, moved = ranks(2, bf16, tiny_config(folder, tmp_path, plan))[0]
    expected = ranks(1, curve, tiny_config(folder, tmp_path), 10, False)[0][0]
    assert dtypes == {torch.float32} and moved > 0
    assert losses == pytest.approx(expected, rel=RELATIVE[torch.bfloat16])
    assert losses != expected


@pytest.mark.prove
def test_bf16_computes_the_same_on_whole_and_on_sharded_weights(ranks, folder, tmp_path):
    """Two ranks' gradients have one sum, whichever order; of norms they would not."""
    plans = [
        Plan(dp_replicate=2, precision="bf16"),
        Plan(dp_shard=2, sharding="FULL_SHARD", precision="bf16"),
    ]
    options = {"optim.clip_norm": 0.0, "optim.ema_decay": 0.9}
    whole, sharded = (ranks(2, bf16, tiny_config(folder, tmp_path, plan, **options))[0] for plan in plans)
    assert whole == sharded


def sampled(config):
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config)
    weights = {n: p.detach().clone() for n, p in trainer.state.model.named_parameters()}
    trainer.train()
    first = trainer.write_samples()
    assert trainer.state.model.training
    assert any(not torch.equal(p, weights[n]) for n, p in trainer.state.model.named_parameters())
    return str(first)


@PROVE
def test_samples_are_written_beside_their_sources(ranks, folder, tmp_path):
    from opensora_accel.training.video import probe

    config = tiny_config(folder, tmp_path, Plan(ulysses=2), steps=2, num_samples=2, **{"flow.guidance": 2.0})
    strip = ranks(2, sampled, config)[0]
    assert strip == str(tmp_path / "samples" / "step_000002" / "strip.png") and os.path.getsize(strip) > 1000
    info = probe(tmp_path / "samples" / "step_000002" / "clip_2.mp4")
    assert (info.num_frames, info.height, info.width) == (5, 240, 800)


def sampled_in_the_middle(config):
    """Samples after two steps; the third must train the live weights, not the averaged ones."""
    from opensora_accel.training.loop import Trainer

    trainer, losses = Trainer(config), []
    for step in range(4):
        losses.append(trainer.step()["loss"])
        if config.num_samples and step == 1:
            trainer.write_samples()
    return losses


@PROVE
@pytest.mark.parametrize("sharding", ["none", "zero2", "zero3"])
def test_sampling_does_not_disturb_training(ranks, folder, tmp_path, sharding):
    plan = Plan(dp_replicate=2) if sharding == "none" else Plan(dp_shard=2, sharding=sharding)
    quiet, sampling = (
        ranks(2, sampled_in_the_middle, tiny_config(folder, tmp_path, plan, num_samples=n))[0] for n in (0, 1)
    )
    assert quiet == sampling


def trained_with_auto(config):
    from opensora_accel.training.loop import Trainer

    Trainer(config).train()
    return GLOBAL_ACTIVATION_MANAGER.memory_target_bytes


def test_the_choice_of_offload_and_its_reason_are_kept(ranks, folder, tmp_path):
    plan = Plan(checkpoint="full", offload="auto")
    config = tiny_config(folder, tmp_path, plan, steps=4, memory_target_gib=0.5)
    assert ranks(1, trained_with_auto, config) == [2**29]
    record = json.loads((tmp_path / "offload.json").read_text())
    (decision,) = record["decisions"]
    assert decision["limited_by"] == "nothing to gain" and "do not run beside compute" in decision["reason"]
    assert (decision["moved"], decision["num_blocks"]) == (0, 2)
    assert record["counters"]["moved"] == 2, "two passes, before anything was decided"


def test_what_computes_is_told(monkeypatch):
    monkeypatch.setattr(summary.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(summary, "local_device", lambda: torch.device("cpu"))
    assert summary._ranks() == "2 CPU rank(s)"
    monkeypatch.setattr(summary, "local_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert summary._ranks() == "2 GPU rank(s): NVIDIA H100 80GB HBM3, NCCL"
