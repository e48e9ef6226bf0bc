"""Torch and its GPUs, communication, threads, memory and disk."""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from opensora_accel.doctor.finding import Finding, read_text, size_text

LEAST_SHARED_BYTES = 2 * 2**30
LEAST_DISK_BYTES = 20 * 2**30
LEAST_MEMORY_BYTES = 8 * 2**30
LEAST_LOCKED_BYTES = 2**30


def nvidia_driver_present() -> bool:
    return shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia").exists()


def check_torch(version: str, cuda: str | None, python: str, driver: bool) -> Finding:
    built_for = f"CUDA {cuda}" if cuda else ("ROCm" if torch.version.hip else "CPU only")
    message = f"torch {version} ({built_for}), Python {python}"
    if driver and built_for == "CPU only":
        return Finding(
            "torch",
            "problem",
            f"{message}, but this machine has an NVIDIA driver: the GPUs would stay unused",
            "install a CUDA build of torch: choose your CUDA version on PyTorch's 'Get started' page, "
            "and run its pip command with --force-reinstall",
        )
    return Finding("torch", "ok", message)


@dataclasses.dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: int
    capability: tuple[int, int]

    @property
    def computes_bf16(self) -> bool:
        return self.capability >= (8, 0)


def read_gpus() -> list[Gpu]:
    if not torch.cuda.is_available():
        return []
    try:
        found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    except RuntimeError:  # the driver answers, but a device does not
        return []
    return [Gpu(p.name, p.total_memory, (p.major, p.minor)) for p in found]


def read_links() -> dict[tuple[int, int], str]:
    """Pairs of GPUs and how they are joined, by nvidia-smi; where it is silent, by peer access."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        return {}
    links = parse_topology(_output_of("nvidia-smi", "topo", "-m"))
    if links:
        return links
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    try:
        return {
            (a, b): "peer" if torch.cuda.can_device_access_peer(a, b) else "through the host"
            for a, b in pairs
        }
    except RuntimeError:
        return {}


def _output_of(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=4, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """The matrix of `nvidia-smi topo -m`: NV# is NVLink, PIX to NODE is PCIe, SYS crosses the sockets."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
    columns = re.findall(r"\bGPU(\d+)\b", lines[0]) if lines else []
    links = {}
    for line in lines[1:]:
        row = re.match(r"GPU(\d+)\s+(.*)", line.strip())
        if row:
            for column, link in zip(columns, row[2].split(), strict=False):
                if int(row[1]) < int(column):
                    links[int(row[1]), int(column)] = link
    return links


def check_gpus(gpus: Sequence[Gpu], links: Mapping[tuple[int, int], str]) -> list[Finding]:
    if not gpus:
        return [
            Finding(
                "GPUs", "note", "none: training runs on the CPU, which is for trying out small models only"
            )
        ]
    findings = []
    for gpu in dict.fromkeys(gpus):
        compute = ".".join(map(str, gpu.capability))
        size = f"{gpus.count(gpu)} × {gpu.name}, {size_text(gpu.memory_bytes)}, compute {compute}"
        if gpu.computes_bf16:
            findings.append(Finding("GPUs", "ok", f"{size}, computes bf16"))
        else:
            remedy = "train in fp32, or on a GPU of compute capability 8.0 or more"
            findings.append(Finding("GPUs", "problem", f"{size}: bf16 is emulated and slow", remedy))
    if len(set(gpus)) > 1:
        findings.append(Finding("GPUs", "note", "the GPUs differ: every step waits for the slowest of them"))
    if links:
        findings.append(_check_links(links))
    return findings


def _check_links(links: Mapping[tuple[int, int], str]) -> Finding:
    kinds = sorted(set(links.values()))
    counts = ", ".join(f"{list(links.values()).count(kind)} pairs {kind}" for kind in kinds)
    if all(kind.startswith("NV") or kind == "peer" for kind in kinds):
        return Finding("GPU links", "ok", counts)
    return Finding(
        "GPU links",
        "note",
        f"{counts}: some pairs talk over PCIe or the host, where sequence parallelism is slow",
        "keep each sequence-parallel group on GPUs joined by NVLink (NV# in `nvidia-smi topo -m`)",
    )


def try_gloo() -> str:
    """An all_reduce on a group of one that nobody else sees: empty when it works, else the error."""
    if not dist.is_available() or not dist.is_gloo_available():
        return "torch was built without gloo"
    try:
        # Not init_process_group: a group that is already running must not notice.
        group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, datetime.timedelta(seconds=5))
        tensor = torch.ones(1)
        group.allreduce([tensor]).wait()  # type: ignore[attr-defined]  # missing in the stub only
    except (RuntimeError, ValueError) as error:
        return str(error).splitlines()[0]
    return "" if tensor.item() == 1.0 else f"an all_reduce over one rank turned 1 into {tensor.item()}"


