"""Exposed communication is what Holistic Trace Analysis computes, and what counting microseconds gives.

Holistic Trace Analysis reads traces of GPUs alone. So there is a synthetic one: kernels on a compute stream, with gaps,
and NCCL's on two streams that overlap them and each other. Its answers are those of HolisticTraceAnalysis 0.5.0,
`TraceAnalysis(trace_dir=FOLDER).get_comm_comp_overlap(visualize=False)`, on the folder that

    python -m tests.profiler.test_exposed FOLDER

writes: the share of the communication's time that lies under compute, in percent, rounded to two places.
"""

import gzip
import json
import random
import sys
from pathlib import Path

import pytest

from opensora_accel.profiler import exposed_seconds
from opensora_accel.profiler.intervals import length

OVERLAP_BY_HTA = {0: 86.12, 1: 87.05, 2: 88.01, 3: 88.10}
COMPUTE = ("ampere_bf16_gemm", "flash_fwd_kernel", "elementwise_kernel")
NCCL = {20: "ncclDevKernel_SendRecv(ncclDevComm*)", 24: "ncclDevKernel_AllGather_RING_LL(ncclDevComm*)"}


def kernels(seed):
    """Name, stream, start and duration, in microseconds."""
    rng, found, now = random.Random(seed), [], 1000
    for _ in range(150):
        duration = rng.randint(20, 200)
        found.append((rng.choice(COMPUTE), 7, now, duration))
        now += duration + (rng.randint(1, 60) if rng.random() < 0.5 else 0)
    for stream, name in NCCL.items():
        start = 1000 + rng.randint(0, 200)
        while start < now:
            duration = rng.randint(10, 300)
            found.append((name, stream, start, duration))
            start += duration + rng.randint(5, 400)
    return found


def write_traces(folder):
    """Traces as torch.profiler exports them, one a rank."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in OVERLAP_BY_HTA:
        events = [{"ph": "M", "name": "process_name", "pid": 100, "ts": 0, "args": {"name": "python"}}]
        for number, (name, stream, start, duration) in enumerate(kernels(rank), start=1):
            launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 100, "tid": 100}
            events.append(launch | {"ts": start - 5, "dur": 2, "args": {"correlation": number}})
            place = {"stream": stream, "correlation": number, "device": 0}
            kernel = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream}
            events.append(kernel | {"ts": start, "dur": duration, "args": place})
        info = {"backend": "nccl", "rank": rank, "world_size": len(OVERLAP_BY_HTA)}
        trace = {"schemaVersion": 1, "distributedInfo": info, "traceEvents": events}
        (folder / f"rank_{rank}.json.gz").write_bytes(gzip.compress(json.dumps(trace).encode()))


@pytest.mark.parametrize("rank", OVERLAP_BY_HTA)
def test_exposed_communication_is_that_of_holistic_trace_analysis(rank):
    found = kernels(rank)
    transfers = [(start, start + duration) for name, _, start, duration in found if name.startswith("nccl")]
    compute = [(start, start + duration) for name, _, start, duration in found if not name.startswith("nccl")]
    exposed = exposed_seconds(compute, transfers)
    microseconds = {t for start, end in transfers for t in range(start, end)}
    assert length(transfers) == len(microseconds)
    assert exposed == len(microseconds - {t for start, end in compute for t in range(start, end)})
    assert 100 * (1 - exposed / length(transfers)) == pytest.approx(OVERLAP_BY_HTA[rank], abs=0.006)


if __name__ == "__main__":
    write_traces(Path(sys.argv[1]))
