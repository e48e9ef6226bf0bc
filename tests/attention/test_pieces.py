"""Kernels that take all pieces of a block of keys at once, against tile by tile and a dense mask, in fp64.

Each library's function is a stand-in with its parameters and its demands; flex attention is torch's own, which computes
densely on a CPU. The steps of each rank of a dealt ring are taken one after the other.
"""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opensora_accel.attention import blocks, local_attention
from opensora_accel.attention.blocks import Rows, RowsBackward, add_parts
from opensora_accel.attention.kernels import (
    flex,
    releases,
    varlen,
)
from opensora_accel.attention.kernels.choose import PiecesChoice
from opensora_accel.attention.kernels.flex import BLOCK, FlexKernel
from opensora_accel.attention.kernels.magi import MagiKernel
from opensora_accel.attention.kernels.varlen import (
    VarlenFlashAttn2Kernel,
    VarlenFlashAttn3Kernel,
    VarlenFlashKernel,
)
from opensora_accel.attention.slices import AttentionSlices, Deal, Pieces, Slice, deal
from tests.attention import flash_attn_releases, magi_releases, seen
from tests.attention.reference import full_attention, random_inputs, weights_like, worst_error
from tests.attention.test_kernels import AtenStandIns
from tests.attention.test_sliced import MASKS, random_mask
from tests.tiers import PROVE, some

BOUND = 1e-10  # sums in another order: measured 4e-15 of the largest element
# Gaps between pieces, of queries, keys and both; causal pieces among full ones, with more keys than queries.
IN_ORDER = {
    "gaps": AttentionSlices(
        20,
        22,
        tuple(
            Slice.of(range(*q), range(*k))
            for q, k in (((2, 5), (0, 4)), ((5, 6), (7, 12)), ((13, 17), (12, 13)))
        ),
    ),
    "both kinds": AttentionSlices(
        18,
        21,
        (
            Slice.of(range(1, 4), range(5)),
            Slice.of(range(4, 9), range(6, 13), "causal"),
            Slice.of(range(11, 12), range(13, 15)),
            Slice.of(range(12, 18), range(15, 21), "causal"),
        ),
    ),
    "captions": AttentionSlices.packed([5, 3, 1, 6], [2, 0, 4, 3]),
    "one query each": AttentionSlices.packed([1, 1, 1], [3, 1, 2]),
    "packed": MASKS["packed"],
}
# Larger than a block of flex attention, with blocks that are seen whole, in part and not at all.
LARGE = {
    "block causal": AttentionSlices.block_causal(5, 70, block_frames=2),
    "window and sink": AttentionSlices.block_causal(6, 64, block_frames=2, window_frames=3, sink_frames=1),
    "causal": AttentionSlices.causal(300),
    "bands": AttentionSlices(
        280,
        300,
        (Slice.of(range(0, 130), range(20, 180), "band"), Slice.of(range(130, 280), range(0, 300), "causal")),
    ),
    "whole blocks": AttentionSlices.packed([2 * BLOCK, BLOCK]),
}


class AtenVarlen:
    """`aten::_flash_attention_forward` and `_backward` with cumulative lengths, with their real schemas."""

    def __init__(self, monkeypatch):
        self.calls = []
        for suffix in ("_forward", "_backward"):
            name = f"_flash_attention{suffix}"
            schema = getattr(torch.ops.aten, name).default._schema
            call = AtenStandIns.bound(schema, name, getattr(self, suffix[1:]))
            monkeypatch.setattr(torch.ops.aten, name, call)

    @staticmethod
    def lengths(given):
        assert given["dropout_p"] == 0.0 and given.get("window_size_left") is None
        return tuple(given[name] for name in ("cum_seq_q", "cum_seq_k", "max_q", "max_k"))

    def forward(self, _name, given):
        self.calls.append(given)
        q, k, v = given["query"], given["key"], given["value"]
        assert given["return_debug_mask"] is False
        out, lse = seen.varlen_forward(
            q, k, v, self.lengths(given), given["scale"], given["is_causal"], lse_of_none=math.inf
        )
        return out, lse, None, None, None

    def backward(self, _name, given):
        operands = (given[name] for name in ("grad_out", "query", "key", "value", "out", "logsumexp"))
        return seen.varlen_backward(*operands, self.lengths(given), given["scale"], given["is_causal"])


