"""`opensora-accel doctor`: what on this machine would stop or slow a training run, and what to do about it.

`run_doctor` collects facts, and the `check_*` functions judge them. Packages are judged by their files and metadata,
because a broken one fails at its import. `python -m torch.utils.collect_env` lists the versions of everything.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import json
import operator
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from opensora_accel.links import levels_of, measure_link
from opensora_accel.parallel_states import start_distributed

GIB = 2**30
REMEDIES = {
    "torch": "install a CUDA build, with the command of PyTorch's 'Get started' page and --force-reinstall",
    "GPUs": "train in fp32, or on GPUs of one kind with compute capability 8.0 or more",
    "GPU links": "keep each sequence-parallel group on GPUs joined by NVLink (NV# in `nvidia-smi topo -m`)",
    "NCCL": "install PyTorch's build for Linux; several GPUs cannot train together without NCCL",
    "gloo": "if this host's name does not resolve, name an interface: GLOO_SOCKET_IFNAME=lo on one machine",
    "threads": "set OMP_NUM_THREADS before starting, and start no more ranks than there are cores",
    "train packages": "pip install --upgrade 'opensora-accel[train]'",
    "video": "pip install --force-reinstall av: PyAV's own wheel decodes H.264",
    "torchvision": "pip uninstall torchvision (Cosmos alone needs it), or install the build that matches torch",
    "apex": "pip uninstall apex (torch's own norms are used), or build NVIDIA's apex from its source",
    "colossalai": "use an environment of its own, or `pip install --no-deps colossalai==0.5.0` beside this torch",
    "disk": "saved states of a large model fill it; write them elsewhere, or free space",
    "shared memory": "start the container with --shm-size=16g (or --ipc=host), or train with 0 loader workers",
    "memory": "offloaded activations and loader workers live there; end other programs or take more memory",
    "locked memory": "if offload or InfiniBand fails, raise it: `ulimit -l unlimited`, or --ulimit memlock=-1",
}
COMPARE = {"<=": operator.le, ">=": operator.ge, "==": operator.eq, "!=": operator.ne, "<": operator.lt}
VersionOf = Callable[[str], str | None]


class Check(NamedTuple):
    """One result: ok, a note, or a problem, which stops or badly slows training."""

    topic: str
    status: str
    message: str

    @property
    def remedy(self) -> str:
        return "" if self.status == "ok" else REMEDIES.get(self.topic, "")


def check_torch(version: str, cuda: str | None, has_driver: bool) -> Check:
    built_for = f"CUDA {cuda}" if cuda else ("ROCm" if torch.version.hip else "CPU only")
    message = f"torch {version} ({built_for}), Python {platform.python_version()}"
    if has_driver and built_for == "CPU only":
        return Check("torch", "problem", f"{message}, but there is an NVIDIA driver: GPUs would stay unused")
    return Check("torch", "ok", message)


def check_gpus(gpus: Sequence[Any], topology: str, has_nccl: bool) -> list[Check]:
    """`gpus` are torch's device properties; `topology` is what `nvidia-smi topo -m` prints."""
    if not gpus:
        return [Check("GPUs", "note", "none: the CPU is for trying out small models only")]
    nccl = "NCCL is built into torch (not started here)" if has_nccl else "torch was built without NCCL"
    checks = [Check("NCCL", "ok" if has_nccl else "problem", nccl)]
    kinds = [f"{gpu.name}, {gpu.total_memory / GIB:.1f} GiB, compute {gpu.major}.{gpu.minor}" for gpu in gpus]
    for kind, gpu in dict(zip(kinds, gpus, strict=True)).items():
        status, bf16 = ("ok", "computes bf16") if gpu.major >= 8 else ("problem", "bf16 is slow")
        checks.append(Check("GPUs", status, f"{kinds.count(kind)} × {kind}, {bf16}"))
    if len(set(kinds)) > 1:
        checks.append(Check("GPUs", "note", "the GPUs differ: every step waits for the slowest of them"))
    # A row of the matrix: GPU0  X  NV12  SYS  …; each pair of GPUs stands in it twice.
    rows = re.findall(r"^GPU\d+\s+(.*)", topology, re.MULTILINE)
    links = [link for row in rows for link in row.split()[: len(gpus)] if link != "X"]
    counts = ", ".join(f"{links.count(link) // 2} pairs {link}" for link in sorted(set(links)))
    if links:
        fast = all(link.startswith("NV") for link in links)
        counts += "" if fast else ": sequence parallelism is slow over PCIe and between sockets (SYS)"
        checks.append(Check("GPU links", "ok" if fast else "note", counts))
    return checks


def check_gloo() -> Check:
    try:
        # Without init_process_group, so that a group which is running already does not notice.
        group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, datetime.timedelta(seconds=5))
        group.allreduce([torch.ones(1)]).wait()  # type: ignore[attr-defined]  # missing in the stub only
    except (AttributeError, RuntimeError, ValueError) as error:
        return Check("gloo", "problem", f"a group of one process cannot start: {str(error).splitlines()[0]}")
    return Check("gloo", "ok", "a group of one CPU process started and summed")


