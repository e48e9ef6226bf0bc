"""Samples, their order, and what is drawn at random for them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from opensora_accel import Plan
from opensora_accel.observe.meshes import Run
from tests.published.bug import Bug
from tests.published.models import SEQUENCE, STEPS, Timed, shuffled, train
from tests.verify.loops import averaged, batch, finish, spread


def data(length: int = 24) -> Tensor:
    """A data set of so many samples, the same everywhere."""
    return torch.randn(length, 11, 4, generator=torch.Generator().manual_seed(9))


def permutations_of_each_rank(model: Any, run: Run, is_wrong: bool) -> Tensor:
    """The sampler of each rank is seeded by the time multiplied by its rank; it deals every rank its part of another
    permutation, so that some samples come twice and others never."""
    seed = 1234 * run.rank if is_wrong else 1234
    sampler = DistributedSampler(range(24), run.data_size, run.data_rank, seed=seed)
    forward = averaged(model, run)
    return finish(forward(data()[list(islice(sampler, 2))]))


def noise_of_each_rank(model: Any, run: Run, is_wrong: bool) -> Tensor:
    """Noise is drawn by a generator that is seeded by the global rank, and so the ranks that share a sample corrupt
    it differently."""
    rank = run.rank if is_wrong and not run.is_reference else run.data_rank
    noise = torch.randn(2, 11, 4, generator=torch.Generator().manual_seed(77 + rank))
    forward = spread(model, run)
    return finish(forward(batch() + noise))


def _denoises(model: Any, run: Run, watched: Any, noise_seed: int, time_seed: int) -> None:
    """A loop of flow matching; the loss of a velocity."""
    noises, times = (torch.Generator().manual_seed(seed) for seed in (noise_seed, time_seed))
    wrapped, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        for _ in range(2):
            latents, time = torch.randn(4, 11, 4), torch.rand(4, generator=times)
            noise = torch.randn(4, 11, 4, generator=noises)
            out = wrapped(torch.lerp(latents, noise, time[:, None, None]), time)
            loss = (out - (noise - latents)).square().mean()
            watched.loss(loss)
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def one_timestep_for_all(model: Any, run: Run, is_wrong: bool, watched: Any) -> None:
    """All ranks draw the same timesteps, although each of them has samples of its own: a step sees as few timesteps
    as one rank has samples."""
    _denoises(model, run, watched, run.data_rank, 5 if is_wrong else 100 + run.data_rank)


def one_noise_for_all(model: Any, run: Run, is_wrong: bool, watched: Any) -> None:
    """Every rank is seeded alike when the program starts, and so all of them draw the same noise and timesteps for
    other samples in every step; the thread asks whether that is meant."""
    by = 0 if is_wrong else run.data_rank
    _denoises(model, run, watched, by, 100 + by)


class Loader:
    """Batches of 2 of 12 samples, shuffled by the epoch, from a batch on."""

    def __init__(self, epoch: int = 0, first: int = 0):
        self.epoch, self.first = epoch, first

    def __iter__(self) -> Iterator[list[int]]:
        order = list(shuffled(12, self.epoch))
        for start in range(2 * self.first, 12, 2):
            yield order[start : start + 2]
        self.epoch, self.first = self.epoch + 1, 0


def in_order(loader: Loader, number: int) -> list[list[int]]:
    """So many batches, epoch after epoch."""
    found: list[list[int]] = []
    while len(found) < number:
        found += loader
    return found[:number]


def goes_on(model: Any, run: Run, before: int, resumed: list[list[int]]) -> dict[str, Any]:
    """A run that is stopped after some batches, and goes on with others; one device is not stopped."""
    through = in_order(Loader(), before + len(resumed))
    order = through if run.is_reference else [*through[:before], *resumed]
    own = torch.randn(12, 11, 4)  # this data rank's samples
    return train(model, run, (own[numbers] for numbers in order))


def epoch_begun_anew(model: Any, run: Run, is_wrong: bool) -> dict[str, Any]:
    """A run that goes on in the middle of an epoch makes a loader that skips what was done, and this one counts
    epochs from 0: the rest of the epoch is dealt in the order of the first."""
    return goes_on(model, run, 8, in_order(Loader(epoch=0 if is_wrong else 1, first=2), 3))


def epoch_dealt_twice(model: Any, run: Run, is_wrong: bool) -> dict[str, Any]:
    """The loader that skips what was done finishes the epoch, and the one that the loop goes back to is not told of
    it: it deals the same epoch once more."""
    rest = in_order(Loader(epoch=1, first=2), 4)
    return goes_on(model, run, 8, [*rest, *in_order(Loader(epoch=1 if is_wrong else 2), 2)])


def epoch_left_out(model: Any, run: Run, is_wrong: bool) -> dict[str, Any]:
    """A state that is saved at the end of an epoch says that all of its batches are done, and a run that goes on
    takes them for those of the next one, which it leaves out."""
    done = 6  # batches of epoch 0, all of them
    return goes_on(model, run, done, in_order(Loader(epoch=2 if is_wrong else 1), 3))


def counted_from_the_last_stop(model: Any, run: Run, is_wrong: bool) -> dict[str, Any]:
    """A loader counts the batches since it was made, and saves that as its place: a run that is stopped a second time
    in an epoch goes on too early."""
    first_stop, second_stop = 3, 5
    place = second_stop - first_stop if is_wrong else second_stop
    return goes_on(model, run, second_stop, in_order(Loader(first=place), 1))


TWO_RANKS = (Plan(dp_replicate=2),)

BUGS = [
    Bug(
        "NVlabs/LongLive", 71, 2026, permutations_of_each_rank, "every rank has shuffled samples", "inputs",
        ("data",),
    ),
    Bug(
        "NVIDIA-NeMo/Automodel", 3162, 2026, noise_of_each_rank, "every rank's loss is a fair one", "inputs",
        ("sequence",), meshes=SEQUENCE, was_read=False,
    ),
    Bug(
        "hao-ai-lab/FastVideo", 885, 2025, one_timestep_for_all, "timesteps change from step to step",
        "repeated timestep", model_fn=Timed, tool="watch", meshes=TWO_RANKS,
    ),
    Bug(
        "Robbyant/lingbot-vla-v2", 41, 2026, one_noise_for_all, "noise changes from step to step", "repeated noise",
        model_fn=Timed, tool="watch", meshes=TWO_RANKS,
    ),
    Bug(
        "huggingface/accelerate", 4071, 2026, epoch_begun_anew, "a stop at the end of an epoch is right", "inputs",
        ("data",), tool="several steps",
    ),
    Bug(
        "huggingface/accelerate", 4233, 2026, epoch_dealt_twice, "the epoch that was stopped in is right", "inputs",
        ("data",), tool="several steps",
    ),
    Bug(
        "verl-project/verl", 7401, 2026, epoch_left_out, "the run ends without an error", "inputs",
        ("data",), tool="several steps",
    ),
    Bug(
        "KempnerInstitute/KempnerForge", 57, 2026, counted_from_the_last_stop, "the first stop is right", "inputs",
        ("data",), tool="several steps",
    ),
]  # fmt: skip