def install(monkeypatch, name):
    """A kernel by its name, whose library is a stand-in."""
    releases.find_release.cache_clear()
    if name == "aten":
        AtenVarlen(monkeypatch)
        return VarlenFlashKernel()
    if name == "flex":
        flex.compiled.cache_clear()
        monkeypatch.setattr(flex, "compiled", lambda function: function)
        return FlexKernel()
    if name.startswith("magi"):
        magi_releases.install(monkeypatch, name.split()[1])
        return MagiKernel()
    flash_attn_releases.install(monkeypatch, name)
    return VarlenFlashAttn3Kernel() if name.startswith("3") else VarlenFlashAttn2Kernel()


IN_ORDER_KERNELS = ["aten", "2.6", "2.7", "3, of 2.8", "3, operators"]
KERNELS = ["magi 1.0.5", "magi 1.1.1", "flex"]


@pytest.fixture(autouse=True)
def forget_releases():
    yield
    releases.find_release.cache_clear()


def use(monkeypatch, kernel):
    """All pieces of more than one tile go to the kernel, where they are of its kind; how often."""
    calls = []

    def choice(problem, facts):
        on_gpu = problem._replace(device=torch.device("cuda"), dtype=torch.bfloat16)
        taken = facts.num_tiles > 1 and not (
            isinstance(kernel, varlen._VarlenKernel)
            and (not facts.in_order or facts.kinds - {"full", "causal"} or on_gpu.masked)
        )
        calls.append(taken)
        return PiecesChoice(kernel if taken else None, ())

    monkeypatch.setattr(blocks, "choose_for_pieces", choice)
    return calls


def in_steps(dealt, q, k, v, mask, grad):
    """Output and gradients of all tokens, as every rank of a deal computes its part; in the order of the sequence."""
    num_ranks, scale = len(dealt.runs), q.size(-1) ** -0.5
    q_places = [dealt.positions(rank) for rank in range(num_ranks)]
    kv_runs = dealt.runs if dealt.kv_runs is None else dealt.kv_runs
    k_places = [
        torch.cat([torch.arange(0), *(torch.arange(r.start, r.stop) for r in runs)]) for runs in kv_runs
    ]
    out, grads = torch.zeros_like(grad), [torch.zeros_like(tensor) for tensor in (q, k, v)]
    for rank in range(num_ranks):
        keys_of_steps = []
        for shift, step in enumerate(dealt.steps(rank)):
            places = k_places[(rank - shift) % num_ranks]
            if shift:
                runs = dealt.needs(rank, (rank - shift) % num_ranks)
                places = torch.cat([places[:0], *(places[run.start : run.stop] for run in runs)])
            keys_of_steps.append((step, places))
        own = q[:, q_places[rank]]
        rows = Rows(own, v.size(3), scale)
        for step, places in keys_of_steps:
            rows.add_pieces(
                step.pieces, k[:, places], v[:, places], None if mask is None else mask[:, places]
            )
        own_out, lse = rows.result()
        out[:, q_places[rank]] = own_out
        back = RowsBackward(grad[:, q_places[rank]], own, own_out, lse, scale, is_masked=mask is not None)
        for step, places in keys_of_steps:
            of_block = [torch.zeros_like(tensor[:, places]) for tensor in (k, v)]
            given_mask = None if mask is None else mask[:, places]
            add_parts(of_block, back.add_pieces(step.pieces, k[:, places], v[:, places], given_mask))
            for total, part in zip(grads[1:], of_block, strict=True):
                total[:, places] += part
        grads[0][:, q_places[rank]] = back.result()
    return out, *grads


def error_of(slices, num_ranks, heads, masked=False):
    """Of the output and gradients in steps, over those under a dense mask."""
    q, k, v, mask = random_inputs(slices.num_queries, slices.num_keys, *heads, masked)
    # Views that do not lie in one piece, as a model's projection of all three gives them.
    q, k, v = (torch.stack([tensor, tensor], 3).select(3, 0) for tensor in (q, k, v))
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    expected = full_attention(*leaves, mask, seen=slices.dense())
    grad = weights_like(expected)
    expected.backward(grad)
    square = slices.num_queries == slices.num_keys
    dealt = (
        deal(slices, num_ranks)
        if square
        else Deal.in_order(slices, *(shares(n, num_ranks) for n in (slices.num_queries, slices.num_keys)))
    )
    found = in_steps(dealt, q, k, v, mask, grad)
    wanted = [expected.detach(), *(leaf.grad for leaf in leaves)]
    return worst_error((a, b, b) for a, b in zip(found, wanted, strict=True))


