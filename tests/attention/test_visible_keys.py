"""Key masks on a GPU by flash over the visible keys alone, against a stand-in that reads memory as the kernel does."""

import math
import types
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.device_mesh import init_device_mesh

from opensora_accel.attention import blocks, joint_attention, local, local_attention, ring_attention
from opensora_accel.attention.blocks import attend, attend_backward
from opensora_accel.attention.kernels import Scores
from opensora_accel.attention.kernels.visible import VisibleKeysKernel
from opensora_accel.checkpoint import checkpoint_blocks
from tests.attention.reference import random_inputs, weights_like
from tests.attention.test_kernels import PLAIN, SCALE, AtenStandIns, as_read_raw, expected

KERNEL = VisibleKeysKernel()


class VarlenStandIn:
    """`aten::_flash_attention_forward` and `_backward` with cumulative lengths, in plain maths.

    Operands have the layout that mha_varlen_fwd and mha_varlen_bwd (flash_api.cpp) ask for, log-sum-exps [H, rows]
    are read raw, and what the kernel does not reach is NaN instead of whatever lay there.
    """

    def __init__(self, monkeypatch):
        self.num_calls = 0
        for suffix in ("_forward", "_backward"):
            operation = f"_flash_attention{suffix}"
            schema = getattr(torch.ops.aten, operation).default._schema
            function = getattr(self, suffix[1:])
            monkeypatch.setattr(torch.ops.aten, operation, AtenStandIns.bound(schema, operation, function))

    @staticmethod
    def samples(given):
        """Rows of queries and rows of keys, sample by sample."""
        ends = []
        for name in ("q", "k"):
            starts, longest = given[f"cum_seq_{name}"], given[f"max_{name}"]
            assert starts.dtype == torch.int32 and starts.is_contiguous() and isinstance(longest, int)
            assert bool((starts.diff() <= longest).all()) and starts[0] == 0
            ends.append(starts.tolist())
        assert len(ends[0]) == len(ends[1]) and ends[0][-1] == given["query"].size(0)
        assert ends[1][-1] <= given["key"].size(0)
        return [
            tuple(slice(start, end) for start, end in pair) for pair in zip(*map(pairwise, ends), strict=True)
        ]

    def forward(self, _name, given):
        self.num_calls += 1
        q, k, v = given["query"], given["key"], given["value"]
        assert q.dim() == 3 and given["is_causal"] is given["return_debug_mask"] is False
        out, lse = torch.full_like(q, math.nan), q.new_full((q.size(1), q.size(0)), math.nan)
        for rows, keys in self.samples(given):
            if keys.start == keys.stop:
                out[rows], lse[:, rows] = 0, math.inf  # as the kernel writes them
                continue
            part = PLAIN.forward(q[None, rows], k[None, keys], v[None, keys], Scores(given["scale"]))
            out[rows], lse[:, rows] = part[0][0], part[1][0]
        return out, lse, None, None, None

    def backward(self, _name, given):
        grad, q, k, v, out = (given[n] for n in ("grad_out", "query", "key", "value", "out"))
        assert given["logsumexp"].shape == (q.size(1), q.size(0)) and given["dropout_p"] == 0.0
        lse = as_read_raw(given["logsumexp"])
        grads = torch.zeros_like(q), torch.full_like(k, math.nan), torch.full_like(v, math.nan)
        for rows, keys in self.samples(given):
            if keys.start < keys.stop:
                part = PLAIN.backward(
                    *(grad[None, rows], q[None, rows], k[None, keys], v[None, keys], out[None, rows]),
                    *(lse[None, :, rows], Scores(given["scale"])),
                )
                grads[0][rows], grads[1][keys], grads[2][keys] = (tensor[0] for tensor in part)
        return grads


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(blocks, "choose_kernel", lambda _problem: types.SimpleNamespace(kernel=KERNEL))
    return VarlenStandIn(monkeypatch)


