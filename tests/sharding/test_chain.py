"""Whole blocks, forward and backward, on real shares: what a chain derives has the gradients of one device.

All ranks live in one process, so that autograd differentiates through what they send each other. A tensor that is I is
one tensor, which all ranks use; one that is R is a tensor for each rank.
"""

import pytest
import torch

from opensora_accel.sharding import Chain, Invariant, Partial, Replicate, Shard
from tests.sharding.test_einsum import spread

AXIS = "tp"


def attention_block(chain, strategy):
    """Pre-norm attention with a residual, as Megatron shards it, as Ulysses does, and as data parallelism does."""
    batch = Shard("b") if strategy == "data" else Invariant()
    tokens = Shard("s") if strategy == "ulysses" else batch
    heads = Shard("h") if strategy == "megatron" else Invariant()
    x = chain.tensor("x", "sbc", tp=tokens)
    weights = {name: chain.tensor(name, "chd", tp=heads) for name in ("wq", "wk", "wv")}
    wo, gain = chain.tensor("wo", "hdc", tp=heads), chain.tensor("gain", "c")
    spread_out = strategy != "megatron"
    if spread_out:  # every rank uses them for its own tokens
        weights = {name: chain.move(f"{name}_used", name, tp=Replicate()) for name in weights}
        wo, gain = chain.move("wo_used", wo, tp=Replicate()), chain.move("gain_used", gain, tp=Replicate())
    norm = chain.map("norm", x, along="c")
    h = chain.einsum("h", "sbc", norm, gain)
    if not spread_out:
        h = chain.move("h_used", h, tp=Replicate())
    keys = chain.rename("h_keys", h, "tbc")
    q = chain.einsum("q", "sbhd", h, weights["wq"])
    k = chain.einsum("k", "tbhd", keys, weights["wk"])
    v = chain.einsum("v", "tbhd", keys, weights["wv"])
    if strategy == "ulysses":
        q, k, v = (chain.move(f"{n}_by_head", n, tp=Shard("h")) for n in (q, k, v))
    scores = chain.einsum("scores", "bhst", q, k)
    weights_of = chain.map("softmax", scores, along="t")
    o = chain.einsum("o", "sbhd", weights_of, v)
    if strategy == "ulysses":
        o = chain.move("o_by_token", o, tp=Shard("s"))
    y = chain.einsum("y", "sbc", o, wo)
    if strategy == "megatron":
        y = chain.move("y_whole", y, tp=Invariant())
    out = chain.add("out", x, y)
    return chain.move("whole", out, tp=Invariant()) if spread_out else out


SIZES = {"s": 6, "t": 6, "b": 4, "c": 5, "h": 4, "d": 3}
FUNCTIONS = {
    "norm": lambda x, dim: x / (x.square().sum(dim, keepdim=True) + 1).sqrt(),
    "softmax": lambda x, dim: x.softmax(dim),
}


def on_one_device(chain, tensors):
    found = dict(tensors)
    for node in chain.nodes.values():
        if node.operation == "tensor":
            continue
        found[node.name] = run(chain, node, [found[n] for n in node.operands])
    return found


def run(chain, node, operands):
    if node.operation == "einsum":
        terms = ",".join("".join(chain.nodes[n].labels) for n in node.operands)
        return torch.einsum(f"{terms}->{''.join(node.labels)}", *operands)
    if node.operation == "map":
        return FUNCTIONS[node.name](operands[0], node.labels.index(node.along[0]))
    return operands[0] if node.operation in ("rename", "move") else sum(operands[1:], operands[0])


def moved(parts, before, after, labels):
    """A redistribution that autograd sees through."""
    num_ranks = len(parts)
    if isinstance(before, Shard):
        whole = torch.cat(parts, labels.index(before.label))
    else:
        whole = sum(parts[1:], parts[0]) if isinstance(before, Partial) else None
    if isinstance(after, Shard):
        dim = labels.index(after.label)
        if whole is None:
            return [part.tensor_split(num_ranks, dim)[rank] for rank, part in enumerate(parts)]
        return list(whole.tensor_split(num_ranks, dim))
    if isinstance(after, Invariant):
        return [whole] * num_ranks
    return [
        (parts[rank] if whole is None else whole).view_as(parts[rank] if whole is None else whole)
        for rank in range(num_ranks)
    ]


