"""Every public collective and attention takes tensors and gradients of any strides, and gives the same as without.

The gradient of a sum is one number expanded; a transpose or a slice of a larger tensor comes from anywhere. The same
values, laid out plainly, are the reference.
"""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from opensora_accel import attention, communications
from opensora_accel.communications import share_sizes
from tests.tiers import some

# Values are small whole numbers: a sum in another order is the same sum.
LAYOUTS = {
    "expanded": lambda t: t.flatten()[:1].sum().expand(t.shape),
    "expanded along one dim": lambda t: t.narrow(1, 0, min(1, t.size(1))).expand(t.shape) if t.size(1) else t,
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "every second": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "part of a larger one": lambda t: torch.nn.functional.pad(t, (3, 2, 1, 1))[..., 1:-1, 3:-2],
    "negated when read": lambda t: torch._neg_view(-t),
    "plain": lambda t: t.contiguous(),
}


def all_to_all_to_rows(x, sizes):
    return communications.all_to_all(x, None, 2, 1, splits=sizes)


def all_to_all_to_columns(x, sizes):
    return communications.all_to_all(x.transpose(1, 2), None, 1, 2, splits=sizes)


def all_to_all_packed(x, sizes):
    return communications.all_to_all_packed([x, 2 * x], None, 2, 1, splits=[sizes, sizes])


def copy_forward_reduce_backward(x, sizes):
    # Every rank has to have as many numbers.
    return communications.copy_forward_reduce_backward(x[:, : min(sizes)], None)


def reduce_forward_copy_backward(x, sizes):
    return communications.reduce_forward_copy_backward(x[:, : min(sizes)], None)


def ring_exchange(x, sizes):
    return communications.ring_exchange(x, None, dim=1, splits=sizes)


def exchange_halo(x, sizes):
    return communications.exchange_halo(x, None, 1, reach=2, splits=sizes)[0]


def split_forward_gather_backward(x, sizes):
    return communications.split_forward_gather_backward(x[:, : min(sizes)], None, 2, "down")


def reduce_scatter_forward_gather_backward(x, sizes):
    return communications.reduce_scatter_forward_gather_backward(x[:, : min(sizes)], None, 2)


def gather_forward_split_backward(x, sizes):
    return communications.gather_forward_split_backward(x, None, 1, "up", splits=sizes)


def gather_forward_reduce_scatter_backward(x, sizes):
    return communications.gather_forward_reduce_scatter_backward(x, None, 1, splits=sizes)


COLLECTIVES = [
    all_to_all_to_rows,
    all_to_all_to_columns,
    all_to_all_packed,
    copy_forward_reduce_backward,
    reduce_forward_copy_backward,
    ring_exchange,
    exchange_halo,
    split_forward_gather_backward,
    reduce_scatter_forward_gather_backward,
    gather_forward_split_backward,
    gather_forward_reduce_scatter_backward,
]


def whole_numbers(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).double()


def run(operation, inputs, layout_of_gradient):
    """Outputs and gradients of the inputs."""
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    outputs = operation(*inputs)
    outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
    seed = 7 + dist.get_rank()
    grads = [LAYOUTS[layout_of_gradient](whole_numbers(out.shape, seed)) for out in outputs]
    torch.autograd.backward(outputs, grads)
    return [*outputs, *(tensor.grad for tensor in inputs)]


def same_as_plain(operation, inputs, layout, layout_of_gradient):
    """Whether tensors of this layout give what the same values give that are laid out plainly."""
    laid_out = [LAYOUTS[layout](tensor) for tensor in inputs]
    plain = [tensor.resolve_neg().clone(memory_format=torch.contiguous_format) for tensor in laid_out]

    def with_plain_gradient(*tensors):
        outputs = operation(*tensors)
        return tuple(
            _Plain.apply(out) for out in ((outputs,) if isinstance(outputs, torch.Tensor) else outputs)
        )

    expected = run(with_plain_gradient, plain, layout_of_gradient)
    found = run(operation, laid_out, layout_of_gradient)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)


