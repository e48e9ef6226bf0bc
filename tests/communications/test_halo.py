"""Rows of the neighbours: what a convolution over the whole would have seen, and gradients where the rows live."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from opensora_accel.communications import exchange_halo
from shardformer.modeling.halo import add_halo


def exchanged(size, reach, given):
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    whole = torch.arange(float(2 * size * 3)).view(2, size, 3)
    parts = whole.tensor_split(num_ranks, 1)
    sizes = tuple(part.size(1) for part in parts)
    mine = parts[rank].clone().requires_grad_()
    rows, before = exchange_halo(mine, dist.group.WORLD, 1, reach, splits=sizes if given else None)
    start, stop = sum(sizes[:rank]), sum(sizes[: rank + 1])
    low, high = max(start - reach, 0), min(stop + reach, size)
    if start == stop:
        low, high = start, start
    assert torch.equal(rows, whole[:, low:high]) and before == start - low

    # Each row's gradient counts the ranks that have it.
    rows.sum().backward()
    counts = torch.zeros(size)
    for other in range(num_ranks):
        first, last = sum(sizes[:other]), sum(sizes[: other + 1])
        if first < last:
            counts[max(first - reach, 0) : last + reach] += 1
    assert torch.equal(mine.grad, counts[start:stop].view(1, -1, 1).expand_as(mine))


@pytest.mark.parametrize(("size", "reach"), [(8, 1), (7, 2), (5, 3), (2, 1), (4, 9), (6, 0)])
@pytest.mark.parametrize("given", [True, False])
def test_rows_of_the_neighbours_come_and_their_gradients_go_back(ranks, size, reach, given):
    """Shares smaller than the reach, and ranks without rows, among them."""
    ranks(3, exchanged, size, reach, given)


def refused():
    with pytest.raises(ValueError, match="reach is a number of rows"):
        exchange_halo(torch.zeros(2, 3), dist.group.WORLD, 1, -1)
    module = nn.Conv1d(2, 2, 3)  # without padding
    add_halo(module, "conv", dist.group.WORLD, 2, 1, lambda: None)
    with pytest.raises(ValueError, match=r"conv made 2 rows of 4; .* must keep their number"):
        module(torch.zeros(1, 2, 3))


def test_a_convolution_that_changes_the_number_of_rows_is_refused(ranks):
    ranks(2, refused)
