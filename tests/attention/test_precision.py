"""fp32 and bf16: no worse than one device's own kernel, by a factor that is derived, on 2 to 4 ranks."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from opensora_accel.attention import (
    joint_attention,
    local_attention,
    ring_attention,
    ulysses_attention,
    usp_attention,
)
from tests.attention.reference import full_attention, random_inputs, weights_like
from tests.tiers import PROVE, each_once, some

FACTOR = 1.2
"""Of the mean error of one call against fp64. Blocks are merged in fp32, so the output is rounded once, like that of
the call; gradients of keys are rounded once too, after they were added in fp32. 0.2 is the spread between samples."""


def errors_of(found, exact):
    return [(a.double() - b).abs().mean().item() for a, b in zip(found, exact, strict=True)]


def run(attention, inputs, weight, dtype):
    inputs = [tensor.detach().to(dtype).clone().requires_grad_() for tensor in inputs]
    out = attention(*inputs)
    (out * weight.to(dtype)).sum().backward()
    return [out.detach(), *(tensor.grad for tensor in inputs)]


def gathered(tensors):
    """Whole tensors from every rank's share; the same on all ranks."""
    whole = []
    for tensor in tensors:
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, tensor)
        whole.append(torch.cat(parts, 1))
    return whole


def parallel(name):
    num_ranks = dist.get_world_size()
    if name == "usp":
        mesh = init_device_mesh("cpu", (2, num_ranks // 2), mesh_dim_names=("ring", "ulysses"))
        return lambda q, k, v: usp_attention(q, k, v, mesh)
    function = {"ring": ring_attention, "ulysses": ulysses_attention}[name]
    return lambda q, k, v: function(q, k, v, dist.group.WORLD)


def compared(name, heads, dtype):
    """Mean errors of output and gradients: one call on one device, and the parallel attention."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    *inputs, _ = random_inputs(509, 509, *heads, False, head_dim=32)
    inputs = [tensor.to(dtype) for tensor in inputs]
    weight = weights_like(inputs[0].double()).to(dtype)
    exact = run(full_attention, inputs, weight, torch.float64)
    single = run(local_attention, inputs, weight, dtype)
    mine = [tensor.tensor_split(num_ranks, 1)[rank] for tensor in inputs]
    own_weight = weight.tensor_split(num_ranks, 1)[rank]
    found = gathered(run(parallel(name), mine, own_weight, dtype))
    return errors_of(single, exact), errors_of(found, exact)


@pytest.mark.parametrize("heads", some([(4, 2), (4, 4)]))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("name", "num_ranks"), [("ring", 2), pytest.param("ring", 4, marks=PROVE), ("ulysses", 3), ("usp", 4)]
)
def test_error_within_that_of_a_single_call(ranks, name, num_ranks, heads, dtype):
    single, found = ranks(num_ranks, compared, name, heads, dtype)[0]
    for one, parallel_error, tensor in zip(single, found, ("out", "q", "k", "v"), strict=True):
        assert parallel_error <= FACTOR * one, f"{tensor}: {parallel_error:.2e} against {one:.2e}"


def joint_compared(num_ranks_of_ring, dtype):
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    shape = (num_ranks_of_ring, num_ranks // num_ranks_of_ring)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ring", "ulysses"))
    *video, _ = random_inputs(400, 400, 4, 4, False, head_dim=32)
    *text, _ = random_inputs(77, 77, 4, 4, False, head_dim=32, seed=3)
    video, text = ([t.to(dtype) for t in ts] for ts in (video, text))
    both = [torch.cat(pair, 1) for pair in zip(text, video, strict=True)]
    exact = full_attention(*(t.double() for t in both))
    mine = [tensor.tensor_split(num_ranks, 1)[rank] for tensor in video]
    out, text_out = joint_attention(*mine, *text, mesh)
    found = torch.cat([text_out, *gathered([out])], 1)
    return errors_of([local_attention(*both)], [exact]) + errors_of([found], [exact])


@pytest.mark.parametrize("ring", [1, 2])
def test_joint_error_within_that_of_a_single_call(ranks, ring):
    for one, found in ranks(2, joint_compared, ring, torch.bfloat16):
        assert found <= FACTOR * one


def under_autocast(name, heads, value_dim):
    """fp32 inputs under autocast: dtype, mean errors of one call and of ours."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    *inputs, _ = random_inputs(33, 33, *heads, False, head_dim=32)
    inputs[2] = inputs[2][..., :value_dim]
    weight = weights_like(inputs[2].expand(-1, -1, heads[0], -1) if heads[1] == 1 else inputs[2])
    exact = run(full_attention, inputs, weight, torch.float64)
    inputs = [tensor.float() for tensor in inputs]
    with torch.autocast("cpu", torch.bfloat16):
        single = run(local_attention, inputs, weight, torch.float32)
        mine = [tensor.tensor_split(num_ranks, 1)[rank] for tensor in inputs]
        own_weight = weight.tensor_split(num_ranks, 1)[rank]
        parts = run(parallel(name), mine, own_weight, torch.float32)
    found = gathered(parts)
    dtypes = [tensor.dtype for tensor in parts] == [tensor.dtype for tensor in single]
    return dtypes, errors_of(single, exact), errors_of(found, exact)


@pytest.mark.parametrize(("heads", "value_dim"), each_once([(4, 4), (2, 2)], [32, 16]))
@pytest.mark.parametrize("name", ["ring", "ulysses", "usp"])
def test_autocast_is_that_of_one_device_on_every_rank(ranks, name, heads, value_dim):
    """Also on a rank that has no heads, and for the kernel that is written out (values narrower than keys)."""
    for same_dtypes, single, found in ranks(4, under_autocast, name, heads, value_dim):
        assert same_dtypes
        for one, parallel_error, tensor in zip(single, found, ("out", "q", "k", "v"), strict=True):
            assert parallel_error <= FACTOR * one, f"{tensor}: {parallel_error:.2e} against {one:.2e}"
