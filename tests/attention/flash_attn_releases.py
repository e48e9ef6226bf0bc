"""Stand-ins for the releases of flash-attn, with their own signatures and numbers of outputs, in plain maths.

Source: flash_attn/flash_attn_interface.py and hopper/flash_attn_interface.py of Dao-AILab/flash-attention at v2.6.3,
v2.7.4, v2.8.3 and its main branch of August 2026. The newer ones are operators of torch, as there.
"""

import functools
import sys
import types
from typing import Any

import torch
from torch import Tensor

from opensora_accel.attention.kernels import Scores
from opensora_accel.attention.kernels.plain import PlainKernel
from tests.attention import seen

PLAIN = PlainKernel()
OPTIONAL = (
    "cu_seqlens_q cu_seqlens_k cu_seqlens_k_new seqused_q seqused_k max_seqlen_q max_seqlen_k page_table kv_batch_idx "
    "leftpad_k rotary_cos rotary_sin"
)
DESCALES = "q_descale k_descale v_descale softmax_scale causal"
BACK = "dout q k v out softmax_lse"
BACK3 = f"{BACK} cu_seqlens_q cu_seqlens_k sequed_q sequed_k max_seqlen_q max_seqlen_k dq dk dv softmax_scale"
WINDOW = "window_size=(-1,-1)"
END3 = "rotary_interleaved=True {} num_splits=1 pack_gqa=None sm_margin=0"

# Parameters of forward and backward, in their order; = gives the default.
SIGNATURES = {
    "2.6": (
        "q k v dropout_p softmax_scale causal window_size softcap alibi_slopes return_softmax",
        f"{BACK} dq dk dv dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic rng_state=None",
    ),
    "3, of 2.7.4": (
        f"q k v k_new v_new out {OPTIONAL} {DESCALES} {WINDOW} sink_token_length=0 softcap=0.0 {END3.format('')}",
        f"{BACK3} causal {WINDOW} sink_token_length=0 softcap=0.0 deterministic=False sm_margin=0",
    ),
    "3, of 2.8": (
        f"q k v k_new v_new qv out {OPTIONAL} seqlens_rotary {DESCALES} {WINDOW} attention_chunk=0 softcap=0.0 "
        + END3.format("scheduler_metadata=None"),
        f"{BACK3} causal {WINDOW} softcap=0.0 deterministic=False sm_margin=0",
    ),
}

TWO = "Tensor q, Tensor k, Tensor v"
OPERATORS = {
    "2.7": (
        f"({TWO}, float dropout_p, float softmax_scale, bool causal, SymInt window_size_left, SymInt "
        "window_size_right, float softcap, Tensor? alibi_slopes, bool return_softmax) -> (Tensor, Tensor, Tensor, "
        "Tensor)",
        f"(Tensor dout, {TWO}, Tensor out, Tensor softmax_lse, Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv, float "
        "dropout_p, float softmax_scale, bool causal, SymInt window_size_left, SymInt window_size_right, float "
        "softcap, Tensor? alibi_slopes, bool deterministic, Tensor? rng_state=None) -> Tensor",
    ),
    "3, operators": (
        f"({TWO}, "
        + "".join(
            f"Tensor? {name}=None, "
            for name in ["k_new", "v_new", "qv", "out_", "cu_seqlens_q", "cu_seqlens_k"]
        )
        + "SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, Tensor? page_table=None, float? softmax_scale=None, "
        "bool causal=False, SymInt window_size_left=-1, SymInt window_size_right=-1, SymInt attention_chunk=0, float "
        "softcap=0.0, bool "
        "rotary_interleaved=True, SymInt num_splits=1, bool? pack_gqa=None, SymInt sm_margin=0) -> (Tensor, Tensor, "
        "Tensor, Tensor)",
        f"(Tensor dout, {TWO}, Tensor out, Tensor softmax_lse, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
        "Tensor? sequed_q=None, SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, Tensor(a!)? dq=None, "
        "Tensor(b!)? dk=None, Tensor(c!)? "
        "dv=None, float? softmax_scale=None, bool is_causal=False, SymInt window_size_left=-1, SymInt "
        "window_size_right=-1, float softcap=0.0, bool deterministic=False, SymInt sm_margin=0) -> Tensor",
    ),
}
OPERATORS["2.8"] = OPERATORS["2.7"]
RELEASES = [*SIGNATURES, *OPERATORS]

# Of version 2 the functions for samples of different lengths; version 3 has them in one with the others.
LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
OF_LENGTHS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
VARLEN_SIGNATURES = {
    "2.6": (
        f"q k v {LENGTHS} dropout_p softmax_scale causal {WINDOW} softcap=0.0 alibi_slopes=None return_softmax=False "
        "block_table=None leftpad_k=None seqused_k=None",
        f"{BACK} dq dk dv {LENGTHS} dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic "
        "rng_state=None",
    ),
}
VARLEN_OPERATORS = {
    "2.7": (
        f"({TWO}, {OF_LENGTHS}, float dropout_p, float softmax_scale, bool causal, SymInt window_size_left=-1, SymInt "
        "window_size_right=-1, float softcap=0.0, Tensor? alibi_slopes=None, bool return_softmax=False, Tensor? "
        "block_table=None, Tensor? leftpad_k=None, Tensor? seqused_k=None, bool zero_tensors=False) -> "
        "(Tensor, Tensor, Tensor, Tensor)",
        f"(Tensor dout, {TWO}, Tensor out, Tensor softmax_lse, Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv, "
        f"{OF_LENGTHS}, float dropout_p, float softmax_scale, bool causal, SymInt window_size_left, SymInt "
        "window_size_right, float softcap, Tensor? alibi_slopes, bool deterministic, Tensor? rng_state=None, bool "
        "zero_tensors=False) -> Tensor",
    ),
}
VARLEN_OPERATORS["2.8"] = VARLEN_OPERATORS["2.7"]

