"""A stand-in for MagiAttention's kernel, with the parameters of two releases and its demands, in plain maths.

Source: magi_attention/functional/flex_flash_attn.py and csrc/flexible_flash_attention/flex_flash_{fwd,bwd}.hpp of
SandAI-org/MagiAttention at v1.0.5 and v1.1.1.
"""

import sys
import types

import torch

from tests.attention import seen

KINDS = ("full", "causal", "inverse causal", "band")
RELEASES = {
    "1.0.5": (
        "q k v sink out lse q_ranges k_ranges attn_type_map merge_q_ranges qk_map fwd_unique_count ref_block_size "
        "softmax_scale softcap disable_fwd_atomic_reduction out_type deterministic sm_margin",
        "dout q k v sink out dq dk dv dsink lse q_ranges k_ranges attn_type_map merge_k_ranges bwd_kq_map "
        "bwd_unique_count softmax_scale softcap disable_bwd_dkv_atomic_reduction dq_type dk_type dv_type deterministic "
        "sm_margin",
    ),
    "1.1.1": (
        "q k v sink sink_layout out lse q_ranges k_ranges attn_type_map softmax_scale softcap out_type "
        "disable_fwd_atomic_reduction deterministic sm_margin ref_block_size=None max_seqlen_q=None "
        "auto_range_merge=False merge_q_ranges=None return_max_logits=False max_logits=None",
        "dout q k v sink sink_layout out lse dq dk dv dsink q_ranges k_ranges attn_type_map softmax_scale softcap "
        "dq_type dk_type dv_type disable_bwd_dkv_atomic_reduction deterministic sm_margin auto_range_merge=False",
    ),
}


def pieces(given):
    """Rows, keys and what is seen of each piece, after the checks of the kernel."""
    operands = [given[name] for name in ("q", "k", "v")]
    assert all(tensor.dim() == 3 and tensor.stride(-1) == 1 for tensor in operands)
    ranges = given["q_ranges"], given["k_ranges"]
    for tensor in (*ranges, given["attn_type_map"]):
        assert tensor.dtype == torch.int32 and tensor.is_contiguous()
    assert ranges[0].shape == ranges[1].shape == (len(given["attn_type_map"]), 2)
    assert type(given["deterministic"]) is bool and given["softcap"] == 0.0 and given["sm_margin"] == 0
    assert given["sink"] is None and given.get("sink_layout", "sh") == "sh"
    for rows, keys, kind in zip(
        *(tensor.tolist() for tensor in (*ranges, given["attn_type_map"])), strict=True
    ):
        assert 0 <= rows[0] < rows[1] <= len(operands[0]) and 0 <= keys[0] < keys[1] <= len(operands[1])
        yield slice(*rows), slice(*keys), seen.seen_by(rows[1] - rows[0], keys[1] - keys[0], KINDS[kind])


def forward(given, wide):
    q, k, v, scale = (given[name] for name in ("q", "k", "v", "softmax_scale"))
    assert given["out"] is given["lse"] is None and given["out_type"] == torch.float32
    # Without it runs of queries must not overlap.
    assert given["disable_fwd_atomic_reduction"] is False
    allowed = torch.zeros(len(q), len(k), dtype=torch.bool)
    for rows, keys, part in pieces(given):
        assert not (allowed[rows, keys] & part).any(), "a pair counts twice"
        allowed[rows, keys] |= part
    out, lse = seen.forward(q, k, v, scale, allowed)
    # What no piece has is not written.
    out[~allowed.any(1)] = torch.nan
    return out if wide else out.float(), lse.t().contiguous()


def backward(given):
    dout, q, k, v, out, lse, scale = (
        given[name] for name in ("dout", "q", "k", "v", "out", "lse", "softmax_scale")
    )
    assert dout.stride(-1) == out.stride(-1) == lse.stride(-1) == 1 and lse.shape == q.shape[:2]
    assert lse.is_contiguous() and given["dq"] is given["dk"] is given["dv"] is given["dsink"] is None
    assert {given[f"d{name}_type"] for name in "qkv"} == {torch.float32}
    assert given["disable_bwd_dkv_atomic_reduction"] is False
    grads = [torch.zeros_like(tensor) for tensor in (q, k, v)]
    for rows, keys, part in pieces(given):
        found = seen.backward(dout[rows], q[rows], k[keys], v[keys], out[rows], lse[rows].t(), scale, part)
        for total, of_part, run in zip(grads, found, (rows, keys, keys), strict=True):
            total[run] += of_part
    return (*grads, None)


def install(monkeypatch, release="1.1.1", *, leave_out=""):
    """Puts a release where it is imported from; it computes in the dtype that it is given, fp64 too."""
    name = "magi_attention.functional.flex_flash_attn"
    module = types.ModuleType(name)
    calls = []

    def meta(out, lse):
        return (out, types.SimpleNamespace(lse=lse)) if release == "1.1.1" else (out, lse)

    halves = {
        "forward": lambda **given: calls.append(given) or meta(*forward(given, wide=True)),
        "backward": lambda **given: backward(given),
    }
    for (half, run), parameters in zip(halves.items(), RELEASES[release], strict=True):
        chosen = [each for each in parameters.split() if each != leave_out]
        names = [each.partition("=")[0] for each in chosen]
        scope = {"run": run}
        exec(
            f"def function({', '.join(chosen)}): return run({', '.join(f'{each}={each}' for each in names)})",
            scope,
        )
        setattr(module, f"_flex_flash_attn_{half}", scope["function"])
    package = types.ModuleType("magi_attention")
    package.__version__ = release
    functional = types.ModuleType("magi_attention.functional")
    functional.flex_flash_attn = module
    for path, each in (
        ("magi_attention", package),
        ("magi_attention.functional", functional),
        (name, module),
    ):
        monkeypatch.setitem(sys.modules, path, each)
    return calls
