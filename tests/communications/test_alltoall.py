"""All-to-all against tensor_split and cat on one process: values, gradients, every dim, any sizes."""

import itertools

import pytest
import torch
import torch.distributed as dist

from opensora_accel import communications as comm
from tests.gradcheck import distributed_gradcheck
from tests.tiers import some

SIZES = {"even": (4, 12, 24, 12), "uneven": (5, 7, 13, 3), "fewer than ranks": (2, 3, 1, 2)}


def full_tensor(shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def every_dim(shape, dtype):
    """Over every ordered pair of dims, with sizes exchanged and with sizes given: exact in both directions."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    full, weight = full_tensor(shape, dtype), full_tensor(shape, dtype, seed=1)
    for scatter_dim, gather_dim in itertools.permutations(range(len(shape)), 2):
        local = full.tensor_split(num_ranks, gather_dim)[rank].clone().requires_grad_()
        splits = comm.share_sizes(shape[gather_dim], num_ranks)
        out = comm.all_to_all(local, dist.group.WORLD, scatter_dim, gather_dim)
        assert torch.equal(out, full.tensor_split(num_ranks, scatter_dim)[rank])
        assert out.is_contiguous()  # Open-Sora's own path views it as other shapes
        (out * weight.tensor_split(num_ranks, scatter_dim)[rank]).sum().backward()
        assert torch.equal(local.grad, weight.tensor_split(num_ranks, gather_dim)[rank])
        negative = comm.all_to_all(local, None, scatter_dim - 4, gather_dim - 4, splits=splits)
        assert torch.equal(negative, out)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_all_to_all_moves_every_dim(ranks, num_ranks, sizes, dtype):
    ranks(num_ranks, every_dim, SIZES[sizes], dtype)


def check_gradients(shape):
    rank, num_ranks = dist.get_rank(), dist.get_world_size()

    def error(scatter_dim, gather_dim):
        local = full_tensor(shape).tensor_split(num_ranks, gather_dim)[rank]
        return distributed_gradcheck(lambda x: comm.all_to_all(x, None, scatter_dim, gather_dim), local)

    return max(error(*dims) for dims in itertools.permutations(range(len(shape)), 2))


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", some([3, 2, 4]))
@pytest.mark.parametrize("shape", some([(3, 5, 1), (4, 2, 4)], (3, 5, 1)))
def test_all_to_all_gradient_is_numerical_gradient(ranks, num_ranks, shape):
    assert max(ranks(num_ranks, check_gradients, shape)) < 1e-9


def packed(shapes, scatter_dim, gather_dim):
    """Tensors of different sizes in one collective, against one all-to-all each."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    fulls = [full_tensor(shape, seed=seed) for seed, shape in enumerate(shapes)]
    locals_ = [f.tensor_split(num_ranks, gather_dim)[rank].clone().requires_grad_() for f in fulls]
    outs = comm.all_to_all_packed(locals_, None, scatter_dim, gather_dim)
    for out, full in zip(outs, fulls, strict=True):
        assert torch.equal(out, full.tensor_split(num_ranks, scatter_dim)[rank])
    loss = sum((out * out).sum() for out in outs)
    for factor in (2, 4):  # backward through one graph twice adds up
        loss.backward(retain_graph=True)
        for local, full in zip(locals_, fulls, strict=True):
            assert torch.equal(local.grad, factor * full.tensor_split(num_ranks, gather_dim)[rank])
    # Outputs of one buffer may still be changed in place, as attention's rotary embedding may do.
    if num_ranks > 1:
        outs[0].mul_(2)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "shapes",
    [
        [(2, 7, 5, 3)] * 3,
        [(1, 7, 5, 3), (1, 4, 5, 3), (1, 4, 5, 3)],
        [(2, 7, 6, 3), (2, 4, 3, 5), (2, 7, 1, 2), (2, 1, 2, 2)],
    ],
    ids=["self", "cross", "every size differs"],
)
@pytest.mark.parametrize("dims", [(2, 1), (1, 2), (0, 3)])
def test_packed_all_to_all_equals_separate_ones(ranks, num_ranks, shapes, dims):
    ranks(num_ranks, packed, shapes, *dims)


def second_derivative():
    x = full_tensor((1, 4, 4, 2)).tensor_split(2, 1)[dist.get_rank()].clone().requires_grad_()
    (grad,) = torch.autograd.grad(comm.all_to_all(x**3, None).sum(), x, create_graph=True)
    grad.sum().backward()
    return torch.allclose(x.grad, 6 * x, rtol=1e-14)


def test_all_to_all_has_a_second_derivative(ranks):
    assert all(ranks(2, second_derivative))


