"""Saves beside the training: what is saved is the state of its step, and the steps hardly wait for it."""

import statistics
import threading
import time
from contextlib import contextmanager
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from opensora_accel import Plan
from opensora_accel.training.loop import Trainer
from opensora_accel.training.saved_state.save import SAVING, Saver, TrainState
from tests.tiers import NEEDS_GPU, PROVE, some
from tests.training.runs import tiny_config


def timed(work):
    """Seconds until every rank is done."""
    dist.barrier()
    started = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - started


@contextmanager
def before_the_copy(work):
    """Within it the thread that saves does this work before it copies."""
    copy = torch._foreach_copy_

    def copy_after_work(*args, **kwargs):
        # FSDP copies with the same operator, in the main thread.
        if threading.current_thread().name == SAVING:
            work()
        return copy(*args, **kwargs)

    torch._foreach_copy_ = copy_after_work
    try:
        yield
    finally:
        torch._foreach_copy_ = copy


def saved_twice(config, seconds):
    """The tensors of two saves of one step: one is waited for, the other's copy begins `seconds` into the next step."""
    trainer = Trainer(config)
    trainer.step()
    folder = trainer.save()
    trainer.saver.wait()
    waited_for = folder.with_name("waited_for")
    if trainer.is_first:
        folder.rename(waited_for)
    with before_the_copy(lambda: time.sleep(seconds)):
        trainer.save()
        trainer.step()
        trainer.saver.wait()
    return [
        {path.relative_to(folder): load_file(path) for path in sorted(folder.rglob("*.safetensors"))}
        for folder in (waited_for, folder)
    ]


@PROVE
@pytest.mark.parametrize(
    "plan", some([Plan(dp_shard=2, sharding="FULL_SHARD"), Plan()]), ids=["sharded", "whole"]
)
def test_a_step_beside_the_copy_changes_nothing_of_it(ranks, clips, tmp_path, plan):
    config = tiny_config(clips, tmp_path / "run", plan, **{"optim.ema_decay": 0.9})
    first, again = ranks(plan.world_size or 1, saved_twice, config, 1.0)[0]
    assert first.keys() == again.keys()
    for file, tensors in first.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, again[file][name]), f"{file}: {name}"


class Model(torch.nn.Linear):
    # As models of diffusers have it.
    config: ClassVar = {}

    def to_json_string(self):
        return "{}"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_a_late_copy_takes_what_was_saved(parallel_registry, tmp_path, device):
    """On a GPU it runs on a stream of its own: what is computed meanwhile does not wait, what overwrites it does."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = Model(300, 300, device=device)
    before = {name: tensor.detach().to("cpu", copy=True) for name, tensor in model.named_parameters()}
    model(torch.ones(2, 300, device=device))  # what a first product starts has been started
    saver, on_gpu = Saver(torch.device(device)), device == "cuda"

    def late():
        torch.cuda._sleep(2_000_000_000) if on_gpu else time.sleep(
            0.3
        )  # on the stream of the copies: about a second

    state = TrainState(model, torch.optim.AdamW(model.parameters()), None, 1)
    with before_the_copy(late), torch.no_grad():
        saver.save(tmp_path / "state", [state], {}, {}, 1)
        if on_gpu:
            assert saver._copied.wait(60), "the copies were asked for"
            model(torch.ones(2, 300, device=device))
            torch.cuda.current_stream().synchronize()
            assert not saver._stream.query(), "the forward was done before the copy had begun"
        saver.wait_for_copy()
        for parameter in model.parameters():
            parameter.zero_()
        saver.wait()
    found = {
        name: tensor
        for file in tmp_path.rglob("diffusion*.safetensors")
        for name, tensor in load_file(file).items()
    }
    assert found.keys() == before.keys() and all(torch.equal(found[name], before[name]) for name in before)


def test_a_rank_that_owns_nothing_copies_nothing(parallel_registry):
    """There may be more ranks than tensors."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    saver = Saver(torch.device("cpu"))
    saver._copied.clear()
    saver._stage({})
    assert saver._copied.is_set()


def save_without_memory(config):
    """What a save says where rank 1 has no memory for its copy."""
    trainer = Trainer(config)

    def fail():
        if dist.get_rank() == 1:
            raise MemoryError("no memory for 4 GiB")

    with before_the_copy(fail):
        trainer.save()
        trainer.step()
        with pytest.raises(OSError) as caught:
            trainer.saver.wait()
    return str(caught.value)


def test_a_copy_that_fails_is_told_by_every_rank(ranks, clips, tmp_path):
    config = tiny_config(clips, tmp_path / "run", Plan(dp_shard=2, sharding="FULL_SHARD"))
    started = time.perf_counter()
    told = ranks(2, save_without_memory, config)
    assert time.perf_counter() - started < 60
    assert told[0] == told[1]
    assert "rank 1: no memory for 4 GiB" in told[0]


# 4.2 million parameters: 67 MB with their averages and moments.
MODEL = {
    "num_attention_heads": 8,
    "attention_head_dim": 32,
    "num_layers": 4,
    "ffn_dim": 1024,
    "freq_dim": 32,
    "rope_max_seq_len": 64,
}


def stalls(config, num_rounds):
    """Seconds of each round: a step, what it waits for a save, the step with a save beside it, a save waited for."""
    trainer = Trainer(config)
    waited = [0.0]

    def counted(work):
        def run():
            started = time.perf_counter()
            work()
            waited[0] += time.perf_counter() - started

        return run

    save = counted(trainer.save)
    trainer.saver.wait_for_copy = counted(trainer.saver.wait_for_copy)
    trainer.step()
    trainer.save()  # the first save makes the buffers that the next ones use again
    trainer.saver.wait()
    rounds = []
    for _ in range(num_rounds):
        step = timed(trainer.step)
        waited[0] = 0.0
        beside = timed(lambda: (save(), trainer.step()))
        stall = torch.tensor(waited[0])
        dist.all_reduce(stall, dist.ReduceOp.MAX)
        trainer.saver.wait()
        synchronous = timed(lambda: (trainer.save(), trainer.saver.wait()))
        rounds.append((step, stall.item(), beside, synchronous))
    return trainer.num_tokens, list(zip(*rounds, strict=True))


@pytest.mark.alone
def test_a_step_hardly_waits_for_a_save(ranks, clips, tmp_path):
    plan = Plan(dp_shard=2, sharding="FULL_SHARD")
    clip = {"data.num_frames": 9, "data.height": 96, "data.width": 160, "data.batch_size": 8}
    config = tiny_config(
        clips, tmp_path / "run", plan, steps=100, keep_checkpoints=1, **clip, **{"model.config": MODEL}
    )
    num_tokens, rounds = ranks(2, stalls, config, 3)[0]
    step, stall, beside, synchronous = map(statistics.median, rounds)
    print(
        f"a step of 8 clips of {num_tokens} tokens takes {step:.2f} s, {beside:.2f} s with a save beside it "
        f"({beside / step - 1:+.1%}), for which it waits {stall:.3f} s ({stall / step:.1%}); a save that is waited for "
        f"takes {synchronous:.2f} s ({synchronous / step:.1%})"
    )
    # The least of each: whatever else runs on the machine only adds, and most to what is short.
    # Whole steps are told and not bounded: other processes move them by more than a save beside them does.
    step, stall, _, synchronous = map(min, rounds)
    assert stall < 0.05 * step
    assert stall < 0.25 * synchronous