def check_communication(gloo: bool, nccl: bool, has_cuda: bool, gloo_error: str) -> list[Finding]:
    findings = []
    if gloo_error:
        findings.append(
            Finding(
                "gloo",
                "problem",
                f"a group of one CPU process cannot start: {gloo_error}",
                "if this host's name does not resolve, name an interface: GLOO_SOCKET_IFNAME=lo on one machine",
            )
        )
    elif gloo:
        findings.append(Finding("gloo", "ok", "started, and an all_reduce gave the right sum"))
    if has_cuda and not nccl:
        remedy = "install PyTorch's build for Linux; several GPUs cannot train together without NCCL"
        findings.append(Finding("NCCL", "problem", "torch was built without NCCL", remedy))
    elif has_cuda:
        findings.append(Finding("NCCL", "ok", "built into torch (not started here)"))
    return findings


def usable_cores() -> int:
    """Cores this process may use: its affinity, and a container's quota where there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = read_text("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit():
        cores = min(cores, max(1, math.ceil(int(quota[0]) / int(quota[1]))))
    return cores


def check_threads(*, ranks: int, threads: int, cores: int, omp_num_threads: str | None) -> Finding:
    setting = f"OMP_NUM_THREADS={omp_num_threads}" if omp_num_threads else "OMP_NUM_THREADS is not set"
    message = f"{ranks} rank(s) on this machine × {threads} thread(s), {cores} core(s), {setting}"
    if ranks * threads <= cores:
        return Finding("threads", "ok", message)
    return Finding(
        "threads",
        "problem",
        f"{message}: threads wait for each other's core. Measured: a model that takes 3 ms took 200 ms",
        f"set OMP_NUM_THREADS={max(1, cores // ranks)} before starting"
        + (f", and start no more than {cores} ranks here" if ranks > cores else ""),
    )


@dataclasses.dataclass(frozen=True)
class Resources:
    """None means that it could not be read, or that there is no limit (`locked_bytes`)."""

    free_disk_bytes: int | None = None
    shared_bytes: int | None = None
    locked_bytes: int | None = None
    free_memory_bytes: int | None = None


def read_resources() -> Resources:
    available = re.search(r"MemAvailable:\s+(\d+) kB", read_text("/proc/meminfo"))
    return Resources(
        free_disk_bytes=_disk_usage(".", "free"),
        shared_bytes=_disk_usage("/dev/shm", "total"),
        locked_bytes=_locked_limit(),
        free_memory_bytes=int(available[1]) * 1024 if available else None,
    )


def _disk_usage(path: str, which: str) -> int | None:
    try:
        return getattr(shutil.disk_usage(path), which)
    except OSError:
        return None


def _locked_limit() -> int | None:
    try:
        import resource
    except ImportError:  # Windows has none
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit


def check_resources(found: Resources, has_cuda: bool) -> list[Finding]:
    checks = (
        (
            "disk",
            found.free_disk_bytes,
            LEAST_DISK_BYTES,
            "free in the current folder",
            "checkpoints of a large model fill it; write them elsewhere, or free space",
        ),
        (
            "shared memory",
            found.shared_bytes,
            LEAST_SHARED_BYTES,
            "in /dev/shm, through which data loader workers pass their batches",
            "start the container with --shm-size=16g (or --ipc=host), or train with 0 loader workers",
        ),
        (
            "memory",
            found.free_memory_bytes,
            LEAST_MEMORY_BYTES,
            "of host memory free",
            "offloaded activations and loader workers live there; end other programs or take a larger machine",
        ),
    )
    findings = []
    for topic, amount, least, what, remedy in checks:
        if amount is not None and amount < least:
            message = f"only {size_text(amount)} {what} (at least {size_text(least)} is advised)"
            findings.append(
                Finding(topic, "problem" if topic == "shared memory" else "note", message, remedy)
            )
        elif amount is not None:
            findings.append(Finding(topic, "ok", f"{size_text(amount)} {what}"))
    if has_cuda:
        findings.append(_check_locked(found.locked_bytes))
    return findings


def _check_locked(locked_bytes: int | None) -> Finding:
    if locked_bytes is None or locked_bytes >= LEAST_LOCKED_BYTES:
        limit = "no limit" if locked_bytes is None else f"up to {size_text(locked_bytes)}"
        return Finding("locked memory", "ok", limit)
    return Finding(
        "locked memory",
        "note",
        f"the limit is {size_text(locked_bytes)}. Page-locked memory, through which activations leave the GPU, is "
        "mostly exempt, but RDMA networks and some containers are not",
        "if offloading or NCCL over InfiniBand fails, raise it: `ulimit -l unlimited`, or --ulimit memlock=-1",
    )