def masks(num_keys):
    some = torch.rand(3, num_keys, generator=torch.Generator().manual_seed(3)) > 0.5
    some[1] = False
    padded = torch.arange(num_keys) < torch.tensor([[num_keys - 3], [1], [num_keys]])
    everything = torch.ones(3, num_keys, dtype=torch.bool)
    return {"holes": some, "padding": padded, "all": everything, "none": ~everything}


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("name", ["holes", "padding", "all", "none"])
@pytest.mark.parametrize("batch", [3, 1])
def test_visible_keys_alone_give_masked_attention(stand_in, batch, name, heads):
    inputs = random_inputs(5, 9, *heads, False)[:3]
    q, k, v = (torch.cat([tensor, tensor[:1] + 1])[:batch] for tensor in inputs)
    mask = masks(9)[name][:batch]
    # A part of a wider tensor, as the ring hands them out: neither rows nor log-sum-exps lie in one piece.
    q = torch.cat([q, q], 1)[:, :5]
    scores, grad = Scores(SCALE, mask), torch.ones(1, dtype=q.dtype).expand(q.shape)
    out, lse = attend(q, k, v, scores)
    wanted, *wanted_grads = expected(q, k, v, mask, grad)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
    plain_lse = PLAIN.forward(q, k, v, scores)[1]
    torch.testing.assert_close(lse, plain_lse, rtol=0, atol=1e-12)
    lse = torch.cat([lse.masked_fill(lse == -math.inf, 0), lse], 2)[:, :, :5]
    grads = attend_backward(grad, q, k, v, out, lse, scores)
    for found, gradient in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(found, gradient, rtol=0, atol=1e-12)
    assert stand_in.num_calls == 1


def masked_ring():
    """The error of a ring with a mask that attends by the kernel, and how often it does."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    q, k, v, mask = random_inputs(7, 11, 6, 2, True)
    grad = weights_like(q)
    wanted = expected(q, k, v, mask, grad)
    q, k, v, mask, grad = (t.tensor_split(num_ranks, 1)[rank].clone() for t in (q, k, v, mask, grad))
    with pytest.MonkeyPatch.context() as patch:
        stand_in = VarlenStandIn(patch)
        patch.setattr(blocks, "choose_kernel", lambda _problem: types.SimpleNamespace(kernel=KERNEL))
        own = [t.requires_grad_() for t in (q, k, v)]
        out = ring_attention(*own, dist.group.WORLD, mask=mask)
        out.backward(grad)
    own_wanted = [t.tensor_split(num_ranks, 1)[rank] for t in wanted]
    found = [out.detach(), *(t.grad for t in own)]
    errors = [float((f - w).abs().max()) for f, w in zip(found, own_wanted, strict=True)]
    return max(errors), stand_in.num_calls


def test_a_ring_with_a_mask(ranks):
    for error, num_calls in ranks(3, masked_ring):
        assert error < 1e-12 and num_calls == 3


@pytest.mark.parametrize("deterministic", [False, True])
def test_nothing_is_read_from_the_device(monkeypatch, deterministic):
    """On fake tensors, which have no values: a length that depends on the mask would raise."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    torch.use_deterministic_algorithms(deterministic)
    try:
        with FakeTensorMode():
            q, k, v = (torch.empty(2, n, 4, 8, device="meta", dtype=torch.bfloat16) for n in (5, 9, 9))
            scores = Scores(SCALE, torch.empty(2, 9, dtype=torch.bool, device="meta"))
            out, lse = KERNEL.forward(q, k, v, scores)
            assert out.shape == q.shape and lse.shape == (2, 4, 5)
            grads = KERNEL.backward(out, q, k, v, out, lse, scores)
            assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Masked attention takes the way that it takes on a GPU, and the kernel a stand-in."""
    monkeypatch.setattr(local, "_leaves_hidden_keys_out", lambda _q, _v: True)
    monkeypatch.setattr(blocks, "choose_kernel", lambda _problem: types.SimpleNamespace(kernel=KERNEL))
    return VarlenStandIn(monkeypatch)


def masked(q, k, v, mask, grad, function=local_attention):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (q, k, v)]
    out = function(*leaves, mask=mask)
    out.backward(grad)
    return [out.detach(), *(tensor.grad for tensor in leaves)]


def test_masked_attention_on_one_gpu_leaves_hidden_keys_out(as_on_a_gpu):
    """Output and gradients; the second sample sees nothing."""
    q, k, v, mask = random_inputs(7, 11, 6, 2, True)
    grad = weights_like(q)
    for found, full in zip(masked(q, k, v, mask, grad), expected(q, k, v, mask, grad), strict=True):
        torch.testing.assert_close(found, full, rtol=0, atol=1e-12)
    assert as_on_a_gpu.num_calls == 1


def test_masked_attention_on_a_gpu_is_one_node_of_a_graph(monkeypatch):
    """With the CPU's kernel, because a compiler does not know stand-ins."""
    monkeypatch.setattr(local, "_leaves_hidden_keys_out", lambda _q, _v: True)
    graphs = []

    def backend(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if "attention" in str(node.target)])
        return aot_eager(graph, inputs)

    q, k, v, mask = random_inputs(7, 11, 6, 2, True)
    grad = weights_like(q)
    compiled = torch.compile(local_attention, fullgraph=True, backend=backend)
    for found, full in zip(masked(q, k, v, mask, grad, compiled), expected(q, k, v, mask, grad), strict=True):
        torch.testing.assert_close(found, full, rtol=0, atol=1e-12)
    assert len(graphs) == 1 and not any("scaled_dot_product" in name for name in graphs[0])