def shares(total, num_ranks):
    return [len(part) for part in torch.arange(total).tensor_split(num_ranks)]


@pytest.mark.parametrize("heads", some([(4, 4), (6, 2)], (6, 2)), ids=str)
@pytest.mark.parametrize("name", IN_ORDER)
@pytest.mark.parametrize("library", IN_ORDER_KERNELS)
def test_pieces_in_order(monkeypatch, library, name, heads):
    calls = use(monkeypatch, install(monkeypatch, library))
    for num_ranks in (1, 2):
        assert error_of(IN_ORDER[name], num_ranks, heads) < BOUND
    assert any(calls)


@pytest.mark.parametrize("num_ranks", some([1, 2, 3], 1, 3))
@pytest.mark.parametrize("name", {**MASKS, **IN_ORDER})
@pytest.mark.parametrize("library", KERNELS)
def test_pieces_of_any_kind(monkeypatch, library, name, num_ranks):
    calls = use(monkeypatch, install(monkeypatch, library))
    assert error_of({**MASKS, **IN_ORDER}[name], num_ranks, (4, 2)) < BOUND
    # Where tokens are dealt out, a step may have one tile.
    assert any(calls) or num_ranks > 1 or name in ("causal", "full", "nothing")


@pytest.mark.parametrize("name", LARGE)
def test_flex_attention_skips_blocks_and_asks_of_those_seen_in_part(monkeypatch, name):
    use(monkeypatch, install(monkeypatch, "flex"))
    for num_ranks, masked in ((1, False), (2, True)):
        assert error_of(LARGE[name], num_ranks, (2, 1), masked) < BOUND


@pytest.mark.parametrize("name", {**MASKS, **IN_ORDER})
def test_a_key_mask_beside_flex_attention(monkeypatch, name):
    use(monkeypatch, install(monkeypatch, "flex"))
    assert error_of({**MASKS, **IN_ORDER}[name], 2, (4, 2), masked=True) < BOUND


