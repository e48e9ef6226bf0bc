"""What happens to a run: ranks killed in a step or a save, files damaged, disks full. It goes on, or says why not.

Each case ends in a run that is, bit for bit, the one that nothing happened to, and that lost no more than the steps
since its newest saved state. `make faults` runs all of them and prints how many of each kind there were.
"""

import contextlib
import dataclasses
import io
import os
import random
import resource
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from opensora_accel import Plan
from opensora_accel.communications.missing_ranks import waiting
from opensora_accel.training import loop
from opensora_accel.training.loop import Trainer
from opensora_accel.training.saved_state import find_saved_state, list_saved_states, read_record, save
from opensora_accel.verify.pool import RankError, RankPool
from tests.tiers import PROVE
from tests.training.runs import tiny_config
from tests.training.test_layouts import everything

SAVE_EVERY, STEPS = 2, 8
PLAN = Plan(dp_shard=2, sharding="FULL_SHARD")
pytestmark = pytest.mark.faults


def config_of(clips, output):
    return tiny_config(clips, output, PLAN, steps=STEPS, save_every=SAVE_EVERY, timeout_s=20.0)


def go_on(config):
    """Goes on from the newest whole saved state, as a launcher that starts the ranks again; the first step, the end."""
    from opensora_accel.parallel_states import init_parallel, reset

    init_parallel(config.plan)  # ranks agree on a saved state before they build the run
    found = find_saved_state("auto", Path(config.output))
    reset()
    trainer = Trainer(config, *(found or (None, None)))
    start = trainer.state.step
    trainer.train()
    return start, everything(trainer)[0]


@pytest.fixture(scope="module")
def undisturbed(ranks, clips, tmp_path_factory):
    return ranks(2, go_on, config_of(clips, tmp_path_factory.mktemp("undisturbed") / "run"))[0][1]


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_after(config, rank, num_batches, delay_s):
    """The rank is killed so long after it began its n-th batch."""
    trainer = Trainer(config)
    name = "loss_of_row" if config.data.packed_tokens else "loss"
    loss, begun = getattr(trainer.objective, name), []

    def timed(batch):
        begun.append(batch)
        if dist.get_rank() == rank and len(begun) == num_batches:
            threading.Timer(delay_s, die).start()
        return loss(batch)

    setattr(trainer.objective, name, timed)
    trainer.train()


def check_it_goes_on(ranks, config, undisturbed, least):
    for start, held in ranks(2, go_on, config):
        assert start >= least, "more was lost than the steps since the last save"
        assert all(torch.equal(held[key], tensor) for key, tensor in undisturbed.items())
    folder = Path(config.output) / "checkpoints"
    assert not list(folder.glob("*.partial"))
    for saved in list_saved_states(folder):
        read_record(saved)


MOMENTS = [(seed, seed % 2, 2 + seed % 6) for seed in range(20)]