def test_a_second_derivative_is_refused(as_on_a_gpu):
    q, k, v, mask = random_inputs(4, 5, 2, 2, True)
    q.requires_grad_()
    (grad,) = torch.autograd.grad(local_attention(q, k, v, mask=mask).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()


def hunyuan_text_mask(text_first):
    """Video and text over 3 ranks by Ulysses, the text's mask alone given; and how often flash ran."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (1, num_ranks), mesh_dim_names=("ring", "ulysses"))
    q, k, v, _ = random_inputs(7, 7, 6, 6, False)
    *text, text_mask = random_inputs(5, 5, 6, 6, True, seed=2)
    order = slice(None, None, -1 if text_first else 1)
    both = [torch.cat((video, words)[order], 1) for video, words in zip((q, k, v), text, strict=True)]
    mask = torch.cat((torch.ones(2, 7, dtype=torch.bool), text_mask)[order], 1)
    grad = weights_like(both[0])
    out, *grads = expected(*both, mask, grad)
    sizes = [5, 7] if text_first else [7, 5]
    own = [tensor.tensor_split(num_ranks, 1)[rank].clone().requires_grad_() for tensor in (q, k, v)]
    with pytest.MonkeyPatch.context() as patch:
        stand_in = VarlenStandIn(patch)
        patch.setattr(local, "_leaves_hidden_keys_out", lambda _q, _v: True)
        patch.setattr(blocks, "choose_kernel", lambda _problem: types.SimpleNamespace(kernel=KERNEL))
        video_out, text_out = joint_attention(*own, *text, mesh, text_first=text_first, text_mask=text_mask)
        video_grad, text_grad = grad.split(sizes, 1)[order]
        # Every rank has all of the text's output: its share of the text's gradient.
        torch.autograd.backward(
            [video_out, text_out], [video_grad.tensor_split(num_ranks, 1)[rank], text_grad / num_ranks]
        )
    wanted = [whole.split(sizes, 1)[order][0].tensor_split(num_ranks, 1)[rank] for whole in (out, *grads)]
    found = [video_out.detach(), *(tensor.grad for tensor in own)]
    errors = [float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True)]
    errors.append(float((text_out.detach() - out.split(sizes, 1)[order][1]).abs().max()))
    return max(errors), stand_in.num_calls


@pytest.mark.parametrize("text_first", [False, True])
def test_a_text_mask_keeps_flash(ranks, text_first):
    for error, num_calls in ranks(3, hunyuan_text_mask, text_first):
        assert error < 1e-12 and num_calls == 1


def test_selective_checkpointing_keeps_it(as_on_a_gpu):
    """Once in forward, and not again when the block is recomputed."""
    q, k, v, mask = random_inputs(7, 11, 2, 2, True)
    grad = weights_like(q)
    block = torch.nn.Module()
    block.forward = lambda q, k, v, mask: local_attention(q, k, v, mask=mask)
    wanted = expected(q, k, v, mask, grad)
    checkpoint_blocks([block], "selective")
    for found, full in zip(
        masked(q, k, v, mask, grad, lambda q, k, v, mask: block(q, k, v, mask)), wanted, strict=True
    ):
        torch.testing.assert_close(found, full, rtol=0, atol=1e-12)
    assert as_on_a_gpu.num_calls == 1