def on_ranks(chain, tensors, num_ranks):
    found = {}
    for node in chain.nodes.values():
        placement = node.placements[AXIS]
        if node.operation == "tensor":
            whole = tensors[node.name]
            parts = (
                [whole] * num_ranks
                if isinstance(placement, Invariant)
                else spread(whole.detach(), placement, node.labels, num_ranks)
            )
            found[node.name] = [part.requires_grad_() for part in parts]
        elif node.operation == "move":
            source = chain.nodes[node.operands[0]]
            found[node.name] = moved(found[source.name], source.placements[AXIS], placement, node.labels)
        else:
            shares = zip(*(found[n] for n in node.operands), strict=True)
            parts = [run(chain, node, list(mine)) for mine in shares]
            found[node.name] = [parts[0]] * num_ranks if isinstance(placement, Invariant) else parts
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("strategy", ["megatron", "ulysses", "data"])
def test_an_attention_block_has_the_gradients_of_one_device(strategy, num_ranks):
    chain = Chain({AXIS: num_ranks})
    last = attention_block(chain, strategy)
    assert chain.nodes[last].placements == {AXIS: Invariant()}
    generator = torch.Generator().manual_seed(0)
    tensors = {
        node.name: torch.randn([SIZES[n] for n in node.labels], generator=generator, dtype=torch.float64)
        for node in chain.nodes.values()
        if node.operation == "tensor"
    }
    reference = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    expected = on_one_device(chain, reference)[last]
    weight = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    (expected * weight).sum().backward()

    mine = {name: tensor.clone() for name, tensor in tensors.items()}
    found = on_ranks(chain, mine, num_ranks)
    torch.testing.assert_close(found[last][0], expected, rtol=1e-12, atol=1e-12)
    (found[last][0] * weight).sum().backward()
    for name in tensors:
        node = chain.nodes[name]
        placement = node.placements[AXIS]
        assert chain.gradient(name) == {AXIS: placement}
        grads = [part.grad for part in found[name]]
        whole = (
            grads[0]
            if isinstance(placement, Invariant)
            else torch.cat(grads, node.labels.index(placement.label))
        )
        torch.testing.assert_close(whole, reference[name].grad, rtol=1e-10, atol=1e-10)


def kinds(chain):
    forward = [move.forward.kind for move in chain.moves if move.forward and move.forward.sent_bytes]
    backward = [move.backward.kind for move in chain.moves if move.backward and move.backward.sent_bytes]
    return sorted(forward), sorted(backward)


def test_what_each_way_communicates():
    found = {}
    for strategy in ("megatron", "ulysses", "data"):
        chain = Chain({AXIS: 2}, SIZES)
        attention_block(chain, strategy)
        found[strategy] = kinds(chain)
    # Megatron's f and g; its own weights need nothing.
    assert found["megatron"] == (["all-reduce"], ["all-reduce"])
    # Four all-to-alls each way, the gather of the output, and the gradients of five weights.
    assert found["ulysses"] == (["all-gather"] + ["all-to-all"] * 4, ["all-reduce"] * 5 + ["all-to-all"] * 4)
    assert found["data"] == (["all-gather"], ["all-reduce"] * 5)


def test_bytes_and_flops_of_a_block():
    one, four = (Chain({AXIS: degree}, SIZES) for degree in (1, 4))
    for chain in (one, four):
        attention_block(chain, "megatron")
    assert one.sent_bytes == 0
    tokens = 6 * 4 * 5 * 2  # s, b, c in bf16: all-reduced once each way
    assert four.sent_bytes == 2 * 2 * 3 / 4 * tokens
    whole = 6 * 4 * 5  # the norm's weight is multiplied on every rank
    assert (one.flops - 3 * whole) / (four.flops - 3 * whole) == pytest.approx(4)


def column_parallel(chain):
    return chain.tensor("x", "sbi"), chain.tensor("w", "io", tp=Shard("o"))