@PROVE
@pytest.mark.parametrize(("seed", "rank", "num_batches"), MOMENTS)
def test_a_rank_killed_at_a_random_moment(
    ranks, clips, tmp_path, undisturbed, seed, rank, num_batches, fault
):
    config = config_of(clips, tmp_path / "run")
    delay_s = random.Random(seed).uniform(0, 0.05)
    with pytest.raises(RankError) as caught:
        ranks(2, die_after, config, rank, num_batches, delay_s)
    assert f"rank {rank}" in str(caught.value)
    # What was saved before the batch began, but for the save that was under way.
    check_it_goes_on(
        ranks, config, undisturbed, least=max(0, (num_batches - 1) // SAVE_EVERY - 1) * SAVE_EVERY
    )
    fault("a rank killed at a random moment")


def hang(config, how, waiting_s=None):
    """In its fifth batch rank 1 is stopped, or never comes back; what both ranks say, after how many seconds.

    With `waiting_s` that is the time after the first step, in which rank 1 takes longer.
    """
    if waiting_s is not None:
        loop.WAITING_S = waiting_s
    trainer = Trainer(config)
    loss, begun, store = trainer.objective.loss, [], dist.distributed_c10d._get_default_store()

    def stuck(batch):
        begun.append(time.monotonic())
        if dist.get_rank() == 1 and len(begun) == 1 and waiting_s is not None:
            time.sleep(2 * waiting_s)
        if dist.get_rank() == 1 and len(begun) == 5:
            store.set("pid", str(os.getpid()))
            if how == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            store.wait(["told"])
        return loss(batch)

    trainer.objective.loss = stuck
    with pytest.raises(RuntimeError) as caught, waiting("a step", dist.group.WORLD):
        trainer.train()
    seconds = time.monotonic() - begun[-1]
    if dist.get_rank() == 0:
        os.kill(int(store.get("pid")), signal.SIGCONT)
        store.set("told", "")
    return str(caught.value), seconds


HANG_TIMEOUT_S = 4.0


@pytest.mark.prove
@pytest.mark.parametrize("how", ["stopped", "gone another way"])
def test_a_rank_that_hangs(ranks, clips, tmp_path, undisturbed, how, fault):
    config = dataclasses.replace(config_of(clips, tmp_path / "run"), timeout_s=HANG_TIMEOUT_S)
    with RankPool(2, collective_timeout_s=HANG_TIMEOUT_S, grace_s=60) as impatient:
        told, seconds = impatient(2, hang, config, how)[0]
    silent = "rank 1 did not come and does not answer: it has ended, or is stopped"
    assert (silent if how == "stopped" else f"rank 1 did not come: it is at {__file__}:") in told
    assert seconds < HANG_TIMEOUT_S + 5
    check_it_goes_on(ranks, config, undisturbed, least=SAVE_EVERY)
    fault(f"a rank that hangs: {how}")


@PROVE
def test_a_rank_that_hangs_is_told_also_where_no_timeout_is_given(clips, tmp_path):
    config = dataclasses.replace(config_of(clips, tmp_path / "run"), timeout_s=0.0)
    with RankPool(2, collective_timeout_s=120, grace_s=60) as patient:
        told, seconds = patient(2, hang, config, "gone another way", 2.0)[0]
    assert f"rank 1 did not come: it is at {__file__}:" in told
    assert seconds < 2 + 5


class Deaths:
    """Kills this process before the n-th operation on files that a save makes."""

    def __init__(self, at):
        self.at, self.count = at, 0

    def wrap(self, function):
        def counted(*args, **kwargs):
            if "checkpoints" in str(args[0]) or "checkpoints" in str(args[-1]):
                self.count += 1
                if self.count == self.at:
                    die()
            return function(*args, **kwargs)

        return counted


def die_in_a_save(config, rank, at):
    if dist.is_initialized():
        dist.destroy_process_group()
    if int(os.environ.get("RANK", "0")) == rank:
        deaths = Deaths(at)
        for name in ("mkdir", "write_text", "rename", "unlink", "rmdir", "open"):
            setattr(Path, name, deaths.wrap(getattr(Path, name)))
        save.save_file, save._flush = deaths.wrap(save.save_file), deaths.wrap(save._flush)
    Trainer(config).train()
    return deaths.count if int(os.environ.get("RANK", "0")) == rank else None


SAVE_KILLS = [(rank, at) for rank, most in ((0, 40), (1, 10)) for at in range(1, most + 1)]


@pytest.mark.parametrize(
    ("rank", "at"),
    [pytest.param(*kill, marks=PROVE) for kill in SAVE_KILLS],
)
def test_a_rank_killed_in_a_save(ranks, clips, tmp_path, undisturbed, rank, at, fault):
    config = config_of(clips, tmp_path / "run")
    try:
        counts = ranks(2, die_in_a_save, config, rank, at)
    except RankError as error:
        assert f"rank {rank}" in str(error)
    else:
        pytest.skip(f"a run makes {counts[rank]} operations only")
    check_it_goes_on(ranks, config, undisturbed, least=0)
    fault("a rank killed in a save")


@pytest.fixture(scope="module")
def whole_run(ranks, clips, tmp_path_factory):
    output = tmp_path_factory.mktemp("whole") / "run"
    ranks(2, go_on, config_of(clips, output))
    return output


@PROVE
def test_damage_to_any_file_is_named_and_the_state_before_is_taken(
    parallel_registry, whole_run, tmp_path, fault
):
    draws = random.Random(0)
    newest, before = (f"step_{step:06d}" for step in (STEPS, STEPS - SAVE_EVERY))
    files = [path for path in sorted((whole_run / "checkpoints" / newest).rglob("*")) if path.is_file()]
    for number in range(100):
        output = tmp_path / str(number)
        shutil.copytree(whole_run / "checkpoints", output / "checkpoints")
        path = output / files[number % len(files)].relative_to(whole_run)
        content = bytearray(path.read_bytes())
        kind = ("a bit flipped", "truncated", "grown", "swapped")[number // len(files) % 4]
        if kind == "a bit flipped":
            content[draws.randrange(len(content))] ^= 1 << draws.randrange(8)
        elif kind == "truncated":
            del content[draws.randrange(len(content)) :]
        elif kind == "grown":
            content += b"}"
        else:
            other = output / files[(number + 1) % len(files)].relative_to(whole_run)
            content = other.read_bytes()
        path.write_bytes(content)
        with pytest.raises((ValueError, FileNotFoundError)) as caught:
            read_record(output / "checkpoints" / newest)
        assert path.name in str(caught.value), (kind, path.name)
        folder, _ = find_saved_state("auto", output)
        assert folder.name == before
        fault(f"a file of a saved state: {kind}")
        shutil.rmtree(output)


def run_under_a_limit(config, limit_bytes):
    """What a rank says whose files may not grow further."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        # Whoever runs the tests may have sent their output to a file, which could not grow either.
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            Trainer(config).train()
    except OSError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return None


@PROVE
def test_files_that_cannot_grow(ranks, clips, tmp_path, undisturbed, fault):
    config = config_of(clips, tmp_path / "run")
    for text in ranks(2, run_under_a_limit, config, 100_000):
        assert "could not be saved" in text and "make room for it" in text
    check_it_goes_on(ranks, config, undisturbed, least=0)
    fault("files that cannot grow")


@pytest.mark.prove
def test_a_full_disk(ranks, clips, tmp_path, undisturbed, fault):
    output = tmp_path / "disk"
    output.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", output], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        config = config_of(clips, output / "run")
        for text in ranks(2, full_disk, config):
            assert "No space left on device" in text and "make room for it" in text
        subprocess.run(["mount", "-o", "remount,size=64m", output], check=True)
        check_it_goes_on(ranks, config, undisturbed, least=0)
        fault("a full disk")
    finally:
        subprocess.run(["umount", output], check=True)


def full_disk(config):
    try:
        Trainer(config).train()
    except OSError as error:
        return str(error)
    return None
