"""What `accelerate` does not know: which rank gets which batch under sequence parallelism, and when a step ends.

Example for P = 3 ranks that share each sample (ulysses=3): `accelerator.prepare` deals batches 0, 1 and 2 to ranks 0, 1
and 2, which then hold parts of three samples. Here the three ranks are one data rank, and all of them get batch 0.

accelerate is imported on use only. Everything else of it works on a sharded model as it is:
docs/integrations/accelerate.md.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from opensora_accel.parallel_states import get_data_parallel_group

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["data_parallel_dataloader", "end_steps_at_log", "gather_for_metrics"]


def data_parallel_dataloader(accelerator: Accelerator, dataloader: DataLoader) -> DataLoader:
    """The loader, prepared as by `accelerator.prepare`, but over data ranks: ranks that share a sample get the same.

    `accelerator.prepare(dataloader)` deals batches to all ranks, and the ranks of a sequence group would each hold
    a part of another sample, without any error. `prepare` leaves what this returns as it is.

    Shuffling, and what the loader's workers draw, are equal within a sequence group. What the ranks themselves draw
    (noise, timesteps, dropout) has to be as well, and so has what a sampler of your own draws: only one with a
    `generator` is seeded here.

    Args:
        accelerator: its DataLoaderConfiguration is kept. With `split_batches`, batches are divided by the number of
            data ranks.
        dataloader: a plain one; it gets generators, where it has none.

    Communication: broadcasts one seed, and the state of the sampler's generator, from rank 0 to all ranks.

    Raises:
        ValueError: accelerate would not average gradients over just the ranks of data × sequence, as it sees fewer,
            or tensor-parallel ones as well; or `dispatch_batches`, by which rank 0 deals to all ranks.
    """
    from accelerate.data_loader import prepare_data_loader

    if accelerator.dispatch_batches:
        raise ValueError(
            "dispatch_batches=True deals the batches of rank 0 to all ranks, also to those that share a sample; "
            "use dispatch_batches=False"
        )
    data, mixed = get_data_parallel_group(), get_data_parallel_group(get_mixed_dp_pg=True)
    num_ranks = 1 if data is None else data.size()
    rank = 0 if data is None else data.rank()
    num_seen, num_mixed = accelerator.num_processes, 1 if mixed is None else mixed.size()
    if num_seen < num_mixed:
        raise ValueError(
            f"accelerate sees {num_seen} of the {num_mixed} ranks, and would not average gradients over the rest; "
            "on CPUs it needs Accelerator(cpu=True)"
        )
    if num_seen > num_mixed:
        raise ValueError(
            f"accelerate averages gradients over all {num_seen} ranks, but data × sequence are {num_mixed}: "
            "tensor-parallel ranks hold different parameters; use tp=1"
        )
    seed = _agree_on_seeds(dataloader, rank)
    given = accelerator.dataloader_config.data_seed
    prepared: Any = prepare_data_loader(
        dataloader,
        accelerator.device,
        num_processes=num_ranks,
        process_index=rank,
        split_batches=accelerator.split_batches,
        put_on_device=accelerator.device_placement,
        rng_types=list(accelerator.rng_types),
        dispatch_batches=False,
        even_batches=accelerator.even_batches,
        use_seedable_sampler=accelerator.use_seedable_sampler,
        data_seed=seed if given is None else given,
        non_blocking=accelerator.non_blocking,
        use_stateful_dataloader=accelerator.use_stateful_dataloader,
    )
    # What accelerate sets on the loaders that it prepares: it must not deal these batches out once more.
    prepared._is_accelerate_prepared = True
    # Registers it, as prepare does, for save_state.
    return accelerator.prepare_data_loader(prepared)


def gather_for_metrics(accelerator: Accelerator, values: Any) -> Any:
    """The values of all samples, each once: `accelerator.gather_for_metrics` has every sample once per sequence rank.

    What the last batch of an epoch repeats, so that all data ranks have one, is left out, as there.

    Args:
        values: tensors [B, ...] of this data rank's samples, also in nested lists, tuples and dicts; B is the same on
            all ranks.

    Returns:
        Likewise, tensors [B × data ranks, ...]; fewer rows at the end of a loader of `data_parallel_dataloader`.

    Communication: an all-gather over all ranks.
    """
    from accelerate.utils import gather, recursively_apply

    data, num_seen = get_data_parallel_group(), accelerator.num_processes
    num_sequence_ranks = num_seen // (1 if data is None else data.size())
    state = accelerator.gradient_state
    end = state.remainder if state.end_of_dataloader and state.remainder > 0 else None

    def once(gathered: torch.Tensor) -> torch.Tensor:
        # Neighbouring ranks share a sample.
        return torch.cat(gathered.chunk(num_seen)[::num_sequence_ranks])[:end]

    return recursively_apply(once, gather(values))


def end_steps_at_log(accelerator: Accelerator, run: Any) -> None:
    """From here on each `accelerator.log` ends a step of `run` (`profiler.profile`), with the numbers logged.

    On every rank, as each has a record of its own. That is why this is no tracker of `log_with`: accelerate calls
    those on the main process alone.

    with profile(model, plan, "profile") as run:
        end_steps_at_log(accelerator, run)
        ...
        accelerator.log({"loss": loss}, step=step)
    """
    log = accelerator.log

    @functools.wraps(log)
    def log_and_end_step(values: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        run.step(
            **{name: value for name, value in values.items() if isinstance(value, (int, float, torch.Tensor))}
        )
        log(values, *args, **kwargs)

    accelerator.log = log_and_end_step


def _agree_on_seeds(dataloader: DataLoader, data_rank: int) -> int:
    """Gives all ranks one order of samples, and those that share a sample one seed of workers; returns rank 0's seed.

    accelerate itself synchronises a sampler only where there are several data ranks.
    """
    from accelerate.data_loader import get_sampler
    from accelerate.utils import broadcast_object_list, synchronize_rng_states

    (seed,) = broadcast_object_list([torch.initial_seed()])
    sampler = get_sampler(dataloader)
    if hasattr(sampler, "generator"):
        if sampler.generator is None:
            sampler.generator = torch.Generator().manual_seed(seed)
        synchronize_rng_states(["generator"], sampler.generator)
    if dataloader.generator is None:
        dataloader.generator = torch.Generator().manual_seed((seed + 1 + data_rank) % 2**63)
    return seed
