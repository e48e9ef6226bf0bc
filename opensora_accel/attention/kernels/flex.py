"""Pieces of any kind by torch's flex attention: one kernel that skips blocks of pairs which nobody sees.

Its block mask lists, for each 128 queries, the blocks of 128 keys that they see whole and those that they see in part.
Both follow from the pieces' geometry, by counting each block's pairs. Within a block that is seen in part a function
says of a pair whether it is seen: each query has a few runs of keys, so that is a look into tables. With blocks of two
queries and two keys for the mask on the left:

    # # . .     blocks of queries 0 1:   whole 0            runs of query 0: 0…2    query 2: 0…1 and 2…3
    # # . .     blocks of queries 2 3:   in part 0 and 1                  1: 0…2          3: 0…1 and 2…4
    # . # .
    # . # #     whole means 2 × 2 pairs, in part 1 to 3

A key mask is looked up beside the runs; then every block counts as seen in part.

Both operators, which torch's own `flex_attention` is made of, are called below autograd, because backward is to be
given the whole row's log-sum-exp. Theirs is to base 2: exp(score − lse) is 2^(score · log₂ e − lse · log₂ e). Run
without a compiler they hold all scores, so they run compiled or not at all.

Source: torch/_higher_order_ops/flex_attention.py and torch/nn/attention/flex_attention.py of torch 2.13.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from opensora_accel.attention.kernels.base import Grads, Problem, Scores, dense_rows
from opensora_accel.attention.slices import PieceFacts, Pieces
from opensora_accel.attention.slices.geometry import as_table, pairs_of_cells

BLOCK = 128
# Runs of keys that a query may have: each is two loads and two comparisons for every pair of a block seen in part.
MOST_RUNS = 16
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# What torch's `flex_attention` says too. Of its kernels the one in Triton has log-sum-exps to base 2, and none other
# takes grouped heads of any number.
_OPTIONS = {
    "BACKEND": "TRITON",
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": True,
    "OUTPUT_MAX": False,
}
_ONE_OVER_LN2 = 1 / math.log(2)


class Lookup(NamedTuple):
    """The pieces as flex attention reads them.

    Args:
        blocks: a block mask as a tuple, less its function: sizes, and for blocks of queries and then of keys how many
            are seen in part, which, how many whole, which.
        starts, stops: [S_q], where each query's first run of keys starts and stops, then its second one, …
    """

    blocks: tuple[Any, ...]
    starts: tuple[Tensor, ...]
    stops: tuple[Tensor, ...]


class FlexKernel:
    """`flex_attention` in Triton: fp32, fp16, bf16, any kind of piece, key masks, grouped heads, any head dim."""

    name = "flex attention"

    def refuses(self, problem: Problem, facts: PieceFacts) -> str | None:
        if problem.device.type != "cuda":
            return f"it runs on CUDA, the tensors are on {problem.device.type}"
        if problem.dtype not in _DTYPES:
            return f"it takes {', '.join(map(str, _DTYPES))}, not {problem.dtype}"
        if not all(16 <= dim <= 256 for dim in (problem.head_dim, problem.value_dim)):
            return f"it needs head dims from 16 to 256, not {problem.head_dim} and {problem.value_dim}"
        if facts.most_runs > MOST_RUNS:
            return f"a query has {facts.most_runs} runs of keys, of which {MOST_RUNS} can be looked up"
        if torch.cuda.get_device_capability(problem.device) < (8, 0):
            return "it needs an Ampere GPU or a newer one"
        return _unfit_compiler()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, pieces: Pieces
    ) -> tuple[Tensor, Tensor]:
        """[B, S, H, D] → output [B, S_q, H, D], log-sum-exp [B, H, S_q]."""
        out, lse = _run(_forward, (q, k, v), scores, pieces)
        return out.transpose(1, 2), lse / _ONE_OVER_LN2

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        scores: Scores,
        pieces: Pieces,
    ) -> Grads:
        """grad, out: [B, S_q, H, D]; lse: [B, H, S_q] → gradients [B, S, H, D] of q, k and v."""
        grads = _run(_backward, (grad, q, k, v, out), scores, pieces, lse.contiguous() * _ONE_OVER_LN2)
        grad_q, grad_k, grad_v = (tensor.transpose(1, 2) for tensor in grads)
        return grad_q, grad_k, grad_v


def _unfit_compiler() -> str | None:
    """What is missing to compile it."""
    if importlib.util.find_spec("triton") is None:
        return "it is compiled by Triton, which is not installed"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return (
            "Triton needs a C compiler, and there is no gcc or clang; name one in the environment variable CC"
        )
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1" or os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return "torch.compile is turned off by TORCH_COMPILE_DISABLE or TORCHDYNAMO_DISABLE"
    return None


def _run(
    function: Callable[..., Any], tensors: tuple[Tensor, ...], scores: Scores, pieces: Pieces, *lse: Tensor
) -> Any:
    """The compiled function of tensors [B, S, H, D]."""
    masked = scores.mask is not None
    lookup = pieces.kept(
        ("flex", masked, tensors[0].device), lambda: lookup_of(pieces, tensors[0].device, masked=masked)
    )
    # Detached, because what is compiled depends on what requires a gradient; it is called below autograd anyway.
    heads_first = [dense_rows(tensor).detach().transpose(1, 2) for tensor in tensors]
    for tensor in heads_first:
        # Of tokens and samples there may be any number; heads and their dim are the kernel's own.
        torch._dynamo.mark_static(tensor, 1)
        torch._dynamo.mark_static(tensor, 3)
    # One graph a dtype, number of heads, head dim, number of runs, with a mask and without.
    limits = torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=1024)
    with limits, torch.no_grad(), torch.autocast(tensors[0].device.type, enabled=False):
        return compiled(function)(*heads_first, *lse, lookup, scores.mask, scores.scale)


@lru_cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Its compiled form, which fails where it is run as it stands."""

    def traced(*args: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            raise RuntimeError(
                "flex attention would hold all scores without torch.compile, which is turned off here; turn it on, or "
                "leave slices= out"
            )
        return function(*args)

    return torch.compile(traced, fullgraph=True)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, lookup: Lookup, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """q, k, v: [B, H, S, D] → output, log-sum-exp [B, H, S_q] to base 2."""
    blocks = (*lookup.blocks, _function_of(lookup, mask))
    out, lse, *_ = torch.ops.higher_order.flex_attention(q, k, v, _score, blocks, scale, _OPTIONS)
    return out, lse


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    lookup: Lookup,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, ...]:
    """grad, q, k, v, out: [B, H, S, D]; lse: [B, H, S_q], to base 2 → gradients of q, k and v."""
    blocks = (*lookup.blocks, _function_of(lookup, mask))
    # The two None are the gradient of the log-sum-exp, and that of `_score`, which is derived from it.
    grads: tuple[Tensor, ...] = torch.ops.higher_order.flex_attention_backward(
        *(q, k, v, out, lse, grad, None, _score, None, blocks, scale, _OPTIONS, (), ())
    )
    return grads[:3]