def pack_what_has_not_the_same_dims():
    tensors = [torch.zeros(1, 4, 4, 8), torch.zeros(4, 4, 8)]
    with pytest.raises(ValueError, match=r"count from the end, and the tensors have \[4, 3\] dims"):
        comm.all_to_all_packed(tensors, None, -2, -3)


def test_dims_from_the_end_are_refused_where_each_tensor_has_others(ranks):
    ranks(2, pack_what_has_not_the_same_dims)


def collectives_of_one_call():
    calls = []
    original = dist.all_to_all_single
    dist.all_to_all_single = lambda *args, **kwargs: calls.append(args) or original(*args, **kwargs)
    try:
        tensors = [torch.randn(1, 6, 4, 8) for _ in range(3)]
        comm.all_to_all_packed(tensors, None, splits=[(6, 6)] * 3)
    finally:
        dist.all_to_all_single = original
    return [args[1].numel() for args in calls]


def test_packed_tensors_take_one_collective_of_the_input_size(ranks):
    assert ranks(2, collectives_of_one_call) == [[3 * 6 * 4 * 8]] * 2


def sizes_of_two_layouts():
    """Rank 0 of 2 holds 3 tokens of 6 and then 3 of 5: a cache keyed by its local size would be wrong."""
    rank = dist.get_rank()
    for total in (6, 5, 6):
        full = full_tensor((1, total, 4, 2))
        out = comm.all_to_all(full.tensor_split(2, 1)[rank], None)
        assert torch.equal(out, full.tensor_split(2, 2)[rank])


def test_sizes_follow_the_layout_not_the_local_size(ranks):
    ranks(2, sizes_of_two_layouts)


def messages_of(calls):
    found = []
    for arguments, keywords in calls:
        with pytest.raises(ValueError) as caught:
            comm.all_to_all(torch.randn(2, 3, 4, 5), *arguments, **keywords)
        found.append(str(caught.value))
    return found


def test_bad_arguments_are_refused_before_any_collective(ranks):
    calls = [
        ((None, 2, 2), {}),
        ((None, 4, 1), {}),
        ((None, 2, -5), {}),
        ((None, 2, 1), {"splits": (3, 3, 3)}),
        ((None, 2, 1), {"splits": (2, 2)}),
        ((None, 2, 1), {"splits": (7, -1)}),
        ((dist.GroupMember.NON_GROUP_MEMBER, 2, 1), {}),
    ]
    expected = [
        "must differ",
        "scatter_dim=4 is out of range for a tensor of 4 dims",
        "gather_dim=-5 is out of range",
        "has 3 entries, but the group has 2 ranks",
        "a size of 2 in dim 1, but its tensor has 3",
        "negative",
        "not a member",
    ]
    for messages in ranks(2, messages_of, calls):
        for message, part in zip(messages, expected, strict=True):
            assert part in message


def test_without_distributed_the_remedy_is_named():
    with pytest.raises(ValueError, match=r"init_parallel\(plan\)"):
        comm.all_to_all(torch.randn(2, 3, 4, 5), None)


def disagreeing(what):
    rank = dist.get_rank()
    shape = (2, 3, 4 + (rank == 1 and what == "shape"), 5)
    dtype = torch.float64 if rank == 1 and what == "dtype" else torch.float32
    dims = (2, 3) if rank == 1 and what == "dims" else (2, 1)
    with pytest.raises(ValueError) as caught:
        comm.all_to_all(torch.randn(shape, dtype=dtype), None, *dims)
    return str(caught.value)


def disagreeing_pair():
    """Ranks 2 and 3 of 4 have a group, in which they are the ranks 0 and 1."""
    group = dist.new_group([2, 3])
    if dist.get_rank() < 2:
        return ""
    with pytest.raises(ValueError) as caught:
        comm.all_to_all(torch.randn(2, 4, 4, dist.get_rank()), group, 2, 1)
    return str(caught.value)


def test_ranks_are_counted_over_the_whole_job(ranks):
    _, _, *messages = ranks(4, disagreeing_pair, env={"OPENSORA_ACCEL_DEBUG": "1"})
    assert all("on rank 2 and " in message and message.endswith("on rank 3") for message in messages), (
        messages
    )


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ("shape", ["rank 1", "(2, 3, 4, 5)", "(2, 3, 5, 5)"]),
        ("dtype", ["rank 1", "torch.float32", "torch.float64"]),
        ("dims", ["rank 1", "gather_dim=1", "gather_dim=3"]),
    ],
)
def test_debug_mode_names_the_rank_and_both_shapes(ranks, what, parts):
    messages = ranks(3, disagreeing, what, env={"OPENSORA_ACCEL_DEBUG": "1"})
    assert len(set(messages)) == 1
    assert all(part in messages[0] for part in parts)
