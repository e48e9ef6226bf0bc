"""Every parallel attention against attention on one device: output and all gradients, in fp64.

Mesh × mask (none, key, causal, both) × tokens (even, uneven, fewer than ranks, other shares than tensor_split's) ×
heads (that divide the degree or not, grouped, fewer than ranks) × self, cross and joint: each case of their
cross product on three meshes or four.
"""

import itertools

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
from opensora_accel.attention.balance import rearrange
from opensora_accel.communications import share_sizes
from tests.attention.reference import full_attention, random_inputs, weights_like, worst_error
from tests.tiers import some

BOUND = 1e-10  # sums in another order: measured 4e-15 of the largest element

MESHES = [(1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (4, 1), (1, 4), (2, 2), (2, 3), (3, 2)]
TOKENS = [(13, 13), (12, 12), (5, 5), (12, 7)]
HEADS = [(12, 12), (5, 5), (2, 2), (12, 4), (4, 1), (6, 3), (10, 5), (12, 3)]
MASKS = [(False, False), (True, False), (False, True), (True, True)]
JOINT_TOKENS = [(12, 6, 6), (13, 7, 7), (5, 1, 1), (3, 5, 5), (13, 7, 0)]
"""Of the video, of the text, and of those of the text that ask."""
BOOLS = [False, True]


def a_third(shape, *factors):
    """Of the cross product the cases whose places add up to the mesh's, modulo 3: any two settings meet somewhere."""
    for places in itertools.product(*(range(len(factor)) for factor in factors)):
        if (sum(places) - MESHES.index(shape)) % 3 == 0:
            yield tuple(factor[place] for factor, place in zip(factors, places, strict=True))


def moved_shares(total, num_ranks):
    """Not those of tensor_split: the first rank has none, and the last one most."""
    sizes = list(share_sizes(total, num_ranks))
    sizes[-1] += sizes[0] if num_ranks > 1 else 0
    return [*([0] if num_ranks > 1 else []), *sizes[1:]] if num_ranks > 1 else sizes


def leaves(tensors):
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def self_and_cross(mesh, tokens, heads, masked, causal, layout, shares):
    """Error on this rank of one case."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    *full, mask = random_inputs(*tokens, *heads, masked)
    full = leaves(full)
    expected = full_attention(*full, mask, causal)
    weight = weights_like(expected)
    (expected * weight).sum().backward()

    split = moved_shares if shares == "moved" else share_sizes
    sizes = {n: tuple(split(n, num_ranks)) for n in tokens}
    on_ring = {n: ring_sizes(sizes[n], mesh) for n in tokens}

    def own(tensor):
        n = tensor.size(1)
        arranged = rearrange(tensor, mesh.size(0), layout, splits=on_ring[n])
        return arranged.split(sizes[n], 1)[rank]

    mine = leaves(own(tensor) for tensor in full)
    options = {"mask": None if mask is None else own(mask), "causal": causal}
    if shares != "unknown":
        options |= {"splits": sizes[tokens[0]], "kv_splits": sizes[tokens[1]]}
    outs = []
    for attention in attentions_on(mesh, layout):
        for tensor in mine:
            tensor.grad = None
        out = attention(*mine, **options)
        (out * own(weight)).sum().backward()
        found = [out, *(tensor.grad for tensor in mine)]
        outs.append(
            worst_error(
                (a.detach(), own(b.detach()), b)
                for a, b in zip(found, [expected, *(tensor.grad for tensor in full)], strict=True)
            )
        )
    return max(outs)


def ring_sizes(sizes, mesh):
    degree = mesh.size(1)
    return [sum(sizes[start : start + degree]) for start in range(0, len(sizes), degree)]


def attentions_on(mesh, layout):
    """USP, and where the mesh has one axis, what it is made of."""
    yield lambda *qkv, **options: usp_attention(*qkv, mesh, layout=layout, **options)
    if mesh.size(1) == 1:
        yield lambda *qkv, **options: ring_attention(*qkv, dist.group.WORLD, layout=layout, **options)
    elif mesh.size(0) == 1:
        yield lambda *qkv, **options: ulysses_attention(*qkv, dist.group.WORLD, **options)


def shares_of(layout, masked, causal):
    """Stripes have one size only; how ranks come to know the sizes does not depend on the mask."""
    return ["given", *([] if layout == "striped" else ["moved"]), *([] if masked or causal else ["unknown"])]


def all_self_and_cross(shape):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ring", "ulysses"))
    found = {}
    for tokens, heads, (masked, causal) in a_third(shape, TOKENS, HEADS, MASKS):
        if causal and tokens[0] != tokens[1]:
            continue
        balanced = ["zigzag", "striped"] if causal and shape[0] > 1 else []
        for layout in ["contiguous", *balanced]:
            for shares in shares_of(layout, masked, causal):
                case = (tokens, heads, masked, causal, layout, shares)
                found[case] = self_and_cross(mesh, *case)
    return found


@pytest.mark.parametrize("shape", some(MESHES, (2, 2)), ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_self_and_cross_attention(ranks, shape):
    for rank, errors in enumerate(ranks(shape[0] * shape[1], all_self_and_cross, shape)):
        wrong = {case: error for case, error in errors.items() if not error < BOUND}
        assert not wrong, f"rank {rank}: {wrong}"
        assert len(errors) > 80


def joint(mesh, num_video, num_text, num_asking, heads, masked, text_masked, text_first):
    """Video and text, concatenated, on one device; the text's gradients add up over the ranks.

    `num_asking`: text tokens among the queries.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    *video, mask = random_inputs(num_video, num_video, *heads, masked)
    *text, text_mask = random_inputs(num_asking, num_text, *heads, text_masked, seed=2)
    if masked and text_masked:
        mask[1, :1] = True
    video, text = leaves(video), leaves(text)
    order = (lambda a, b: [b, a]) if text_first else (lambda a, b: [a, b])
    both = [torch.cat(order(*pair), 1) for pair in zip(video, text, strict=True)]
    masks = [mask, text_mask]
    if masked or text_masked:
        masks = [
            torch.ones(2, n, dtype=torch.bool) if m is None else m
            for m, n in zip(masks, (num_video, num_text), strict=True)
        ]
    both_mask = torch.cat(order(*masks), 1) if masked or text_masked else None
    expected = full_attention(*both, both_mask)
    sizes = order(num_video, num_asking)
    expected_video, expected_text = order(*expected.split(sizes, 1))
    weight, text_weight = weights_like(expected_video), weights_like(expected_text, 3)
    ((expected_video * weight).sum() + (expected_text * text_weight).sum()).backward()

    shares = share_sizes(num_video, num_ranks)

    def own(tensor):
        return tensor.split(shares, 1)[rank]

    mine, my_text = leaves(own(tensor) for tensor in video), leaves(text)
    out, text_out = joint_attention(
        *mine,
        *my_text,
        mesh,
        text_first=text_first,
        mask=None if mask is None else own(mask),
        text_mask=text_mask,
        splits=shares if heads[0] % 2 else None,
    )
    # The text's loss is counted once: a share on every rank, so that all of them send gradients.
    share = (rank + 1) / sum(range(1, num_ranks + 1))
    ((out * own(weight)).sum() + share * (text_out * text_weight).sum()).backward()
    pairs = [(out.detach(), own(expected_video), expected_video), (text_out.detach(), *[expected_text] * 2)]
    pairs += [(a.grad, own(b.grad), b.grad) for a, b in zip(mine, video, strict=True)]
    for tensor, whole in zip(my_text, text, strict=True):
        dist.all_reduce(tensor.grad)
        pairs.append((tensor.grad, whole.grad, whole.grad))
    return worst_error(pairs)


def all_joint(shape):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ring", "ulysses"))
    cases = a_third(shape, JOINT_TOKENS, HEADS, BOOLS, BOOLS, BOOLS)
    return {case: joint(mesh, *case[0], *case[1:]) for case in cases}


@pytest.mark.slow
@pytest.mark.parametrize("shape", some(MESHES, (2, 2)), ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_joint_attention(ranks, shape):
    for rank, errors in enumerate(ranks(shape[0] * shape[1], all_joint, shape)):
        wrong = {case: error for case, error in errors.items() if not error < BOUND}
        assert not wrong, f"rank {rank}: {wrong}"


class NoCollectives:
    """Every way to communicate raises."""

    def __enter__(self):
        self.before = {name: getattr(dist, name) for name in ("all_to_all_single", "batch_isend_irecv")}
        for name in self.before:
            setattr(dist, name, self.refuse)

    def refuse(self, *_args, **_kwargs):
        raise AssertionError("a collective for keys that are here")

    def __exit__(self, *_):
        for name, function in self.before.items():
            setattr(dist, name, function)


def replicated_keys(tokens, heads, masked):
    """Cross-attention to text: queries are spread, keys are whole on every rank."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    *full, mask = random_inputs(*tokens, *heads, masked)
    full = leaves(full)
    expected = full_attention(*full, mask)
    weight = weights_like(expected)
    (expected * weight).sum().backward()
    q, k, v = leaves([full[0].tensor_split(num_ranks, 1)[rank], *full[1:]])
    with NoCollectives():
        out = local_attention(q, k, v, mask=mask)
        (out * weight.tensor_split(num_ranks, 1)[rank]).sum().backward()
    for tensor in (k, v):
        dist.all_reduce(tensor.grad)
    own = [tensor.tensor_split(num_ranks, 1)[rank] for tensor in (expected, full[0].grad)]
    return worst_error(
        [
            (out.detach(), own[0], expected),
            (q.grad, own[1], full[0].grad),
            (k.grad, full[1].grad, full[1].grad),
            (v.grad, full[2].grad, full[2].grad),
        ]
    )


def all_replicated_keys():
    return {
        case: replicated_keys(*case) for case in itertools.product([(13, 7), (5, 13)], HEADS, [False, True])
    }


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_cross_attention_to_replicated_keys_needs_no_collective(ranks, num_ranks):
    for errors in ranks(num_ranks, all_replicated_keys):
        assert max(errors.values()) < BOUND