def _score(score: Tensor, _sample: Tensor, _head: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
    return score


def _function_of(lookup: Lookup, mask: Tensor | None) -> Callable[..., Tensor]:
    """Whether a pair is seen; mask: [B, S_kv]."""

    def seen(sample: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        runs = zip(lookup.starts, lookup.stops, strict=True)
        start, stop = next(runs)
        found = (start[query] <= key) & (key < stop[query])
        for start, stop in runs:
            found = found | ((start[query] <= key) & (key < stop[query]))
        return found if mask is None else found & mask[sample, key]

    return seen


def lookup_of(pieces: Pieces, device: torch.device, *, masked: bool) -> Lookup:
    """The pieces as flex attention reads them, on a device; `masked`: no block counts as seen whole."""
    sizes = pieces.num_rows, pieces.num_keys
    # As many tables as the next power of two, so that few numbers of runs are compiled for.
    num_runs = 1 << (pieces.facts.most_runs - 1).bit_length()
    starts, stops = torch.zeros(2, num_runs, pieces.num_rows, dtype=torch.int32)
    for number, layer in enumerate(pieces.layers):
        for piece in layer:
            rows = torch.arange(piece.q_start, piece.q_stop)
            starts[number, piece.q_start : piece.q_stop] = (rows + piece.lower).clamp(min=piece.k_start)
            stops[number, piece.q_start : piece.q_stop] = (rows + piece.upper + 1).clamp(max=piece.k_stop)
    queries, keys = (_blocks_of(size) for size in sizes)
    rows, columns, pairs = pairs_of_cells(as_table(pieces.pieces), queries, keys)
    # A block that ends behind the last query or key counts as seen in part, as in torch's own block masks.
    whole = pairs == BLOCK * BLOCK
    whole = whole & (not masked)
    tables: dict[str, Any] = {}
    for name, one, other, *shape in (
        ("kv", rows, columns, len(queries), len(keys)),
        ("q", columns, rows, len(keys), len(queries)),
    ):
        for prefix, chosen in (("", ~whole), ("full_", whole)):
            counts, indices = _listed(one[chosen], other[chosen], *shape)
            tables[f"{prefix}{name}_num_blocks"], tables[f"{prefix}{name}_indices"] = counts, indices
    tables = {name: table.to(device) for name, table in tables.items()}
    # Only a block mask knows what else its tuple has, which differs from torch to torch.
    blocks = BlockMask(sizes, **tables, BLOCK_SIZE=(BLOCK, BLOCK)).as_tuple()
    of_runs = (tuple(table.to(device) for table in each.unbind()) for each in (starts, stops))
    return Lookup(blocks[:-1], *of_runs)


def _blocks_of(size: int) -> Tensor:
    """[N, 2]: where blocks start and stop."""
    starts = torch.arange(0, size, BLOCK)
    return torch.stack([starts, (starts + BLOCK).clamp(max=size)], 1)


def _listed(rows: Tensor, columns: Tensor, num_rows: int, num_columns: int) -> tuple[Tensor, Tensor]:
    """How many columns each row has, [1, 1, R], and which, [1, 1, R, C]; rows, columns: [M], in any order."""
    order = (rows * num_columns + columns).argsort()
    rows, columns = rows[order], columns[order]
    counts = rows.bincount(minlength=num_rows)
    places = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
    indices = torch.zeros(num_rows, num_columns, dtype=torch.int32)
    indices[rows, places] = columns.to(torch.int32)
    return counts.to(torch.int32)[None, None], indices[None, None]
