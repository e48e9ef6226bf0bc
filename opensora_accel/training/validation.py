"""The loss of clips that no step trains, at fixed times and noise: how well a run learns, in numbers that compare.

The loss of a step says mostly which times were drawn: a velocity is easy to tell in the middle and hard at both ends.
Here every look has the same clips, noise and times, so that what changes is the model. Two clips at four times:

    t          0.125   0.375   0.625   0.875
    clip 0      1.31    0.52    0.44    0.95
    clip 1      1.29    0.58    0.40    0.93
    mean        1.30    0.55    0.42    0.94    their mean, 0.80, is the validation loss

Where latent frames have times of their own, a look is taken too at how a clip goes on: its first half is without noise,
as in a sample whose first frames are there, and the other half is at those times and counts. An image has no halves.

Captions are not dropped and times are not weighted. Data ranks share the clips, and a rank that has one fewer computes
one that does not count, because sharded weights are gathered by all ranks together.

Source: validation loss at even times follows what people prefer, SD3 (arXiv:2403.03206, section 5.3).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist

from opensora_accel.training.classes import arguments_of
from opensora_accel.training.configured import causal_block_size
from opensora_accel.training.data import ClipLoader
from opensora_accel.training.objective import Objective

logger = logging.getLogger(__name__)

CONTINUED = "validation/continued"


def fixed_times(time_range: tuple[float, float], count: int) -> list[float]:
    """The middles of so many equal parts of a range of times: of 0 to 1 in 4, 0.125, 0.375, 0.625 and 0.875."""
    first, last = time_range
    return [first + (last - first) * (number + 0.5) / count for number in range(count)]


@torch.no_grad()
def validation_losses(objective: Objective, loader: ClipLoader, times: Sequence[float]) -> dict[str, float]:
    """`validation/loss` and `validation/t=…` of each time, and with diffusion forcing `validation/continued`, the mean
    over these times of clips whose first half is there; the same on all ranks.

    The models are those of `objective` as they are: averaged weights and evaluation mode are the caller's.

    Communication: an all-reduce of one number for each time and three more.

    Raises:
        ValueError: on all ranks, where none of the clips can be read.
    """
    sums = torch.zeros(len(times) + 3, dtype=torch.float64, device=objective.device)
    block = causal_block_size(arguments_of(objective.model))
    for batch, counts in loader.held_out_batches():
        encoded = objective.encoders.encode(batch)
        found = torch.stack([objective.loss_at(encoded, time).double() for time in times])
        # Of whole blocks, as samples have them.
        num_clean = encoded.clean.size(2) // block // 2 * block
        continued = found.new_zeros(2)
        if objective.config.flow.is_forced:
            # Of an image too: another rank may have a clip, and sharded weights are gathered by all.
            of_times = [objective.loss_at(encoded, time, num_clean).double() for time in times]
            if num_clean:
                continued = torch.stack([torch.stack(of_times).mean(), found.new_ones(())])
        # A file that cannot be read is shown as black: nothing of it is added, and nothing that is not finite.
        if counts:
            sums += torch.cat([found, found.new_ones(1), continued])
    # Equal on all ranks of a sequence group, clips and their number alike.
    dist.all_reduce(sums)
    *losses, count, continued_loss, num_continued = sums.tolist()
    if not count:
        raise ValueError(
            "none of the files that validation.num_clips holds out can be read any more; repair them, and go on with "
            "--resume"
        )
    means = [loss / count for loss in losses]
    by_time = {f"validation/t={time:g}": mean for time, mean in zip(times, means, strict=True)}
    losses_of = {"validation/loss": sum(means) / len(means), **by_time}
    if num_continued:
        losses_of[CONTINUED] = continued_loss / num_continued
    return losses_of