_operators: dict[tuple[str, bool], Any] = {}


def lengths_of(given: dict[str, Any]) -> tuple[Any, ...] | None:
    """Where samples start, and the longest ones; all of these are given, or none is."""
    lengths = tuple(given.get(name) for name in LENGTHS.split())
    if lengths[0] is None:
        assert set(lengths) == {None}
        return None
    return lengths


def forward(**given: Any) -> tuple[Tensor, Tensor]:
    check(given)
    q, k, v = (given[name] for name in "qkv")
    if (lengths := lengths_of(given)) is not None:
        # What version 2 says of rows without keys, and what version 3 does, which alone knows of a `k_new`.
        lse_of_none = -torch.inf if "k_new" in given else torch.inf
        return seen.varlen_forward(q, k, v, lengths, given["softmax_scale"], given["causal"], lse_of_none)
    return PLAIN.forward(q, k, v, Scores(given["softmax_scale"], causal=given["causal"]))


def backward(**given: Any) -> None:
    check(given)
    q, k, v, dout, out, lse = (given[name] for name in ("q", "k", "v", "dout", "out", "softmax_lse"))
    assert lse.is_contiguous() and isinstance(given["deterministic"], bool)
    causal = given["is_causal"] if "is_causal" in given else given["causal"]
    if (lengths := lengths_of(given)) is not None:
        grads = seen.varlen_backward(dout, q, k, v, out, lse, lengths, given["softmax_scale"], causal)
    else:
        grads = PLAIN.backward(dout, q, k, v, out, lse, Scores(given["softmax_scale"], causal=causal))
    for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
        given[name].copy_(grad)


def check(given: dict[str, Any]) -> None:
    """Whatever is not asked for is off."""
    neutral = {"window_size": (-1, -1), "window_size_left": -1, "window_size_right": -1, "softcap": 0.0}
    neutral |= {"dropout_p": 0.0, "return_softmax": False, "sink_token_length": 0, "sm_margin": 0}
    for name, value in given.items():
        if name in neutral:
            assert value == neutral[name], name
        elif name not in LENGTHS and any(
            part in name for part in ("seq", "new", "page", "qv", "leftpad", "rotary_", "descale", "alibi")
        ):
            assert value is None or name == "rotary_interleaved", name


def functions(release: str, signatures: dict[str, tuple[str, str]] = SIGNATURES) -> tuple[Any, Any]:
    """Forward and backward as Python functions with the release's parameters."""
    num_outputs = 8 if release == "2.6" else 4
    made = []
    for half, parameters in zip((forward, backward), signatures[release], strict=True):
        names = [parameter.partition("=")[0] for parameter in parameters.split()]
        scope: dict[str, Any] = {"half": half}
        given = ", ".join(f"{name}={name}" for name in names)
        exec(f"def function({', '.join(parameters.split())}):\n    return half({given})", scope)
        made.append(scope["function"])
    if num_outputs == 4:
        return tuple(made)
    few = made[0]

    @functools.wraps(few)
    def many(**given: Any) -> tuple[Any, ...]:
        out, lse = few(**given)
        return out, given["q"], given["k"], given["v"], out, lse, None, None

    return many, made[1]


def operators(release: str, schemas: dict[str, tuple[str, str]] = OPERATORS) -> tuple[Any, Any]:
    """Forward and backward as operators of torch; they stay for the rest of the process."""
    key = release, schemas is OPERATORS
    if key not in _operators:
        name = f"flash_attn_stand_in_{release[0]}_{len(_operators)}"

        made = []
        for half, schema in zip((forward, backward), schemas[release], strict=True):
            arguments = torch._C.parse_schema(f"f{schema}").arguments

            def run(*args: Any, half: Any = half, arguments: Any = arguments) -> Any:
                # torch leaves out the last ones where they are at their defaults.
                missing = [argument.default_value for argument in arguments[len(args) :]]
                names = [argument.name for argument in arguments]
                outputs = half(**dict(zip(names, [*args, *missing], strict=True)))
                empty = args[0].new_empty(0)
                return empty if outputs is None else (*outputs, empty, empty.clone())

            mutates = () if half is forward else ("dq", "dk", "dv")
            made.append(
                torch.library.custom_op(f"{name}::{half.__name__}", run, mutates_args=mutates, schema=schema)
            )
        _operators[key] = tuple(made)
    return _operators[key]


def install(monkeypatch: Any, release: str, pair: tuple[Any, Any] | None = None) -> types.ModuleType:
    """Puts a release where it is imported from; `pair`: with other functions than its own."""
    name = "flash_attn_interface" if release.startswith("3") else "flash_attn.flash_attn_interface"
    module = types.ModuleType(name)
    pair = pair or (operators(release) if release in OPERATORS else functions(release))
    module._flash_attn_forward, module._flash_attn_backward = pair  # type: ignore[attr-defined]
    if release in VARLEN_OPERATORS or release in VARLEN_SIGNATURES:
        of_lengths = (
            operators(release, VARLEN_OPERATORS)
            if release in VARLEN_OPERATORS
            else functions(release, VARLEN_SIGNATURES)
        )
        module._flash_attn_varlen_forward, module._flash_attn_varlen_backward = of_lengths  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    if not release.startswith("3"):
        package = types.ModuleType("flash_attn")
        package.__version__ = f"{release}.3"  # type: ignore[attr-defined]
        package.flash_attn_interface = module  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "flash_attn", package)
    return module
