"""The rules against brute force: every placement of every operand, executed in shards, forward and backward.

Brute force asks nothing of the rules: it cuts or splits real tensors, runs the einsum on each share, and looks in which
ways the results make up the whole. Numbers are integers, so that equal means equal.
"""

import itertools

import pytest
import torch

from opensora_accel.sharding import (
    Equation,
    Invariant,
    Partial,
    Replicate,
    Shard,
    ShardingError,
    derive,
    derive_gradients,
    dual,
)

EQUATIONS = [
    "sbi,io->sbo",  # linear
    "sbi,oi->sbo",
    "bshd,bthd->bhst",  # attention's scores
    "bhst,bthd->bshd",  # and its values
    "sbc,c->sbc",  # a norm's weight
    "sbc,c,c->sbc",
    "sb,sv,vc->sbc",  # embedding as a product with one-hot rows
    "te,tc->ec",  # MoE dispatch
    "ti,tj->ij",
    "i,j->ij",
    "i,i->",
    "ij->ji",
    "ij->i",
    "ijk->",
    "ij,k->j",  # one-sided sums
    "ab,bc,cd->ad",
    "bij,bjk->bik",
    "bij,bkj->bki",
    "ab,ab,ab->ab",
]
NUM_RANKS = [2, 3]
SIZES = {2: [4, 5, 6, 7, 8], 3: [6, 7, 8, 9, 10]}
"""Shares of two or more: a share of one would be broadcast."""


def sizes_for(equation, num_ranks):
    return dict(zip(equation.labels, itertools.cycle(SIZES[num_ranks]), strict=False))


