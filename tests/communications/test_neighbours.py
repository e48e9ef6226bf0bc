"""Ring exchange: what arrives, from whom, and where its gradient goes."""

import pytest
import torch
import torch.distributed as dist

from opensora_accel import communications as comm
from tests.communications.test_alltoall import full_tensor
from tests.gradcheck import distributed_gradcheck
from tests.tiers import each_once, some


def exchanged(shift, uneven):
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    full = full_tensor((2, 2 * num_ranks + uneven, 3))
    pieces = full.tensor_split(num_ranks, 1)
    dim = 1 if uneven else None
    local = pieces[rank].clone().requires_grad_()
    out = comm.ring_exchange(local, None, shift=shift, dim=dim)
    assert torch.equal(out, pieces[(rank - shift) % num_ranks])
    (out * (rank + 1)).sum().backward()
    assert torch.equal(local.grad, torch.full_like(local, (rank + shift) % num_ranks + 1))
    if uneven:
        sizes = tuple(piece.size(1) for piece in pieces)
        assert torch.equal(comm.ring_exchange(local, None, shift=shift, dim=1, splits=sizes), out)
    return distributed_gradcheck(lambda x: comm.ring_exchange(x, None, shift=shift, dim=dim), pieces[rank])


@pytest.mark.parametrize("num_ranks", some([1, 2, 3, 4], 1, 3))
@pytest.mark.parametrize(("shift", "uneven"), each_once([1, -1, 2], [1, 0]))
def test_ring_exchange_and_its_gradient(ranks, num_ranks, shift, uneven):
    assert max(ranks(num_ranks, exchanged, shift, uneven)) < 1e-9


def bad_arguments():
    with pytest.raises(ValueError, match="pass dim="):
        comm.ring_exchange(torch.ones(2), None, splits=(1, 1))
    with pytest.raises(ValueError, match="at least one dim"):
        comm.ring_exchange(torch.ones(()), None)


def test_bad_arguments_are_refused(ranks):
    ranks(2, bad_arguments)


def mismatched():
    with pytest.raises(ValueError) as caught:
        comm.ring_exchange(torch.ones(2 + dist.get_rank()), None)
    return str(caught.value)


def test_debug_mode_finds_a_mismatch(ranks):
    assert "(2,)" in ranks(2, mismatched, env={"OPENSORA_ACCEL_DEBUG": "1"})[0]
