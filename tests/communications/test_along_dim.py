"""Split, gather, reduce-scatter and the copy/reduce pair against one process, in both directions."""

import pytest
import torch
import torch.distributed as dist

from opensora_accel import communications as comm
from tests.communications.test_alltoall import full_tensor
from tests.gradcheck import distributed_gradcheck
from tests.tiers import some

EXPLICIT = {2: (5, 2), 3: (1, 6, 0), 4: (0, 3, 0, 4)}
"""Shares of 7 that no rule would give, ranks with none included."""


def values_and_gradients(shape, dim, splits):
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    sizes = splits or comm.share_sizes(shape[dim], num_ranks)
    full, weight = full_tensor(shape), full_tensor(shape, seed=1)
    mine, my_weight = full.split(sizes, dim)[rank], weight.split(sizes, dim)[rank]

    for scale, factor in (("up", num_ranks), ("down", 1 / num_ranks), (None, 1), (1.0, 1), (2.5, 2.5)):
        x = full.clone().requires_grad_()
        out = comm.split_forward_gather_backward(x, None, dim, scale, splits=splits)
        assert torch.equal(out, mine)
        (out * my_weight).sum().backward()
        assert torch.allclose(x.grad, weight * factor, rtol=1e-15)

        x = mine.clone().requires_grad_()
        out = comm.gather_forward_split_backward(x, None, dim, scale, splits=splits)
        assert torch.equal(out, full)
        (out * weight).sum().backward()
        assert torch.allclose(x.grad, my_weight * factor, rtol=1e-15)

    # Gather and reduce-scatter: every rank weighs the whole by rank + 1, so the sum is known.
    total = num_ranks * (num_ranks + 1) / 2
    x = mine.clone().requires_grad_()
    out = comm.gather_forward_reduce_scatter_backward(x, None, dim, splits=splits)
    assert torch.equal(out, full)
    (out * weight * (rank + 1)).sum().backward()
    assert torch.allclose(x.grad, my_weight * total, rtol=1e-14)

    x = (full * (rank + 1)).requires_grad_()
    out = comm.reduce_scatter_forward_gather_backward(x, None, dim, splits=splits)
    assert torch.allclose(out, mine * total, rtol=1e-14)
    (out * my_weight).sum().backward()
    assert torch.equal(x.grad, weight)


@pytest.mark.parametrize("num_ranks", some([1, 2, 3, 4], 1, 3))
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
@pytest.mark.parametrize("size", [12, 7, 2])
def test_split_and_gather_along_every_dim(ranks, num_ranks, dim, size):
    shape = [2, 3, 2]
    shape[dim] = size
    ranks(num_ranks, values_and_gradients, tuple(shape), dim, None)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_split_and_gather_with_explicit_shares(ranks, num_ranks):
    ranks(num_ranks, values_and_gradients, (2, 7, 3), 1, EXPLICIT[num_ranks])


def small_tensor(dim, extra):
    """2 × 2 × 2, but as many rows as ranks along `dim`, plus `extra` that make it uneven."""
    shape = [2, 2, 2]
    shape[dim] = dist.get_world_size() + extra
    return full_tensor(tuple(shape))


def check_gradients(name, dim, extra):
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    full = small_tensor(dim, extra)
    operation = getattr(comm, name)
    local = full if name.startswith(("split", "reduce_scatter")) else full.tensor_split(num_ranks, dim)[rank]
    return distributed_gradcheck(lambda x: operation(x, None, dim), local)


@pytest.mark.parametrize("num_ranks", some([3, 2, 4]))
@pytest.mark.parametrize("extra", [0, 1], ids=["even", "uneven"])
@pytest.mark.parametrize("dim", some([1, 0, 2]))
@pytest.mark.parametrize(
    "name",
    [
        "gather_forward_reduce_scatter_backward",
        "reduce_scatter_forward_gather_backward",
    ],
)
def test_gradient_is_numerical_gradient(ranks, name, num_ranks, extra, dim):
    assert max(ranks(num_ranks, check_gradients, name, dim, extra)) < 1e-9


def check_split_gather_gradients(dim, extra):
    """Into a sequence-parallel region and out again ("down", "up") has the gradient of the region alone."""

    def through(x):
        share = comm.split_forward_gather_backward(x, None, dim, "down")
        return comm.gather_forward_split_backward(torch.sin(share), None, dim, "up")

    return torch.autograd.gradcheck(through, small_tensor(dim, extra).requires_grad_(), eps=1e-5, atol=1e-8)


@pytest.mark.parametrize("num_ranks", some([3, 2, 4]))
@pytest.mark.parametrize("extra", [0, 1], ids=["even", "uneven"])
@pytest.mark.parametrize("dim", some([1, 0, 2]))
def test_split_then_gather_passes_gradcheck(ranks, num_ranks, extra, dim):
    assert all(ranks(num_ranks, check_split_gather_gradients, dim, extra))


def check_copy_reduce():
    full = full_tensor((3, 4))
    copied = distributed_gradcheck(
        lambda x: comm.reduce_forward_copy_backward(torch.sin(x), None) / dist.get_world_size(), full
    )
    x = full.clone().requires_grad_()
    (comm.copy_forward_reduce_backward(x, None) * (dist.get_rank() + 1)).sum().backward()
    num_ranks = dist.get_world_size()
    assert torch.equal(x.grad, torch.full_like(full, num_ranks * (num_ranks + 1) / 2))
    y = comm.reduce_forward_copy_backward(full, None)
    assert torch.equal(full, full_tensor((3, 4))), "the input was reduced in place"
    assert torch.allclose(y, full * num_ranks)
    return copied


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_copy_and_reduce(ranks, num_ranks):
    ranks(num_ranks, check_copy_reduce)


def split_is_a_copy():
    x = torch.zeros(1, 8, 4)
    out = comm.split_forward_gather_backward(x, None, 1)
    return out.untyped_storage().nbytes() == out.numel() * out.element_size()


def test_split_does_not_keep_the_whole_alive(ranks):
    assert ranks(2, split_is_a_copy) == [True, True]


def bad_arguments():
    x, found = torch.randn(2, 6, 2), []
    for call in (
        lambda: comm.split_forward_gather_backward(x, None, 3),
        lambda: comm.split_forward_gather_backward(x, None, 1, "sideways"),
        lambda: comm.split_forward_gather_backward(x, None, 1, True),
        lambda: comm.split_forward_gather_backward(x, None, 1, splits=(4, 4)),
        lambda: comm.gather_forward_split_backward(x, None, 1, splits=(5, 5)),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        found.append(str(caught.value))
    return found


def test_bad_arguments_are_refused(ranks):
    expected = [
        "out of range",
        '"up", "down"',
        "got True",
        "add up to 8, but dim 1 has size 6",
        "of 5 in dim 1",
    ]
    for parts, message in zip(expected, ranks(2, bad_arguments)[0], strict=True):
        assert parts in message


def mismatched_gather():
    rank = dist.get_rank()
    with pytest.raises(ValueError) as caught:
        comm.gather_forward_split_backward(torch.randn(2, 3 + rank, 4 + rank), None, 1)
    return str(caught.value)


def test_debug_mode_compares_every_dim_but_the_gathered_one(ranks):
    (message, *_) = ranks(2, mismatched_gather, env={"OPENSORA_ACCEL_DEBUG": "1"})
    assert "dim 1 may differ" in message and "(2, 3, 4)" in message and "(2, 4, 5)" in message
