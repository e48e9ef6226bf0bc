"""torch.compile: Ulysses without a break in the graph, the ring without failing; and deterministic mode."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from opensora_accel import Plan, init_parallel
from opensora_accel.attention import joint_attention, ring_attention, ulysses_attention, usp_attention
from opensora_accel.communications import all_to_all_packed, share_sizes
from tests.attention.reference import random_inputs, weights_like, worst_error
from tests.tiers import PROVE, some

pytestmark = pytest.mark.slow

BACKEND = "aot_eager"  # traces forward and backward as inductor does, without needing a C++ compiler


def compared(name, tokens, heads, masked, causal, backend):
    """Compiled and eager: the same output and gradients."""
    torch._dynamo.reset()
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    *full, mask = random_inputs(*tokens, *heads, masked)
    splits, kv_splits = (share_sizes(n, num_ranks) for n in tokens)
    mesh = None
    if name == "usp":
        mesh = init_device_mesh("cpu", (2, num_ranks // 2), mesh_dim_names=("ring", "ulysses"))

    def layer(q, k, v, mask):
        options = {"mask": mask, "causal": causal, "splits": splits, "kv_splits": kv_splits}
        if mesh is not None:
            return usp_attention(q.sin(), k, v, mesh, **options).cos()
        function = ulysses_attention if name == "ulysses" else ring_attention
        return function(q.sin(), k, v, dist.group.WORLD, **options).cos()

    def own(tensor):
        return tensor.tensor_split(num_ranks, 1)[rank]

    found = []
    for function in (layer, torch.compile(layer, fullgraph=True, backend=backend)):
        mine = [own(tensor).clone().requires_grad_() for tensor in full]
        out = function(*mine, None if mask is None else own(mask))
        (out * weights_like(out)).sum().backward()
        found.append([out.detach(), *(tensor.grad for tensor in mine)])
    return worst_error((b, a, a) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("seen", some(["all", "masked", "masked and causal"], "masked and causal"))
@pytest.mark.parametrize(
    ("tokens", "heads"),
    [
        pytest.param((12, 12), (4, 4), marks=PROVE),
        pytest.param((13, 13), (5, 5), marks=PROVE),
        ((7, 7), (6, 2)),
    ],
)
@pytest.mark.parametrize("name", some(["ring", "ulysses"]))
def test_compiled_in_one_graph(ranks, name, tokens, heads, seen):
    masked, causal = "masked" in seen, "causal" in seen
    assert max(ranks(3, compared, name, tokens, heads, masked, causal, BACKEND)) < 1e-12


@PROVE
@pytest.mark.parametrize("name", ["ulysses", "ring"])
def test_compiled_by_inductor(ranks, name):
    assert max(ranks(2, compared, name, (7, 7), (3, 3), True, False, "inductor")) < 1e-12


@pytest.mark.prove
def test_usp_is_compiled_too(ranks):
    assert max(ranks(4, compared, "usp", (13, 13), (5, 5), False, False, BACKEND)) < 1e-12


def registered():
    """The group of the registry, and joint attention."""
    torch._dynamo.reset()
    init_parallel(Plan(ulysses=2))
    q, k, v, _ = random_inputs(4, 4, 3, 3, False)
    tq, tk, tv, _ = random_inputs(5, 5, 3, 3, False, seed=1)
    options = {"splits": (4, 4), "kv_splits": (4, 4)}
    layers = (
        lambda: ulysses_attention(q, k, v, **options),
        lambda: joint_attention(q, k, v, tq, tk, tv, splits=(4, 4))[1],
        lambda: usp_attention(q, k, v, **options),
    )
    return [
        (torch.compile(layer, fullgraph=True, backend=BACKEND)() - layer()).abs().max().item()
        for layer in layers
    ]


@PROVE
def test_registered_groups_and_joint_attention(ranks):
    for errors in ranks(2, registered):
        assert max(errors) < 1e-12


def without_sizes():
    torch._dynamo.reset()
    q, k, v, _ = random_inputs(4, 4, 2, 2, False)
    for function in (ulysses_attention, ring_attention):
        with pytest.raises(Exception, match="pass splits= and kv_splits="):
            torch.compile(lambda f=function: f(q, k, v, dist.group.WORLD), fullgraph=True, backend=BACKEND)()
    return True


def test_sizes_cannot_be_exchanged_within_a_compiled_region(ranks):
    assert all(ranks(2, without_sizes))


def refused_while_tracing():
    q, k, v, mask = random_inputs(4, 4, 3, 3, True)
    messages = []
    for function, options in (
        (ring_attention, {"splits": (3, 3), "kv_splits": (4, 4)}),
        (ulysses_attention, {"splits": (4, 4), "kv_splits": (4, 4), "mask": mask.to(torch.uint8)}),
        (ring_attention, {"splits": (4, 4), "kv_splits": (4, 4), "mask": mask[:1]}),
        (ring_attention, {"splits": (4, 4), "kv_splits": (4, 4), "scale": -1.0}),
    ):
        torch._dynamo.reset()
        with pytest.raises(Exception) as caught:
            compiled = torch.compile(
                lambda f=function, o=options: f(q, k, v, dist.group.WORLD, **o), backend=BACKEND
            )
            compiled()
        messages.append(str(caught.value))
    return messages


def test_bad_input_is_refused_while_tracing(ranks):
    for messages in ranks(2, refused_while_tracing):
        for part, message in zip(
            ["but its tensor has 4", "bool key mask", "bool key mask", "scale must be"], messages, strict=True
        ):
            assert part in message


def with_a_break():
    torch._dynamo.reset()
    q, k, v, _ = random_inputs(4 + dist.get_rank(), 4 + dist.get_rank(), 3, 3, False)
    errors = []
    for function in (ulysses_attention, ring_attention):
        found = torch.compile(function, backend=BACKEND)(q, k, v, dist.group.WORLD)
        errors.append((found - function(q, k, v, dist.group.WORLD)).abs().max().item())
    return max(errors)


@PROVE
def test_without_fullgraph_the_sizes_are_exchanged_between_graphs(ranks):
    assert max(ranks(2, with_a_break)) < 1e-12


def unevenly_packed(tensors, splits, scatter_splits):
    return all_to_all_packed(tensors, dist.group.WORLD, 2, 1, splits=splits, scatter_splits=scatter_splits)


def compiled_and_eager():
    """Tensors that differ in heads, one of which goes to rank 1 alone."""
    torch._dynamo.reset()
    rank = dist.get_rank()
    tensors = [torch.randn(2, 3 + rank, heads, 4, requires_grad=True) for heads in (5, 2)]
    arguments = [(3, 4, 5)] * 2, [None, (0, 2, 0)]
    compiled = torch.compile(unevenly_packed, fullgraph=True, backend=BACKEND)
    outs = [function(tensors, *arguments) for function in (unevenly_packed, compiled)]
    grads = [torch.autograd.grad(sum((o * weights_like(o)).sum() for o in out), tensors) for out in outs]
    same = all(torch.equal(a, b) for a, b in zip(*outs, strict=True))
    return same and all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@PROVE
def test_a_compiled_all_to_all_moves_the_same(ranks):
    assert all(ranks(3, compiled_and_eager))


def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        found = []
        for _ in range(2):
            for function in (ulysses_attention, ring_attention):
                q, k, v, mask = random_inputs(33, 33, 4, 2, True, dtype=torch.float32)
                q, k, v = (t.requires_grad_() for t in (q, k, v))
                function(q, k, v, dist.group.WORLD, mask=mask).square().sum().backward()
                found.append([q.grad, k.grad, v.grad])
    finally:
        torch.use_deterministic_algorithms(False)
    return all(
        torch.equal(a, b)
        for first, second in ((0, 2), (1, 3))
        for a, b in zip(found[first], found[second], strict=True)
    )


def test_deterministic_mode_gives_the_same_bits(ranks):
    assert all(ranks(3, deterministic))