def check_threads(ranks: int, threads: int, cores: int) -> Check:
    message = f"{ranks} rank(s) on this machine × {threads} thread(s), {cores} core(s)"
    if ranks * threads <= cores:
        return Check("threads", "ok", message)
    # 3 ms and 200 ms: measured on 2 cores, November 2026.
    message += ": threads wait for each other's core, and a model that takes 3 ms took 200 ms"
    return Check("threads", "problem", f"{message}; OMP_NUM_THREADS={max(1, cores // ranks)} fits")


def installed(name: str) -> tuple[str | None, list[str]]:
    """The version and the requirements of a package, by its metadata; None and none where it is absent."""
    with suppress(importlib.metadata.PackageNotFoundError):
        distribution = importlib.metadata.distribution(name)
        return distribution.version, distribution.requires or []
    return None, []


def unmet_pins(pins: Sequence[str], version_of: VersionOf) -> list[str]:
    """The pins, as in `torch<=2.5.1,>=2.2`, that an installed version breaks."""
    unmet = []
    for pin in pins:
        asked = pin.partition(";")[0].replace(" (", "").strip(" )")
        version = version_of(re.split(r"[^\w.-]", asked, maxsplit=1)[0])
        # What follows "+" names a build, and pins speak of releases.
        have = TorchVersion((version or "").partition("+")[0])
        bounds = re.findall(r"(<=|>=|==|!=|<)\s*(\d+(?:\.\d+)*)", asked)
        if version and any(not COMPARE[sign](have, TorchVersion(bound)) for sign, bound in bounds):
            unmet.append(f"{asked} (installed: {version})")
    return unmet


def check_train_packages(pins: Sequence[str], version_of: VersionOf) -> Check:
    """`pins` are the requirements in the metadata of opensora-accel, the extra `train` among them."""
    train = [pin.partition(";")[0].strip() for pin in pins if re.search(r"extra.*train", pin)]
    names = [re.split(r"[^\w.-]", pin, maxsplit=1)[0] for pin in train]
    wrong = [f"{name} is missing" for name in names if not version_of(name)] + unmet_pins(train, version_of)
    versions = ", ".join(f"{name} {version_of(name)}" for name in names)
    return Check("train packages", "problem" if wrong else "ok", ", ".join(wrong) or versions)


def check_video() -> Check:
    try:
        import av
    except ImportError as error:
        return Check("video", "problem", f"PyAV cannot be imported ({error})")
    if "h264" not in av.codecs_available:
        return Check("video", "problem", "this build of PyAV does not decode H.264")
    return Check("video", "ok", f"PyAV {av.__version__} decodes H.264")


def check_torchvision(folder: Path | None, pins: Sequence[str], on: tuple[str, str | None]) -> Check:
    """`on` is the version of torch and that of its CUDA."""
    if folder is None:
        return Check("torchvision", "ok", "not installed, and needed for Cosmos alone")
    reasons = [f"needs {pin}" for pin in unmet_pins(pins, {"torch": on[0]}.get)]
    if any(b"libcudart" in path.read_bytes() for path in folder.glob("_C*.so")) and not on[1]:
        reasons = [f"is a CUDA build beside a CPU torch ({on[0]})"]
    if reasons:
        return Check("torchvision", "problem", f"it {reasons[0]}: importing it fails, and diffusers with it")
    return Check("torchvision", "ok", f"it fits torch {on[0]}")


def check_apex(folder: Path | None) -> Check:
    if folder is None:
        return Check("apex", "ok", "not installed; torch's own norms are used")
    if (folder / "normalization").exists() and (folder / "multi_tensor_apply").exists():
        return Check("apex", "ok", f"NVIDIA's apex in {folder}")
    return Check("apex", "problem", f"{folder} is not NVIDIA's apex but a web toolkit of the same name")


def check_colossalai(version: str | None, pins: Sequence[str], version_of: VersionOf) -> Check:
    """A plain `pip install colossalai` would replace torch and diffusers by what it pins."""
    unmet = ", ".join(unmet_pins([pin for pin in pins if "extra" not in pin], version_of))
    if version is None or not unmet:
        return Check("colossalai", "ok", f"{version}, and its pins are kept" if version else "not installed")
    works = "Launching, the Booster and TorchDDPPlugin work all the same; T5, ZeRO and Gemini do not"
    return Check("colossalai", "note", f"colossalai {version} pins {unmet}. {works}")


def check_memory(topic: str, amount_bytes: int | None, least_gib: int, what: str) -> Check:
    """None bytes: it could not be read, or has no limit. A loader crashes without shared memory."""
    if amount_bytes is None:
        return Check(topic, "ok", "no limit is known")
    status = "ok" if amount_bytes >= least_gib * GIB else "problem" if topic == "shared memory" else "note"
    return Check(topic, status, f"{amount_bytes / GIB:.2f} GiB {what} (at least {least_gib} GiB is advised)")


