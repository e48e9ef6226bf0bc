"""Each check finds its problem in facts that are handed to it, and is silent about a sound machine."""

import json
import os
import time
from collections import namedtuple
from unittest import mock

import pytest
import torch.distributed as dist

from opensora_accel import doctor

GIB = 2**30
Gpu = namedtuple("Gpu", "name total_memory major minor")
A100 = Gpu("NVIDIA A100", 80 * GIB, 8, 0)
V100 = Gpu("NVIDIA V100", 32 * GIB, 7, 0)
TOPOLOGY = (
    "\x1b[4m\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m\n"
    "GPU0\t X \tNV12\tSYS\tPXB\t0-31\n"
    "GPU1\tNV12\t X \tSYS\tPXB\t0-31\n"
    "GPU2\tSYS\tSYS\t X \tNODE\t32-63\n"
    "NIC0\tPXB\tPXB\tNODE\t X\n"
    "\nLegend:\n\n  X    = Self\n"
)


def statuses(checks):
    return [check.status for check in checks]


def test_cpu_torch_beside_a_driver_is_a_problem():
    found = doctor.check_torch("2.13.0+cpu", None, has_driver=True)
    assert found.status == "problem" and "CUDA build" in found.remedy
    assert doctor.check_torch("2.13.0+cpu", None, has_driver=False).status == "ok"
    assert doctor.check_torch("2.13.0+cu130", "13.0", has_driver=True).status == "ok"


def test_gpus_without_bf16_or_nccl_are_a_problem():
    assert statuses(doctor.check_gpus([A100, A100], "", has_nccl=True)) == ["ok", "ok"]
    nccl, old = doctor.check_gpus([V100], "", has_nccl=False)
    assert nccl.status == old.status == "problem" and "compute 7.0" in old.message and "NCCL" in nccl.message
    assert statuses(doctor.check_gpus([A100, V100], "", has_nccl=True)) == ["ok", "ok", "problem", "note"]
    assert statuses(doctor.check_gpus([], "", has_nccl=True)) == ["note"]


def test_slow_links_between_gpus_are_counted():
    slow = doctor.check_gpus([A100] * 3, TOPOLOGY, has_nccl=True)[-1]
    assert slow.status == "note" and "NVLink" in slow.remedy
    assert slow.message.startswith("1 pairs NV12, 2 pairs SYS: ")
    fast = doctor.check_gpus([A100] * 2, "GPU0\t X \tNV12\nGPU1\tNV12\t X \n", has_nccl=True)[-1]
    assert (fast.status, fast.message) == ("ok", "1 pairs NV12")
    assert statuses(doctor.check_gpus([A100] * 2, "no devices were found\n", has_nccl=True)) == ["ok", "ok"]


def test_gloo_is_tried_without_a_process_group():
    assert doctor.check_gloo().status == "ok"
    assert not dist.is_initialized()


def test_gloo_is_tried_beside_a_running_group(parallel_registry):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = dist.group.WORLD
    assert doctor.check_gloo().status == "ok"
    assert dist.group.WORLD is world and dist.get_world_size() == 1


def test_gloo_that_cannot_start_is_a_problem(monkeypatch):
    def refuse(*_):
        raise RuntimeError("unable to resolve hostname\nand more")

    monkeypatch.setattr(dist, "ProcessGroupGloo", refuse)
    found = doctor.check_gloo()
    assert found.status == "problem" and found.message.endswith("unable to resolve hostname")
    assert "GLOO_SOCKET_IFNAME" in found.remedy


@pytest.mark.parametrize(
    ("ranks", "threads", "cores", "fits"), [(1, 8, 8, None), (8, 1, 8, None), (2, 8, 8, 4), (8, 1, 4, 1)]
)
def test_more_threads_than_cores_is_a_problem(ranks, threads, cores, fits):
    found = doctor.check_threads(ranks, threads, cores)
    assert found.status == ("ok" if fits is None else "problem")
    assert fits is None or f"OMP_NUM_THREADS={fits}" in found.message


def test_missing_and_old_train_packages_are_problems():
    pins = [
        "torch>=2.11",
        'diffusers>=0.42.1; extra == "train"',
        'av>=17; extra == "train"',
        "x; extra == 'dev'",
    ]
    found = doctor.check_train_packages(pins, {"diffusers": "0.9.0", "torch": "2.0"}.get)
    assert found.status == "problem" and "opensora-accel[train]" in found.remedy
    assert found.message == "av is missing, diffusers>=0.42.1 (installed: 0.9.0)"
    assert doctor.check_train_packages(pins, {"diffusers": "0.42.1", "av": "17.0.0"}.get).status == "ok"