@PROVE
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([*IN_ORDER_KERNELS, *KERNELS]), st.integers(1, 40), st.integers(0, 1 << 20), st.integers(1, 4),
    st.sampled_from([(3, 3), (4, 2), (6, 1)]),
)  # fmt: skip
def test_any_slices(library, size, seed, num_ranks, heads):
    with pytest.MonkeyPatch.context() as monkeypatch:
        use(monkeypatch, install(monkeypatch, library))
        assert error_of(random_mask(seed, size), num_ranks, heads) < BOUND


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("masked", [False, True])
def test_blocks_of_flex_attention_are_those_that_torch_makes(name, masked):
    """Found by geometry, and by torch of the dense mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    mask = LARGE[name]
    pieces = deal(mask, 1).steps(0)[0].pieces if mask.num_queries == mask.num_keys else Pieces(mask.slices)
    dense = mask.dense()[pieces.rows, pieces.keys]
    assert pieces.num_rows, pieces.num_keys == dense.shape
    theirs = create_block_mask(lambda _b, _h, q, k: dense[q, k], None, None, *dense.shape, device="cpu")
    lookup = flex.lookup_of(pieces, torch.device("cpu"), masked=masked)
    queries, keys = torch.arange(dense.size(0))[:, None], torch.arange(dense.size(1))
    assert torch.equal(flex._function_of(lookup, None)(0, 0, queries, keys), dense)
    if masked:
        both = theirs.to_dense()[0, 0] > 0
        assert lookup.blocks[4].sum() == 0 and lookup.blocks[2].sum() == both.sum()
        return
    for name_of, at in (("kv", 2), ("full_kv", 4), ("q", 6), ("full_q", 8)):
        counts = getattr(theirs, f"{name_of}_num_blocks")
        indices = getattr(theirs, f"{name_of}_indices")
        assert torch.equal(lookup.blocks[at], counts)
        for row, count in enumerate(counts[0, 0].tolist()):
            assert torch.equal(lookup.blocks[at + 1][0, 0, row, :count], indices[0, 0, row, :count])


def test_a_row_of_many_clips_is_no_dense_mask():
    """2,000 clips of 50 tokens, 782 × 782 blocks: 10¹⁰ pairs would be 10 GB."""
    pieces = Pieces(AttentionSlices.packed([50] * 2000).slices)
    lookup = flex.lookup_of(pieces, torch.device("cpu"), masked=False)
    assert lookup.blocks[2].sum() < 4 * 782 and len(lookup.starts) == 1


def test_one_call_a_kind_for_all_samples(monkeypatch):
    """Not one for each tile; and backward likewise."""
    stand_in = AtenVarlen(monkeypatch)
    calls = use(monkeypatch, VarlenFlashKernel())
    q, k, v, _ = random_inputs(18, 21, 4, 2, False)
    mask = IN_ORDER["both kinds"]
    local_attention(q, k, v, slices=mask)
    assert calls == [True] and [given["is_causal"] for given in stand_in.calls] == [False, True]
    assert Pieces(mask.slices).facts.num_tiles > 4


def test_gaps_are_cut_so_that_no_sample_is_longer_than_a_piece():
    pieces = Pieces((Slice.of(range(3), range(2)), Slice.of(range(100, 103), range(90, 92))))
    samples = varlen.samples_of(pieces, "full", 2, torch.device("cpu"))
    assert (samples.longest_q, samples.longest_k) == (3, 2)
    assert samples.q_starts.diff().max() == 3 and samples.k_starts.diff().max() == 2
    assert samples.q_starts[-1] == 2 * 103 and samples.k_starts[-1] == 2 * 92


def test_what_a_deal_made_is_not_that_of_another(monkeypatch):
    """Two masks of one size, by turns: block masks are kept with their deals."""
    use(monkeypatch, install(monkeypatch, "flex"))
    for name in ("packed", "window and sink", "packed"):
        assert error_of(MASKS[name], 1, (2, 2)) < BOUND
    first, second = AttentionSlices.packed([5, 8]), AttentionSlices.packed([8, 5])
    for mask in (first, second, first):
        assert error_of(mask, 1, (2, 2)) < BOUND


def test_pieces_are_cut_where_slices_bend():
    bent = Slice(0, 6, 0, 4, -9, 1)  # sees 2, 3, 4, 4, 4, 4 keys
    pieces = Pieces((bent,))
    assert [(each.queries, each.kind) for each in pieces.pieces] == [
        (range(3), "causal"),
        (range(3, 6), "full"),
    ]
    assert pieces.facts.num_tiles == 3 and pieces.facts.most_runs == 1
    for mask in MASKS.values():
        pieces = Pieces(mask.slices)
        again = AttentionSlices(mask.num_queries, mask.num_keys, tuple(
            each.moved(pieces.rows.start, pieces.keys.start) for each in pieces.pieces
        ))  # fmt: skip
        assert again == mask
        for each in pieces.pieces:
            assert each == Slice.of(each.queries, each.keys, each.kind), "its corners are elsewhere"


def test_flex_attention_never_runs_as_it_stands():
    """Where torch.compile does nothing it would hold all scores."""
    pieces = Pieces(MASKS["block causal"].slices)
    q, k, v, _ = random_inputs(pieces.num_rows, pieces.num_keys, 2, 2, False)
    flex.compiled.cache_clear()
    with torch.compiler.set_stance("force_eager"), pytest.raises(RuntimeError, match="hold all scores"):
        FlexKernel().forward(q, k, v, blocks.Scores(0.3), pieces)
    flex.compiled.cache_clear()


def test_a_deterministic_call_asks_for_it(monkeypatch):
    calls = magi_releases.install(monkeypatch)
    use(monkeypatch, MagiKernel())
    q, k, v, _ = random_inputs(17, 17, 2, 2, False)
    for expected in (False, True):
        torch.use_deterministic_algorithms(expected)
        try:
            local_attention(q, k, v, slices=MASKS["packed"])
        finally:
            torch.use_deterministic_algorithms(False)
        assert calls[-1]["deterministic"] is expected


def test_compiled_it_computes_the_same(monkeypatch):
    """By torch.compile, for sizes, runs and masks that change; the graph is not run by a GPU's code."""
    monkeypatch.setattr(
        flex, "compiled", lambda function: torch.compile(function, fullgraph=True, backend="aot_eager")
    )
    use(monkeypatch, FlexKernel())
    for name, masked in (("packed", False), ("block causal", False), ("teacher forcing", True)):
        assert error_of(MASKS[name], 1, (4, 2), masked) < BOUND