def run_doctor() -> list[Check]:
    """All checks of this machine, in the order in which to read them. Takes a few seconds and changes nothing."""
    gpus, topology = [], ""
    # A driver may answer where a device does not.
    with suppress(RuntimeError, OSError, subprocess.SubprocessError):
        gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        topology = subprocess.check_output(("nvidia-smi", "topo", "-m"), text=True, timeout=4)

    def version_of(name: str) -> str | None:
        return installed(name)[0]

    def folder(module: str) -> Path | None:
        # Found without importing it.
        spec = importlib.util.find_spec(module)
        return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None

    def text_of(path: str) -> str:
        return Path(path).read_text(encoding="utf-8") if Path(path).exists() else ""

    available = re.search(r"MemAvailable:\s+(\d+) kB", text_of("/proc/meminfo"))
    locked = re.search(r"Max locked memory\s+(\d+)", text_of("/proc/self/limits")) if gpus else None
    shared_bytes = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").exists() else None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = re.match(r"(\d+) (\d+)", text_of("/sys/fs/cgroup/cpu.max"))  # of a container
    cores = min(cores, -(-int(quota[1]) // int(quota[2]))) if quota else cores
    built_with = torch.__version__, torch.version.cuda
    return [
        check_torch(*built_with, shutil.which("nvidia-smi") is not None),
        *check_gpus(gpus, topology, dist.is_nccl_available()),
        check_gloo(),
        check_threads(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.get_num_threads(), cores),
        check_train_packages(installed("opensora-accel")[1], version_of),
        check_video(),
        check_torchvision(folder("torchvision"), installed("torchvision")[1], built_with),
        check_apex(folder("apex")),
        check_colossalai(*installed("colossalai"), version_of),
        check_memory("disk", shutil.disk_usage(".").free, 20, "free in the current folder"),
        check_memory("shared memory", shared_bytes, 2, "in /dev/shm, where loader workers put batches"),
        check_memory("memory", int(available[1]) * 1024 if available else None, 8, "of host memory free"),
        check_memory("locked memory", int(locked[1]) if locked else None, 1, "may be page-locked"),
    ]


def measure_links() -> dict[str, Any]:
    """Latency and bandwidth within nodes and between them, and below which size two levels pay.

    Every rank of a launcher has to call; a node is what the launcher has started on one machine.

    Raises:
        ValueError: there is a single rank.
    """
    start_distributed()
    world, device = dist.get_world_size(), torch.device("cpu")
    if world == 1:
        raise ValueError(
            "one rank has no links; start several: torchrun --nproc-per-node 2 -m opensora_accel.cli ..."
        )
    if (
        torch.cuda.is_available()
        and torch.device("cuda") in dist.distributed_c10d._get_default_group()._device_types
    ):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    levels = levels_of([range(world)], per_node)
    if levels is None:
        link = measure_link(dist.distributed_c10d._get_default_group(), device)
        return {"between ranks": dataclasses.asdict(link)}
    groups = [next(line for line in lines if dist.get_rank() in line) for lines in levels]
    links = [measure_link(dist.new_group(ranks, use_local_synchronization=True), device) for ranks in groups]
    report: dict[str, Any] = {"within nodes": dataclasses.asdict(links[0])}
    report["between nodes"] = dataclasses.asdict(links[1])
    # See opensora_accel/experiments/by_node.py.
    report["two_level_all_to_all_pays_below_bytes"] = (
        world * links[1].latency_s * links[0].bandwidth_bytes_per_s
    )
    return report


def main(arguments: Sequence[str], calibrate: Callable[[Path], None] | None = None) -> int:
    """`opensora-accel doctor`; the exit status is 1 where something would stop a run.

    Args:
        calibrate: measures this machine into a file that the planner reads.
    """
    parser = argparse.ArgumentParser("opensora-accel doctor", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")
    parser.add_argument(
        "--links", action="store_true", help="measure the links between ranks (under torchrun)"
    )
    parser.add_argument(
        "--calibrate",
        type=Path,
        metavar="FILE",
        help="measure this machine for `opensora-accel plan --hardware FILE`; under torchrun its links too",
    )
    options = parser.parse_args(arguments)
    as_json = options.json
    if options.calibrate is not None:
        assert calibrate is not None, "the command line hands it in"
        calibrate(options.calibrate)
        return 0
    if options.links:
        links = measure_links()
        if dist.get_rank() == 0:
            print(json.dumps(links, indent=1))
        dist.destroy_process_group()
        return 0
    checks = run_doctor()
    problems, notes = (sum(check.status == status for check in checks) for status in ("problem", "note"))
    if as_json:
        records = [{**check._asdict(), "remedy": check.remedy} for check in checks]
        print(json.dumps(records, indent=1, ensure_ascii=False))
    else:
        for check in checks:
            remedy = f"\n{'':10}→ {check.remedy}" if check.remedy else ""
            print(f"{check.status:<8}  {check.topic}: {check.message}{remedy}")
        good = "nothing stands in the way of training"
        print(f"{f'{problems} problem(s), each with what to do' if problems else good}; {notes} note(s)")
    return int(problems > 0)
