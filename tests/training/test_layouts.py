"""A saved state goes on under any Plan: the same parameters, optimizer, averages and data, whoever wrote them."""

import threading
import time

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from opensora_accel import Plan, parallel_states
from opensora_accel.training.loop import Trainer
from opensora_accel.training.saved_state import read_record, save
from opensora_accel.training.saved_state.folder import read_manifest
from shardformer.tensor_parallel import full_tensor
from tests.tiers import some
from tests.training.runs import tiny_config

FOUR_RANKS = Plan(dp_shard=2, ulysses=2, sharding="FULL_SHARD")
PLANS = {
    "one rank": Plan(),
    "two ranks, whole": Plan(dp_replicate=2),
    "ring of three, sharded": Plan(ring=3, sharding="SHARD_GRAD_OP"),
    "four ranks, two copies": Plan(dp_replicate=2, ulysses=2, sharding="HYBRID_SHARD"),
    "the same four": FOUR_RANKS,
}


def everything(trainer):
    """Parameters, moments and averages, whole, and where the data goes on."""
    model, found = trainer.state.model, {}
    for name, parameter in model.named_parameters():
        found[name] = full_tensor(model, name, parameter)
        for entry, value in trainer.state.optimizer.state[parameter].items():
            found[f"{name} {entry}"] = full_tensor(model, name, value).clone()
        found[f"{name} averaged"] = full_tensor(model, name, trainer.state.ema.weights[name])
    return found | {"updates": torch.tensor(trainer.state.ema.num_updates)}, trainer.loader.state_dict()


def saved(config):
    trainer = Trainer(config)
    trainer.train()
    return everything(trainer)


def loaded(config, folder):
    trainer = Trainer(config, folder, read_record(folder))
    return everything(trainer)


@pytest.fixture(scope="module")
def written(ranks, clips, tmp_path_factory):
    """The folder that four ranks wrote after three steps, and what they held."""
    output = tmp_path_factory.mktemp("four")
    held, position = ranks(4, saved, tiny_config(clips, output, FOUR_RANKS, steps=3))[0]
    return output / "checkpoints" / "step_000003", held, position


def test_ranks_share_the_files(written):
    folder, held, _ = written
    for stem in (
        "transformer/diffusion_pytorch_model",
        "transformer_ema/diffusion_pytorch_model",
        "optimizer",
    ):
        files = sorted(folder.glob(f"{stem}-*-of-00004.safetensors"))
        assert len(files) == 4
        sizes = [file.stat().st_size for file in files]
        assert max(sizes) < 0.6 * sum(sizes), "one rank writes most of it"
    files = folder.glob("transformer/*.safetensors")
    weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert all(torch.equal(tensor, held[name]) for name, tensor in weights.items())


@pytest.mark.parametrize("name", some(PLANS, "ring of three, sharded"))
def test_a_saved_state_goes_on_under_any_plan(ranks, clips, tmp_path, written, name):
    folder, held, position = written
    config = tiny_config(clips, tmp_path / "run", PLANS[name], steps=3)
    for found, found_position in ranks(PLANS[name].world_size, loaded, config, folder):
        assert found_position == position and found.keys() == held.keys()
        assert [key for key, tensor in held.items() if not torch.equal(found[key], tensor)] == []


def read_bytes(config, folder):
    """The bytes of tensors that this rank reads."""
    from opensora_accel.weights import Stored

    read, num_bytes = Stored.read, []

    def counted(self, dtype, region=()):
        found = read(self, dtype, region)
        num_bytes.append(found.nbytes)
        return found

    Stored.read = counted
    try:
        Trainer(config, folder, read_record(folder))
    finally:
        Stored.read = read
    return sum(num_bytes)


def test_a_rank_reads_what_it_holds(ranks, clips, tmp_path, written):
    folder, held, _ = written
    total = sum(tensor.nbytes for tensor in held.values())
    config = tiny_config(clips, tmp_path / "run", FOUR_RANKS, steps=3)
    found = ranks(4, read_bytes, config, folder)
    # Once to load it, and once for the numbers of what lies there, which all of them share too.
    assert 2 * total <= sum(found) < 2.1 * total and max(found) < 0.8 * total