def integers(shape, seed):
    """Of both signs, also their products: a largest term does pass through a product with numbers of one sign."""
    numbers = torch.randint(1, 6, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    signs = 1 - 2 * ((torch.arange(numbers.numel()) >> seed % 3) % 2)
    return numbers * signs.view(shape)


def spread(tensor, placement, labels, num_ranks, seed=0):
    """What each rank holds."""
    if isinstance(placement, Replicate):
        return [tensor.clone() for _ in range(num_ranks)]
    if isinstance(placement, Shard):
        return [part.clone() for part in tensor.tensor_split(num_ranks, labels.index(placement.label))]
    terms = [integers(tensor.shape, seed + rank + 100) for rank in range(num_ranks)]
    if placement.reduction == "sum":
        terms[-1] = tensor - sum(terms[:-1])
    elif placement.reduction == "avg":
        terms[-1] = num_ranks * tensor - sum(terms[:-1])
    else:
        sign = 1 if placement.reduction == "max" else -1
        terms = [tensor - sign * term.abs() for term in terms]
        owner = torch.randint(
            0, num_ranks, tensor.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.long
        )
        terms = [torch.where(owner == rank, tensor, term) for rank, term in enumerate(terms)]
    return terms


def whole(parts, placement, labels):
    """What the ranks hold together, if it lies so; None where the shapes say that it does not."""
    if isinstance(placement, Shard):
        try:
            return torch.cat(parts, labels.index(placement.label))
        except RuntimeError:
            return None
    if len({part.shape for part in parts}) != 1:
        return None
    if isinstance(placement, Replicate):
        return parts[0] if all(torch.equal(part, parts[0]) for part in parts) else None
    stacked = torch.stack(list(parts))
    return {
        "sum": stacked.sum(0),
        "avg": stacked.sum(0) / len(parts),
        "max": stacked.amax(0),
        "min": stacked.amin(0),
    }[placement.reduction]


def is_whole(parts, placement, labels, expected):
    found = whole(parts, placement, labels)
    return found is not None and found.shape == expected.shape and torch.equal(found, expected)


def choices(labels, reductions=("sum", "avg", "max")):
    return [Replicate(), *map(Shard, labels), *map(Partial, reductions)]


def brute_force(text, equation, tensors, placements, num_ranks):
    """All placements in which the results of the shares are the whole result."""
    shares = [
        spread(tensor, placement, labels, num_ranks, seed=10 * number)
        for number, (tensor, placement, labels) in enumerate(
            zip(tensors, placements, equation.operands, strict=True)
        )
    ]
    try:
        outs = [torch.einsum(text, *mine) for mine in zip(*shares, strict=True)]
    except RuntimeError:
        return set()
    expected = torch.einsum(text, *tensors)
    found = [Replicate(), *map(Shard, equation.output), *map(Partial, ("sum", "avg", "max", "min"))]
    return {placement for placement in found if is_whole(outs, placement, equation.output, expected)}


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
@pytest.mark.parametrize("text", EQUATIONS)
def test_forward_agrees_with_brute_force_on_every_placement(text, num_ranks):
    equation = Equation.parse(text)
    sizes = sizes_for(equation, num_ranks)
    tensors = [integers([sizes[n] for n in labels], i) for i, labels in enumerate(equation.operands)]
    num_derived = num_refused = 0
    for placements in itertools.product(*map(choices, equation.operands)):
        possible = brute_force(text, equation, tensors, placements, num_ranks)
        try:
            found = derive(equation, [{"tp": placement} for placement in placements])["tp"].placement
        except ShardingError:
            assert not possible, f"{placements} is refused, but gives {possible}"
            num_refused += 1
        else:
            assert found in possible, f"{placements}: {found}, but it is {possible or 'nothing'}"
            num_derived += 1
    assert num_derived > len(equation.operands[0]) and (num_refused or len(equation.operands) == 1)


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
@pytest.mark.parametrize("text", EQUATIONS)
def test_gradients_agree_with_brute_force_on_every_placement(text, num_ranks):
    """Each rank differentiates its own term of the loss; its gradients must lie as derived."""
    equation = Equation.parse(text)
    sizes = sizes_for(equation, num_ranks)
    tensors = [integers([sizes[n] for n in labels], i) for i, labels in enumerate(equation.operands)]
    reference = [tensor.clone().requires_grad_() for tensor in tensors]
    out = torch.einsum(text, *reference)
    cotangent = integers(out.shape, 99)
    expected = torch.autograd.grad(out, reference, cotangent)
    for placements in itertools.product(*(choices(labels, ("sum",)) for labels in equation.operands)):
        on_axis = [{"tp": placement} for placement in placements]
        try:
            of_output = derive(equation, on_axis)["tp"].placement
        except ShardingError:
            continue
        gradients = [found["tp"].placement for found in derive_gradients(equation, on_axis)]
        assert gradients == [dual(placement) for placement in placements]
        shares = [
            [part.requires_grad_() for part in spread(tensor, placement, labels, num_ranks, seed=10 * number)]
            for number, (tensor, placement, labels) in enumerate(
                zip(tensors, placements, equation.operands, strict=True)
            )
        ]
        of_ranks = spread(cotangent, dual(of_output), equation.output, num_ranks, seed=55)
        local = [
            torch.autograd.grad(torch.einsum(text, *mine), mine, of_ranks[rank])
            for rank, mine in enumerate(zip(*shares, strict=True))
        ]
        for operand, (placement, labels) in enumerate(zip(gradients, equation.operands, strict=True)):
            parts = [grads[operand] for grads in local]
            assert is_whole(parts, placement, labels, expected[operand]), f"{placements}: operand {operand}"


def test_equations_are_enough():
    assert len(EQUATIONS) >= 15


# ---- beside DTensor


def dtensor_strategies(text):
    """{(output, inputs)} on one mesh axis, as torch's own table has it."""
    from torch.distributed.tensor import placement_types as theirs
    from torch.distributed.tensor._ops import _einsum_strategy

    class Mesh:
        ndim, size, shape = 1, staticmethod(lambda *_: 2), (2,)

    def ours(placement, labels):
        if isinstance(placement, theirs.Replicate):
            return Replicate()
        if isinstance(placement, theirs.Shard):
            return Shard(labels[placement.dim])
        return Partial(placement.reduce_op)

    equation = Equation.parse(text)
    terms = [*equation.operands, equation.output]
    found = set()
    for strategy in _einsum_strategy.gen_einsum_strategies(text, Mesh(), linearity=True).strategies:
        inputs = tuple(
            ours(spec.placements[0], labels)
            for spec, labels in zip(strategy.input_specs, terms, strict=False)
        )
        found.add((ours(strategy.output_spec.placements[0], equation.output), inputs))
    return found


def our_strategies(text):
    equation, found = Equation.parse(text), set()
    for placements in itertools.product(*(choices(labels, ("sum",)) for labels in equation.operands)):
        try:
            output = derive(equation, [{"tp": placement} for placement in placements])["tp"].placement
        except ShardingError:
            continue
        found.add((output, placements))
    return found


MATMULS = ["sbi,io->sbo", "bij,bjk->bik", "bshd,bthd->bhst", "bhst,bthd->bshd", "te,tc->ec", "i,j->ij"]


@pytest.mark.parametrize("text", MATMULS)
def test_agrees_with_dtensor_but_where_it_is_wrong(text):
    theirs, ours = dtensor_strategies(text), our_strategies(text)
    num_operands = len(Equation.parse(text).operands)
    # With linearity it lets all operands be Partial at once, which holds for a sum of operands, not for a product:
    # (a1 + a2)(b1 + b2) is not a1 b1 + a2 b2. Brute force refuses it too.
    all_partial = {each for each in theirs if each[1] == (Partial(),) * num_operands}
    assert theirs - ours == all_partial
    # It has no rule for one Partial operand beside replicated ones.
    assert all(any(isinstance(p, Partial) for p in inputs) for _, inputs in ours - theirs)
    assert len(ours - theirs) == num_operands


# ---- what the letters cannot say


def test_ellipsis_broadcast_and_implicit_output():
    equation = Equation.parse("...i,...ij->...j", shapes=[(2, 5, 3), (5, 3, 4)])
    assert equation.operands == (("...2", "...1", "i"), ("...1", "i", "j"))
    assert equation.output == ("...2", "...1", "j")
    assert Equation.parse("ij,jk").output == ("i", "k")
    repeated = Equation.parse("bi,bi->bi", shapes=[(4, 3), (1, 3)])
    assert repeated.broadcast == (frozenset(), frozenset("b"))
    found = derive(repeated, [{"dp": Shard("b")}, {}])
    assert found["dp"].placement == Shard("b")
    # The operand that is repeated along the sharded label gets a term of its gradient on every rank.
    assert derive_gradients(repeated, [{"dp": Shard("b")}, {}])[1]["dp"].placement == Partial()
    with pytest.raises(ValueError, match="is repeated there: replicate it over dp"):
        derive(repeated, [{"dp": Shard("b")}, {"dp": Shard("b")}])


def test_gradient_of_a_broadcast_operand_numerically():
    a, b = integers((4, 3), 0), integers((1, 3), 1).requires_grad_()
    (a * b).sum().backward()
    parts = [torch.einsum("bi->i", share)[None] for share in a.tensor_split(2)]
    assert is_whole(parts, Partial(), ("b", "i"), b.grad)


def test_invariant_operands():
    """What all ranks compute alike stays so; beside anything else it has to become R first."""
    equation = Equation.parse("sbi,io->sbo")
    alike = [{"tp": Invariant()}] * 2
    assert derive(equation, alike)["tp"].placement == Invariant()
    assert [found["tp"].placement for found in derive_gradients(equation, alike)] == [Invariant()] * 2
    for other in (Replicate(), Shard("o"), Partial()):
        with pytest.raises(ShardingError, match="make sbi R over tp"):
            derive(equation, [{"tp": Invariant()}, {"tp": other}])


def test_axes_are_independent():
    equation = Equation.parse("sbi,io->sbo")
    placements = [{"sp": Shard("s"), "tp": Shard("i")}, {"tp": Shard("i")}]
    found = {axis: each.placement for axis, each in derive(equation, placements).items()}
    assert found == {"sp": Shard("s"), "tp": Partial()}
    gradients = derive_gradients(equation, placements)
    assert {a: d.placement for a, d in gradients[1].items()} == {"sp": Partial(), "tp": Shard("i")}


@pytest.mark.parametrize(
    ("text", "placements", "operand", "message"),
    [
        (
            "sbi,io->sbo",
            [Shard("i"), Replicate()],
            1,
            "x is sharded along 'i' over tp, but w has that label too and is replicated: a rank would multiply its "
            "share with the whole; split w along 'i'",
        ),
        (
            "sbi,io->sbo",
            [Shard("s"), Shard("o")],
            1,
            "would hold blocks of a diagonal; all-gather w along 'o'",
        ),
        ("sbi,io->sbo", [Shard("s"), Shard("i")], 1, "or all-gather x along 's'"),
        ("sbi,io->sbo", [Partial(), Partial()], 1, "x and w are both Partial over tp: a product of sums"),
        ("sbi,io->sbo", [Partial(), Shard("i")], 0, "all-reduce x over tp, or reduce-scatter it along 'i'"),
        ("sbi,io->sbo", [Partial("max"), Replicate()], 0, "the max of terms does not pass through"),
    ],
)
def test_a_refusal_names_the_operand_and_the_collective(text, placements, operand, message):
    on_axis = [{"tp": placement} for placement in placements]
    with pytest.raises(ShardingError) as caught:
        derive(Equation.parse(text), on_axis, names=["x", "w"])
    assert message in str(caught.value)
    assert caught.value.operand == operand


@pytest.mark.parametrize(
    ("text", "shapes", "message"),
    [
        ("i->ii", None, "the output repeats the label 'i'"),
        ("ij->k", None, "the output has the label 'k', which no operand has"),
        ("i1->i", None, "labels are letters; got 'i1'"),
        ("...i->i", None, "give the operands' shapes"),
        ("ij,jk->ik", [(2, 3)], "has 2 operands, but 1 shapes"),
        ("ij,jk->ik", [(2, 3), (4, 5)], "the label 'j' has the sizes 3 and 4"),
        ("ij->ji", [(2,)], "has 2 labels, but its shape is (2,)"),
    ],
)
def test_equations_that_cannot_be(text, shapes, message):
    with pytest.raises(ValueError) as caught:
        Equation.parse(text, shapes)
    assert message in str(caught.value)


def test_placements_that_cannot_be():
    with pytest.raises(ValueError, match="sharded along 'o' over tp, but its labels are sbi"):
        derive(Equation.parse("sbi,io->sbo"), [{"tp": Shard("o")}, {}])
    with pytest.raises(ValueError, match="reduced by sum, avg, max, min; got 'mean'"):
        Partial("mean")
    with pytest.raises(ValueError, match="2 operands; got 1 placements"):
        derive(Equation.parse("sbi,io->sbo"), [{}])
    with pytest.raises(ValueError, match="has no dual"):
        dual(Partial("max"))


def test_a_diagonal_is_read_where_it_is_not_cut():
    """ "iib->b" takes a diagonal of whole squares, of which every rank has some."""
    equation = Equation.parse("iib->b")
    assert derive(equation, [{"tp": Shard("b")}])["tp"].placement == Shard("b")
    assert derive_gradients(equation, [{"tp": Shard("b")}])[0]["tp"].placement == Shard("b")
    with pytest.raises(ValueError, match="repeats the label 'i': a diagonal is no product of shards"):
        derive(equation, [{"tp": Shard("i")}])
