"""Each check finds its problem in facts that are handed to it, and is silent about a sound machine."""

import ast
import builtins
import json
import re
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from opensora_accel import doctor
from opensora_accel.doctor import Finding, hardware, packages
from opensora_accel.doctor.hardware import Gpu, Resources
from opensora_accel.doctor.packages import Torchvision

GIB = 2**30
A100 = Gpu("NVIDIA A100", 80 * GIB, (8, 0))
V100 = Gpu("NVIDIA V100", 32 * GIB, (7, 0))
TOPOLOGY = (
    "\x1b[4m\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m\n"
    "GPU0\t X \tNV12\tSYS\tPXB\t0-31\n"
    "GPU1\tNV12\t X \tSYS\tPXB\t0-31\n"
    "GPU2\tSYS\tSYS\t X \tNODE\t32-63\n"
    "NIC0\tPXB\tPXB\tNODE\t X\n"
    "\nLegend:\n\n  X    = Self\n"
)


def statuses(findings):
    return [finding.status for finding in findings]


def test_cpu_torch_beside_a_driver_is_a_problem():
    found = hardware.check_torch("2.13.0+cpu", None, "3.11.7", driver=True)
    assert found.status == "problem" and "CUDA build" in found.remedy
    assert hardware.check_torch("2.13.0+cpu", None, "3.11.7", driver=False).status == "ok"
    assert hardware.check_torch("2.13.0+cu130", "13.0", "3.11.7", driver=True).status == "ok"


def test_gpus_without_bf16_are_a_problem():
    assert statuses(hardware.check_gpus([A100, A100], {})) == ["ok"]
    old = hardware.check_gpus([V100], {})
    assert statuses(old) == ["problem"] and "compute 7.0" in old[0].message
    assert statuses(hardware.check_gpus([A100, V100], {})) == ["ok", "problem", "note"]
    assert statuses(hardware.check_gpus([], {})) == ["note"]


def test_topology_of_nvidia_smi_is_read():
    links = hardware.parse_topology(TOPOLOGY)
    assert links == {(0, 1): "NV12", (0, 2): "SYS", (1, 2): "SYS"}
    slow = hardware.check_gpus([A100] * 3, links)[-1]
    assert slow.status == "note" and "2 pairs SYS" in slow.message and "NVLink" in slow.remedy
    assert hardware.check_gpus([A100] * 2, {(0, 1): "NV12"})[-1].status == "ok"
    assert hardware.parse_topology("") == {} and hardware.parse_topology("no devices were found\n") == {}


def test_communication_that_cannot_start_is_a_problem():
    (broken,) = hardware.check_communication(True, False, False, "unable to resolve hostname")
    assert broken.status == "problem" and "unable to resolve" in broken.message
    assert "GLOO_SOCKET_IFNAME" in broken.remedy
    assert statuses(hardware.check_communication(True, False, True, "")) == ["ok", "problem"]
    assert statuses(hardware.check_communication(True, True, True, "")) == ["ok", "ok"]
    assert statuses(hardware.check_communication(True, False, False, "")) == ["ok"]


def test_gloo_is_tried_without_a_process_group():
    assert hardware.try_gloo() == ""
    assert not dist.is_initialized()


def test_gloo_is_tried_beside_a_running_group(parallel_registry):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = dist.group.WORLD
    assert hardware.try_gloo() == ""
    assert dist.group.WORLD is world and dist.get_world_size() == 1


@pytest.mark.parametrize(
    ("ranks", "threads", "cores", "remedy"),
    [
        (1, 8, 8, None),
        (8, 1, 8, None),
        (2, 8, 8, "OMP_NUM_THREADS=4"),
        (8, 1, 4, "no more than 4 ranks"),
    ],
)
def test_more_threads_than_cores_is_a_problem(ranks, threads, cores, remedy):
    found = hardware.check_threads(ranks=ranks, threads=threads, cores=cores, omp_num_threads=None)
    assert found.status == ("ok" if remedy is None else "problem")
    assert remedy is None or (remedy in found.remedy and "200 ms" in found.message)


def test_missing_and_old_train_packages_are_problems():
    versions = {**dict.fromkeys(packages.TRAIN_PACKAGES, "99.0"), "av": None, "diffusers": "0.29.0"}
    missing, old = packages.check_train_packages(versions)
    assert missing.status == "problem" and missing.message == "missing: av"
    assert old.status == "problem" and old.message == "too old: diffusers 0.29.0 (needs 0.42.1)"
    assert "opensora-accel[train]" in missing.remedy
    assert statuses(packages.check_train_packages(dict.fromkeys(packages.TRAIN_PACKAGES, "99.0"))) == ["ok"]


def test_train_packages_are_those_of_setup_py():
    module = ast.parse(Path(doctor.__file__).parents[2].joinpath("setup.py").read_text(encoding="utf-8"))
    (requirements,) = (
        ast.literal_eval(node.value)
        for node in module.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "TRAIN"
    )
    pairs = (
        re.match(r"([\w-]+)(?:>=(.*))?$", requirement).groups(default="") for requirement in requirements
    )
    assert dict(pairs) == packages.TRAIN_PACKAGES


