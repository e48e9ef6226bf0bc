"""What a save costs the training: the step waits for one copy in memory, not for the disk."""

import statistics
import time

import pytest
import torch.distributed as dist

from opensora_accel import Plan
from opensora_accel.training.loop import Trainer
from tests.training.runs import tiny_config

# 13 million parameters: 213 MB with their averages and moments.
MODEL = {
    "num_attention_heads": 8,
    "attention_head_dim": 32,
    "num_layers": 12,
    "ffn_dim": 1024,
    "freq_dim": 32,
    "rope_max_seq_len": 32,
}


def timed(work):
    """Seconds until every rank is done."""
    dist.barrier()
    started = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - started


def stalls(config, num_rounds):
    """Seconds of each round: a step, what one waits for a save beside it, and a save that is waited for."""
    trainer = Trainer(config)
    for _ in range(2):
        trainer.step()
        trainer.save()  # the first save makes the buffers that the next ones use again
    trainer.saver.wait()
    rounds = []
    for _ in range(num_rounds):
        step = timed(trainer.step)
        asynchronous = timed(trainer.save)
        trainer.saver.wait()
        synchronous = timed(lambda: (trainer.save(), trainer.saver.wait()))
        rounds.append((step, asynchronous, synchronous))
    return list(zip(*rounds, strict=True))


@pytest.mark.prove
def test_a_step_waits_for_a_copy_and_not_for_the_disk(ranks, clips, tmp_path):
    plan = Plan(dp_shard=2, sharding="FULL_SHARD")
    options = {"data.batch_size": 8, "model.config": MODEL}
    config = tiny_config(clips, tmp_path / "run", plan, steps=100, keep_checkpoints=1, **options)
    rounds = ranks(2, stalls, config, 5)[0]
    step, asynchronous, synchronous = map(statistics.median, rounds)
    print(
        f"a step takes {step:.2f} s; a save beside it stalls it for {asynchronous:.3f} s, {asynchronous / step:.1%} "
        f"of a step; a save that is waited for {synchronous:.2f} s, {synchronous / step:.0%}"
    )
    # The least of each: whatever else runs on the machine only adds, and most to what is short.
    step, asynchronous, synchronous = map(min, rounds)
    assert asynchronous < 0.05 * step
    assert asynchronous < 0.25 * synchronous
