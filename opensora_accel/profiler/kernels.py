"""Which kernels a traced step ran, by name and by kind: from the trace that torch's profiler left (`trace_steps`).

On a GPU a kernel takes what the trace says. On a CPU operators are nested, and each counts for the time in which none
within it ran:

    aten::linear   |-------------------|      2 µs of its own
    aten::addmm     |------------------|      9 µs
"""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from opensora_accel.documents import open_plain
from opensora_accel.profiler.analysis import Kernels, KernelTime
from opensora_accel.profiler.rank_summary import RankSummary

# A GPU's events; where there are none, operators of the host are counted.
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_MOST_BYTES, _MOST_NAMES = 1 << 30, 200
# The first that is found in a name says what it is. Names are those of torch, cuBLAS, CUTLASS, cuDNN, FlashAttention,
# NCCL, Triton as the inductor names its kernels, and torch's own operators.
_KINDS = (
    ("collectives", r"nccl|c10d::|gloo|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all"),
    ("attention", r"attention|flash_?(fwd|bwd|attn|fprop|bprop)|fmha|mha_|sdpa"),
    ("optimizer", r"multi_tensor|_fused_adam|_foreach|fused_sgd|Optimizer"),
    ("matrix products", r"gemm|cutlass|cublas|nvjet|xmma|matmul|gemv|aten::(mm|addmm|bmm|baddbmm|linear)\b|splitK"),
    ("convolutions", r"conv"),
    ("norms", r"norm"),
    ("copies", r"memcpy|memset|copy_|CatArray|aten::(cat|clone|contiguous|to|_to_copy|fill_|zero_)\b|direct_copy"),
    ("reductions", r"reduce|triton_(red|per)_|aten::(sum|mean|max|min|amax|any|all)\b|softmax"),
    (
        "elementwise",
        r"elementwise|triton_poi_|gelu|silu|aten::(add|sub|mul|div|neg|pow|exp|sin|cos|where|sqrt|rsqrt|addcmul|sigmoid|"
        r"tanh|threshold_backward)_?\b",
    ),
    ("views and the engine", r"aten::(view|reshape|t|transpose|expand|slice|as_strided|empty\w*|select|split\w*|chunk|"
     r"permute|unsqueeze|squeeze|detach|narrow|resize_|_unsafe_view)\b|autograd::|Backward\d*$"),
)  # fmt: skip


def kernels_of(folder: Path, ranks: Sequence[RankSummary]) -> Kernels | None:
    """The kernels of the first trace in the folder that belongs to a step of these ranks.

    Raises:
        ValueError: the trace is damaged, larger than a gigabyte, or no plain file in the folder.
    """
    known = {(rank.run.rank, step.step): step.seconds for rank in ranks for step in rank.steps}
    for path in sorted(folder.glob("trace_rank_*.json.gz")):
        found = re.fullmatch(r"trace_rank_(\d+)_step_(\d+)\.json\.gz", path.name)
        place = (int(found[1]), int(found[2])) if found else None
        if place in known:
            return kernels_in(_events(path), *place, known[place])
    return None


def kernels_in(events: Sequence[dict[str, Any]], rank: int, step: int, step_s: float) -> Kernels:
    """The kernels among the events of a trace."""
    gpu = [
        (each["name"], each["dur"] / 1e6) for each in events if each.get("cat") in _ON_GPU and "dur" in each
    ]
    timed = gpu or list(_own_times(each for each in events if each.get("cat") == "cpu_op" and "dur" in each))
    by_name: dict[str, list[float]] = defaultdict(list)
    by_kind: dict[str, list[float]] = defaultdict(list)
    for name, seconds in timed:
        by_name[name].append(seconds)
        by_kind[kind_of(name)].append(seconds)

    def row(name: str, kind: str, times: Sequence[float]) -> KernelTime:
        return KernelTime(name, kind, len(times), sum(times), sum(times) / step_s if step_s > 0 else 0.0)

    names = sorted(
        (row(name, kind_of(name), times) for name, times in by_name.items()), key=lambda each: -each.seconds
    )
    kinds = sorted(
        (row(kind, kind, times) for kind, times in by_kind.items()), key=lambda each: -each.seconds
    )
    return Kernels(rank, step, step_s, bool(gpu), kinds, names[:_MOST_NAMES], len(names))


def kind_of(name: str) -> str:
    """What a kernel or operator is for."""
    return next((kind for kind, pattern in _KINDS if re.search(pattern, name, re.IGNORECASE)), "other")


def _own_times(events: Iterable[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """Each operator's seconds without those that ran within it, on its thread."""
    threads: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    for each in events:
        threads[each.get("pid"), each.get("tid")].append((each["ts"], each["ts"] + each["dur"], each["name"]))
    for spans in threads.values():
        # The one that is around others comes before them.
        spans.sort(key=lambda span: (span[0], -span[1]))
        around: list[list[Any]] = []
        for start, end, name in spans:
            while around and around[-1][1] <= start:
                yield _closed(around.pop())
            if around:
                around[-1][2] -= min(end, around[-1][1]) - start
            around.append([name, end, end - start])
        for span in around:
            yield _closed(span)


def _closed(span: Sequence[Any]) -> tuple[str, float]:
    name, _end, left = span
    return name, max(0.0, left) / 1e6


def _events(path: Path) -> list[dict[str, Any]]:
    with open_plain(path, inside=path.parent) as file, gzip.open(file) as unpacked:
        try:
            text = unpacked.read(_MOST_BYTES + 1)
            if len(text) > _MOST_BYTES:
                raise ValueError(
                    f"{path} has more than {_MOST_BYTES:,} bytes; trace fewer steps, or move it away"
                )
            return [each for each in json.loads(text)["traceEvents"] if isinstance(each, dict)]
        except (OSError, EOFError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is no trace of torch's profiler ({error}); move it away") from error