class _Plain(torch.autograd.Function):
    """The tensor; its gradient is laid out plainly."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.resolve_neg().clone(memory_format=torch.contiguous_format)


def check_collectives(batch, tokens, heads, layout, layout_of_gradient):
    sizes = share_sizes(tokens, dist.get_world_size())
    x = whole_numbers((batch, sizes[dist.get_rank()], heads, 2), dist.get_rank())
    for operation in COLLECTIVES:
        try:
            same_as_plain(lambda x, op=operation: op(x, sizes), [x], layout, layout_of_gradient)
        except Exception as error:
            error.add_note(f"{operation.__name__}, {layout}, gradient {layout_of_gradient}")
            raise


def heads_first(q, k, v):
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return attention.torch_attention(q, k, v, enable_gqa=q.size(1) != k.size(1))


def check_attention(batch, tokens, text, heads, kv_heads, layout, layout_of_gradient):
    world, rank = dist.get_world_size(), dist.get_rank()
    ring = init_device_mesh("cpu", (world, 1), mesh_dim_names=("ring", "ulysses"))
    sizes = share_sizes(tokens, world)
    head_dim = 4
    q, k, v = (
        whole_numbers((batch, sizes[rank], n, head_dim), n + i) / 4
        for i, n in enumerate((heads, kv_heads, kv_heads))
    )
    video = whole_numbers((batch, tokens, heads, head_dim), 1).split(sizes, 1)[rank] / 4
    of_text = whole_numbers((batch, text, heads, head_dim), 2) / 4
    bias = torch.zeros(1, 1, 1, tokens, dtype=torch.float64)
    known = {"splits": sizes, "kv_splits": sizes}
    group = dist.group.WORLD
    cases = {
        "local": (attention.local_attention, [q, k, v]),
        "torch": (heads_first, [q, k, v]),
        "ulysses": (lambda q, k, v: attention.ulysses_attention(q, k, v, group, **known), [q, k, v]),
        "ring": (lambda q, k, v: attention.ring_attention(q, k, v, group, **known), [q, k, v]),
        "usp": (lambda q, k, v: attention.usp_attention(q, k, v, ring, **known), [q, k, v]),
        "gathered": (lambda q, k, v: attention.gathered_attention(q, k, v, group, bias=bias), [q, k, v]),
        "joint": (
            lambda q, k, v, qt, kt, vt: attention.joint_attention(q, k, v, qt, kt, vt, ring),
            [video, video, video, of_text, of_text, of_text],
        ),
        "switch": (lambda x: attention.switch_sharded_dim(x, group, from_dim=1, to_dim=2), [q]),
        "linear": (lambda q, k, v: attention.linear_attention(q, k, v, group), [video, video, video]),
    }
    for name, (operation, inputs) in cases.items():
        try:
            same_as_plain(operation, inputs, layout, layout_of_gradient)
        except Exception as error:
            error.add_note(f"{name}, {layout}, gradient {layout_of_gradient}")
            raise


def the_simplest_loss():
    sizes = share_sizes(3, dist.get_world_size())
    x = torch.ones(1, sizes[dist.get_rank()], 5, 2, dtype=torch.float64, requires_grad=True)
    communications.all_to_all(x, dist.group.WORLD, 2, 1).view(-1).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_gradient_of_a_sum_goes_back_through_uneven_shares(ranks, num_ranks):
    ranks(num_ranks, the_simplest_loss)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", some([2, 3]))
def test_collectives_take_any_strides(ranks, num_ranks):
    """Both layouts at once, each one with each."""
    for layout in LAYOUTS:
        for of_gradient in LAYOUTS:
            ranks(num_ranks, check_collectives, 1, 7, 5, layout, of_gradient)


@pytest.mark.prove
@settings(max_examples=60)
@given(
    num_ranks=st.integers(1, 4),
    batch=st.integers(0, 2),
    tokens=st.integers(0, 9),
    heads=st.integers(0, 5),
    layout=st.sampled_from(sorted(LAYOUTS)),
    of_gradient=st.sampled_from(sorted(LAYOUTS)),
)
def test_collectives_take_any_strides_and_sizes(ranks, num_ranks, batch, tokens, heads, layout, of_gradient):
    ranks(num_ranks, check_collectives, batch, tokens, heads, layout, of_gradient)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_takes_any_strides(ranks, layout):
    for of_gradient in ("expanded", "transposed", "negated when read"):
        ranks(2, check_attention, 1, 7, 3, 4, 2, layout, of_gradient)
    ranks(2, check_attention, 1, 6, 3, 4, 2, layout, layout)  # even shares


@pytest.mark.prove
@settings(max_examples=60)
@given(
    num_ranks=st.integers(1, 3),
    batch=st.integers(0, 2),
    tokens=st.integers(1, 9),  # of fewer tokens than ranks some have none
    text=st.integers(0, 3),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 3), (5, 1)]),
    layout=st.sampled_from(sorted(LAYOUTS)),
    of_gradient=st.sampled_from(sorted(LAYOUTS)),
)
def test_attention_takes_any_strides_and_sizes(
    ranks, num_ranks, batch, tokens, text, heads, layout, of_gradient
):
    ranks(num_ranks, check_attention, batch, tokens, text, *heads, layout, of_gradient)