@pytest.mark.parametrize(
    ("library", "pin", "torch_version", "torch_cuda", "status"),
    [
        (b"libcudart.so.13", "torch>=2.14.0", "2.14.0+cpu", None, "problem"),
        (b"libc10.so", "torch==2.13.0", "2.13.0+cpu", None, "ok"),
        (b"libc10.so", "torch (==2.5.1)", "2.13.0+cpu", None, "problem"),
        (b"libcudart.so.13", "torch>=2.14.0", "2.14.1+cu132", "13.2", "ok"),
    ],
)
def test_torchvision_is_judged_by_its_files_and_pins(
    tmp_path, library, pin, torch_version, torch_cuda, status
):
    (tmp_path / "_C_stable.so").write_bytes(b"\x7fELF " + library)
    found = doctor.check_torchvision(tmp_path, [pin, "numpy"], (torch_version, torch_cuda))
    assert found.status == status and ("diffusers" in found.message) == (status == "problem")
    assert doctor.check_torchvision(None, [], (torch_version, torch_cuda)).status == "ok"


def test_the_wrong_apex_is_a_problem(tmp_path):
    wrong = doctor.check_apex(tmp_path)
    assert wrong.status == "problem" and "web toolkit" in wrong.message and "uninstall apex" in wrong.remedy
    (tmp_path / "normalization").mkdir()
    (tmp_path / "multi_tensor_apply").mkdir()
    assert doctor.check_apex(tmp_path).status == doctor.check_apex(None).status == "ok"


def test_broken_pins_of_colossalai_are_named():
    pins = [
        "torch<=2.5.1,>=2.2.0",
        "diffusers==0.29.0",
        "transformers (==4.51.3)",
        "rich",
        "x==1; extra == 'y'",
    ]
    have = {"torch": "2.13.0+cpu", "diffusers": "0.42.1", "transformers": "5.23.0", "rich": "15.0", "x": "2"}
    found = doctor.check_colossalai("0.5.0", pins, have.get)
    assert found.status == "note" and "--no-deps" in found.remedy
    for name in ("torch<=2.5.1,>=2.2.0", "diffusers==0.29.0", "transformers==4.51.3"):
        assert name in found.message
    assert "x==1" not in found.message
    kept = {"torch": "2.5.1+cu124", "diffusers": "0.29.0", "transformers": "4.51.3"}
    assert doctor.check_colossalai("0.5.0", pins, kept.get).status == "ok"
    assert doctor.check_colossalai(None, [], kept.get).status == "ok"


def test_video_that_cannot_be_decoded_is_a_problem(monkeypatch):
    av = pytest.importorskip("av")
    assert doctor.check_video().status == "ok"
    monkeypatch.setattr(av, "codecs_available", set())
    assert doctor.check_video().status == "problem"


@pytest.mark.parametrize(
    ("topic", "status"), [("disk", "note"), ("shared memory", "problem"), ("locked memory", "note")]
)
def test_little_memory_is_found(topic, status):
    small = doctor.check_memory(topic, 2**26, 2, "here")
    assert small.status == status and small.message.startswith("0.06 GiB here") and small.remedy
    assert (
        doctor.check_memory(topic, 64 * GIB, 2, "").status
        == doctor.check_memory(topic, None, 2, "").status
        == "ok"
    )


def test_the_whole_report_is_quick_and_complete():
    start = time.monotonic()
    checks = doctor.run_doctor()
    assert time.monotonic() - start < 10
    assert all(check.remedy for check in checks if check.status == "problem")
    assert {"torch", "gloo", "threads", "torchvision", "apex", "colossalai"} <= {c.topic for c in checks}


def test_the_report_and_its_exit_status(capsys, monkeypatch):
    good, bad = doctor.Check("torch", "ok", "fine"), doctor.Check("apex", "problem", "the wrong apex")
    monkeypatch.setattr(doctor, "run_doctor", lambda: [good])
    assert doctor.main([]) == 0
    assert "nothing stands in the way" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "run_doctor", lambda: [good, bad])
    assert doctor.main([]) == 1
    printed = capsys.readouterr().out
    assert (
        "apex: the wrong apex" in printed and "→ pip uninstall apex" in printed and "1 problem(s)" in printed
    )
    assert doctor.main(["--json"]) == 1
    record = json.loads(capsys.readouterr().out)[1]
    assert record["status"] == "problem" and set(record) == {"topic", "status", "message", "remedy"}


def measured_links(env):
    with mock.patch.dict(os.environ, env):
        return doctor.measure_links()


def test_links_are_measured_within_nodes_and_between_them(ranks):
    found = ranks(4, measured_links, {"LOCAL_WORLD_SIZE": "2"})
    assert found == [found[0]] * 4 and set(found[0]) == {
        *("within nodes", "between nodes", "two_level_all_to_all_pays_below_bytes")
    }
    within, between = found[0]["within nodes"], found[0]["between nodes"]
    least = 4 * between["latency_s"] * within["bandwidth_bytes_per_s"]
    assert found[0]["two_level_all_to_all_pays_below_bytes"] == pytest.approx(least)
    assert set(ranks(2, measured_links, {"LOCAL_WORLD_SIZE": "2"})[0]) == {"between ranks"}
