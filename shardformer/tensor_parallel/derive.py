"""What a sharded layer communicates, found from its einsum by the rules of `opensora_accel.sharding`.

A linear layer is `"si,oi->so"`: tokens `s`, inputs `i`, outputs `o`, and the weight as torch stores it. The tensor
ranks compute one loss, so what enters and leaves a region is Invariant. Everything else is derived: an Invariant
must become Replicate before it meets shards (which sums its gradient), and terms must be summed before anything that
is not linear, or a bias, meets them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from opensora_accel.communications import copy_forward_reduce_backward, reduce_forward_copy_backward
from opensora_accel.sharding import Chain, Invariant, Partial, Placement, Replicate, Shard

AXIS = "tp"
Exchange = Callable[[Tensor, dist.ProcessGroup], Tensor]

# By what the calculator asks for in forward and in backward.
_EXCHANGES: dict[tuple[str, str], Exchange] = {
    ("copy", "all-reduce"): copy_forward_reduce_backward,
    ("all-reduce", "copy"): reduce_forward_copy_backward,
}


@dataclass(frozen=True)
class Flow:
    """What a linear layer does to its input, to its product before the bias, and where the result lies."""

    enter: Exchange | None
    leave: Exchange | None
    output: Placement


def derive_path(steps: Sequence[Sequence[tuple[str, str]]]) -> list[list[Flow]]:
    """For layers one after another, Invariant before and after: what each communicates.

    Args:
        steps: of layers side by side, each its name and the label along which its weight is cut: "o" or "i".

    Raises:
        ValueError: shares that a layer cannot take, or that nobody takes, in the calculator's words.
    """
    # What enters a region is whole and the same on all tensor ranks.
    given: Placement = Invariant()
    flows = []
    for layers in steps:
        derived = [derive_linear(name, Shard(label), given) for name, label in layers]
        name, output = layers[0][0], derived[0].output
        assert all(flow.output == output for flow in derived)  # one input leaves one label to cut along
        # A next layer sums over what this one's outputs are cut along.
        given = Shard("i") if output == Shard("o") else output  # outputs are the next layer's inputs
        flows.append(derived)
    if given != Invariant():
        raise ValueError(
            f"the region ends with {name} sharded along 'o' over {AXIS}, and whole tensors leave it; add a step with "
            "the RowParallel layer that takes these shares"
        )
    return flows


def derive_linear(name: str, weight: Placement, given: Placement) -> Flow:
    """What one layer communicates, with its weight `"oi"` and its input `"si"` placed so over the tensor ranks.

    Raises:
        ValueError: the layer cannot take its input so.
    """
    chain = Chain({AXIS: 2})  # the rules are the same for any degree, the letters for any layer
    x = chain.tensor(f"the input of {name}", "si", tp=given)
    chain.tensor(f"{name}.weight", "oi", tp=weight)
    enter = leave = None
    # Free in forward. In backward each rank has the part of the gradient that came through its channels.
    if isinstance(given, Invariant):
        x, enter = _move(chain, x, Replicate())
    out = chain.einsum(f"the product of {name}", "so", x, f"{name}.weight")
    # A row-parallel layer leaves a term on each rank. Its sum is the same on all, and so is its gradient.
    if isinstance(_placement(chain, out), Partial):
        out, leave = _move(chain, out, Invariant())
    add_bias(chain, name, out)
    return Flow(enter, leave, _placement(chain, out))


def add_bias(chain: Chain, name: str, product: str) -> str:
    """Adds a bias, cut as the product is. A product in terms refuses: every rank would add the whole bias."""
    is_shard = isinstance(_placement(chain, product), Shard)
    bias = chain.tensor(f"{name}.bias", "o", tp=Shard("o") if is_shard else Invariant())
    ones = chain.tensor("a one for every token", "s", tp=Replicate() if is_shard else Invariant())
    of_tokens = chain.einsum(f"the bias of {name}", "so", ones, bias)
    return chain.add(f"the output of {name}", product, of_tokens)


def derive_shared() -> Exchange:
    """What a parameter needs that is whole on every rank and multiplies shares: the scale of a norm of single heads."""
    chain = Chain({AXIS: 2})
    heads = chain.tensor("the heads", "shd", tp=Shard("h"))
    scale, exchange = _move(chain, chain.tensor("the scale", "d"), Replicate())
    chain.einsum("the scaled heads", "shd", heads, scale)
    return exchange


def _placement(chain: Chain, name: str) -> Placement:
    return chain.nodes[name].placements[AXIS]


def _move(chain: Chain, name: str, after: Placement) -> tuple[str, Exchange]:
    """The tensor placed otherwise, and the function that does this to it and its opposite to its gradient."""
    moved = chain.move(f"{name} as {after}", name, tp=after)
    forward, backward = chain.moves[-1].forward, chain.moves[-1].backward
    assert forward is not None and backward is not None
    return moved, _EXCHANGES[forward.kind, backward.kind]