@pytest.mark.parametrize(
    ("found", "torch_version", "torch_cuda", "status"),
    [
        (None, "2.13.0+cpu", None, "ok"),
        (Torchvision("0.29.2+cu132", True, ">=2.14.0"), "2.14.0+cpu", None, "problem"),
        (Torchvision("0.28.0+cpu", False, "==2.13.0"), "2.13.0+cpu", None, "ok"),
        (Torchvision("0.20.1", False, "==2.5.1"), "2.13.0+cpu", None, "problem"),
        (Torchvision("0.29.2+cu132", True, ">=2.14.0"), "2.14.1+cu132", "13.2", "ok"),
    ],
)
def test_torchvision_that_does_not_fit_torch_is_a_problem(found, torch_version, torch_cuda, status):
    finding = packages.check_torchvision(found, torch_version, torch_cuda)
    assert finding.status == status
    assert ("diffusers" in finding.message) == (status == "problem")


def test_torchvision_is_judged_by_its_files(tmp_path):
    (tmp_path / "version.py").write_text("__version__ = '0.29.2'\n")
    (tmp_path / "_C_stable.so").write_bytes(b"\x7fELF libc10.so")
    assert packages.read_torchvision(tmp_path).cuda is False
    (tmp_path / "_C_stable.so").write_bytes(b"\x7fELF libcudart.so.13")
    assert packages.read_torchvision(tmp_path) == Torchvision("0.29.2", True, "")


def test_the_wrong_apex_is_a_problem(tmp_path):
    def unused():
        raise AssertionError("nothing may be compared without a GPU")

    (tmp_path / "scaffolds").mkdir()
    wrong = packages.check_apex(tmp_path, False, unused)
    assert wrong.status == "problem" and "web toolkit" in wrong.message and "uninstall apex" in wrong.remedy
    (tmp_path / "normalization").mkdir()
    (tmp_path / "multi_tensor_apply").mkdir()
    assert packages.check_apex(tmp_path, False, unused).status == "note"
    assert packages.check_apex(tmp_path, True, lambda: 1e-7).status == "ok"
    assert packages.check_apex(tmp_path, True, lambda: 0.5).status == "problem"
    assert "no kernel" in packages.check_apex(tmp_path, True, lambda: "RuntimeError: no kernel").message
    assert packages.check_apex(None, False, unused).status == "ok"


def test_broken_pins_of_colossalai_are_named():
    pins = [
        "torch<=2.5.1,>=2.2.0",
        "diffusers==0.29.0",
        "transformers (==4.51.3)",
        "rich",
        "x==1; extra == 'y'",
    ]
    have = {"torch": "2.13.0+cpu", "diffusers": "0.42.1", "transformers": "5.23.0", "rich": "15.0", "x": "2"}
    found = packages.check_colossalai("0.5.0", pins, have)
    assert found.status == "note" and "--no-deps" in found.remedy
    for name in ("torch<=2.5.1,>=2.2.0", "diffusers==0.29.0", "transformers==4.51.3"):
        assert name in found.message
    assert "x==1" not in found.message
    kept = {"torch": "2.5.1+cu124", "diffusers": "0.29.0", "transformers": "4.51.3"}
    assert packages.check_colossalai("0.5.0", pins, kept).status == "ok"
    assert packages.check_colossalai(None, []).status == "ok"


def test_optional_packages_are_listed():
    found = packages.check_optional({"flash-attn": "2.8.3", "wandb": None})
    assert found.status == "ok" and "found flash-attn 2.8.3; not installed: wandb" in found.message


def test_small_resources_are_found():
    small = Resources(free_disk_bytes=GIB, shared_bytes=64 * 2**20, locked_bytes=65536, free_memory_bytes=GIB)
    findings = {finding.topic: finding for finding in hardware.check_resources(small, has_cuda=True)}
    assert findings["shared memory"].status == "problem" and "--shm-size" in findings["shared memory"].remedy
    assert {findings[topic].status for topic in ("disk", "memory", "locked memory")} == {"note"}
    assert "0.1 MiB" in findings["locked memory"].message
    ample = Resources(500 * GIB, 64 * GIB, None, 64 * GIB)
    assert statuses(hardware.check_resources(ample, has_cuda=True)) == ["ok"] * 4
    assert hardware.check_resources(Resources(), has_cuda=False) == []


def test_the_whole_report_is_quick_and_complete():
    start = time.monotonic()
    findings = doctor.run_doctor()
    assert time.monotonic() - start < 10
    assert all(finding.remedy for finding in findings if finding.status == "problem")
    assert {"torch", "gloo", "threads", "torchvision", "apex", "colossalai"} <= {f.topic for f in findings}
    assert json.loads(doctor.as_json(findings))[0]["topic"] == "torch"


@pytest.mark.parametrize("with_rich", [True, False])
def test_exit_code_says_whether_there_is_a_problem(with_rich, capsys, monkeypatch):
    if with_rich:
        pytest.importorskip("rich")
    else:
        real_import = builtins.__import__

        def without_rich(name, *args, **kwargs):
            if name.startswith("rich"):
                raise ImportError(name)
            return real_import(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", without_rich)
    good, bad = Finding("torch", "ok", "fine"), Finding("apex", "problem", "[wrong] apex", "uninstall it")
    assert doctor.print_report([good]) == 0
    assert "nothing stands in the way" in capsys.readouterr().out
    assert doctor.print_report([good, bad]) == 1
    printed = capsys.readouterr().out
    assert "[wrong] apex" in printed and "→ uninstall it" in printed and "1 problem(s)" in printed