def row_parallel(chain):
    x, w = chain.tensor("x", "sbi", tp=Shard("i")), chain.tensor("w", "io", tp=Shard("i"))
    return chain.einsum("y", "sbo", x, w)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda c: c.map("gelu", row_parallel(c)), "is not the sum of the functions; move y to I"),
        (lambda c: c.map("softmax", c.tensor("a", "bhst", tp=Shard("t")), along="t"), "needs whole rows along 't'"),
        (lambda c: c.einsum("y", "sbo", *column_parallel(c)), "make x R over tp (nothing in forward, an all-r"),
        (lambda c: c.add("z", c.tensor("x", "sb", tp=Shard("s")), c.tensor("y", "sb")), "do not lie alike; move one"),
        (lambda c: c.move("z", c.tensor("x", "sb", tp=Replicate()), tp=Invariant()), "gradient would come in terms"),
        (lambda c: c.move("z", c.tensor("x", "sb"), tp=Partial()), "terms are what an einsum leaves"),
        (lambda c: c.move("z", c.tensor("x", "sb"), tp=Shard("q")), "has no label 'q'"),
        (lambda c: c.move("z", c.tensor("x", "sb"), dp=Shard("s")), "there is no axis 'dp'; the axes are tp"),
        (lambda c: c.tensor("x", "sb", tp=Shard("q")), "has no label 'q'"),
        (lambda c: c.einsum("y", "s", "nothing"), "there is no tensor 'nothing' yet"),
        (lambda c: c.rename("y", c.tensor("x", "sb"), "s"), "x has 2 labels; got 's'"),
        (lambda c: [c.tensor("x", "sb"), c.tensor("x", "sb")], "has a tensor 'x' already"),
        (lambda c: c.tensor("x", "ss"), "x[ss] repeats the label 's'"),
        (lambda c: c.rename("y", c.tensor("x", "sb"), "tt"), "y[tt] repeats the label 't'"),
        (lambda c: c.map("m", c.tensor("s", "st"), along="T"), "s[st] has no label 'T' to run along"),
    ],
)  # fmt: skip
def test_a_step_that_cannot_be_is_refused_with_the_remedy(build, message):
    with pytest.raises(ValueError) as caught:
        build(Chain({AXIS: 2}))
    assert message in str(caught.value)


def test_a_rename_that_would_change_a_size_is_refused():
    chain = Chain({AXIS: 2}, {"s": 4, "t": 4, "u": 5})
    x = chain.tensor("x", "s")
    assert chain.rename("keys", x, "t") == "keys"
    with pytest.raises(ValueError, match="'s' of x is 4 and 'u' is 5; a rename changes letters and no sizes"):
        chain.rename("wrong", x, "u")


def test_what_no_step_communicates_is_told():
    """A weight that every rank holds beside a share of the batch, and a result that stays in terms."""
    chain = Chain({AXIS: 2}, {"s": 5, "b": 2, "i": 3, "o": 7}, element_bytes=4)
    x = chain.tensor("x", "sbi", tp=Shard("s"))
    chain.einsum("y", "sbo", x, chain.tensor("w", "io", tp=Replicate()))
    (of_weight,) = chain.pending
    assert (
        of_weight.direction == "backward"
        and of_weight.why == "w is R over tp, and its gradient comes in terms"
    )
    assert of_weight.collective.kind == "all-reduce" and chain.sent_bytes == 3 * 7 * 4
    rows = Chain({AXIS: 2}, {"s": 5, "i": 4, "o": 7}, element_bytes=4)
    x, w = rows.tensor("x", "si", tp=Shard("i")), rows.tensor("w", "io", tp=Shard("i"))
    rows.einsum("y", "so", x, w)
    (of_result,) = rows.pending
    assert (of_result.direction, of_result.why) == ("forward", "y is left in terms over tp")
    assert rows.sent_bytes == 5 * 7 * 4
    rows.move("out", "y", tp=Invariant())
    assert rows.pending == []


def test_uneven_shares_of_a_move_round_labels():
    chain = Chain({"dp": 2, "sp": 3}, {"b": 3, "s": 7, "h": 5}, element_bytes=2)
    x = chain.tensor("x", "bsh", dp=Shard("b"), sp=Shard("s"))
    chain.move("y", x, sp=Shard("h"))
    forward = chain.moves[0].forward
    # 2 of 3 clips; rank 0 of sp has 3 of 7 tokens and sends 3 of 5 heads; rank 2 has 2 tokens and sends 4 heads.
    assert forward.sent_bytes == 2 * 2 * max(3 * 3, 2 * 4)
