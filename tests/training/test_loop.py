"""The trainer: one job, whatever the mesh; resumed as if it had never stopped; samples that do not disturb it."""

import json
import os

import pytest
import torch

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


# Authors' own classes, which are imported from where they lie: tests/training/test_open_sora.py.
OTHER_MODELS = [
    name for name, recipe in RECIPES.items() if name != "WanTransformer3DModel" and not recipe.home
]


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