def train_beside_a_slow_save(config):
    """Whether steps ran while files were written, the losses, and what was held after step 3 and at the end."""
    original, writing, beside, held = save.save_file, threading.Event(), [], []

    def slow(*args, **options):
        writing.set()
        time.sleep(0.2)
        original(*args, **options)
        writing.clear()

    trainer = Trainer(config)
    step = trainer.step

    def watched(*args):
        metrics = step(*args)
        beside.append(writing.is_set())
        if trainer.state.step == 3:
            held.append(everything(trainer)[0])
        return metrics

    trainer.step, save.save_file = watched, slow
    try:
        losses = trainer.train()
    finally:
        save.save_file = original
    return any(beside), losses, [*held, everything(trainer)[0]]


@pytest.mark.prove  # of a slow copy: test_save
def test_training_goes_on_beside_a_save_and_the_state_is_that_of_its_step(ranks, clips, tmp_path):
    plan = Plan(dp_shard=2, sharding="FULL_SHARD")
    config = tiny_config(clips, tmp_path / "run", plan, steps=8, save_every=3, keep_checkpoints=3)
    once = tiny_config(clips, tmp_path / "once", plan, steps=8, save_every=8)
    expected = ranks(2, train_beside_a_slow_save, once)[0]
    for beside, losses, held in ranks(2, train_beside_a_slow_save, config):
        assert beside and losses == expected[1]
        for before, found in zip(expected[2], held, strict=True):
            assert all(torch.equal(found[key], tensor) for key, tensor in before.items())
    one = tiny_config(clips, tmp_path / "one", steps=8)
    found, _ = ranks(1, loaded, one, tmp_path / "run" / "checkpoints" / "step_000003")[0]
    assert all(torch.equal(found[key], tensor) for key, tensor in held[0].items())


def two_runs(config, other):
    original = save.save_file

    def slow(*args, **options):
        time.sleep(dist.get_rank() / 2)  # rank 0 must wait for what rank 1 writes now
        original(*args, **options)

    save.save_file = slow
    for each in (config, other):
        Trainer(each).train()
        parallel_states.reset()
    save.save_file = original


@pytest.mark.prove
def test_a_second_run_in_one_job_writes_what_is_its_own(ranks, clips, tmp_path):
    """Ranks tell each other what they wrote under keys that outlive a run."""
    plan = Plan(dp_shard=2, sharding="FULL_SHARD")
    first, second = (
        tiny_config(clips, tmp_path / name, plan, steps=1, seed=seed) for seed, name in enumerate("ab")
    )
    ranks(2, two_runs, first, second)
    sums = [read_manifest(tmp_path / name / "checkpoints" / "step_000001") for name in "ab"]
    assert sums[0] != sums[1]
    read_record(tmp_path / "b" / "checkpoints" / "step_000001")


def fail_on_rank(config, rank):
    """What every rank raises when one cannot write."""
    original = save.save_file

    def failing(*args, **options):
        if dist.get_rank() == rank:
            raise OSError(28, "No space left on device")
        return original(*args, **options)

    save.save_file = failing
    try:
        Trainer(config).train()
    except OSError as error:
        return str(error)
    finally:
        save.save_file = original
    return None


@pytest.mark.parametrize("rank", some([1, 0]))
def test_a_rank_that_cannot_write_ends_the_run_on_all_ranks(ranks, clips, tmp_path, rank):
    plan = Plan(dp_shard=2, sharding="FULL_SHARD")
    config = tiny_config(clips, tmp_path / "run", plan, steps=50, save_every=2)
    told = ranks(2, fail_on_rank, config, rank)
    assert (
        told[0] == told[1] and f"rank {rank}: [Errno 28] No space left" in told[0] and "--resume" in told[0]
    )
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
    steps = (tmp_path / "run" / "metrics.jsonl").read_text().count("\n")
    assert 2 <= steps < 10, "it went on for long"
