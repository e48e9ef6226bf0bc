"""The CPUs next to a GPU, as Linux tells them; nothing where it does not."""

import os
from types import SimpleNamespace

import pytest
import torch

from opensora_accel.offload import numa


@pytest.fixture
def sysfs(tmp_path):
    def write(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    write("bus/pci/devices/0000:1b:00.0/numa_node", "1\n")
    write("bus/pci/devices/0000:2b:00.0/numa_node", "-1\n")
    write("devices/system/node/node1/cpulist", "0-2,8,10-11\n")
    return tmp_path


@pytest.mark.parametrize(
    ("address", "cpus"),
    [("0000:1b:00.0", {0, 1, 2, 8, 10, 11}), ("0000:2b:00.0", set()), ("0000:3b:00.0", set()), (None, set())],
)
def test_node_cpus(sysfs, address, cpus):
    assert numa.node_cpus(address, sysfs) == cpus


def test_the_address_of_a_gpu(monkeypatch):
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: properties)
    assert numa._pci_address(0) == "0000:1b:00.0"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: SimpleNamespace())
    assert numa._pci_address(0) is None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux only")
def test_the_thread_is_bound_and_let_go_again(monkeypatch):
    before = os.sched_getaffinity(0)
    monkeypatch.setattr(numa, "_pci_address", lambda _index: "gpu")
    monkeypatch.setattr(numa, "node_cpus", lambda _address: {min(before), 10_000})
    with numa.near_device(0):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before
    # A launcher that has bound the process to another node has its reasons.
    monkeypatch.setattr(numa, "node_cpus", lambda _address: {10_000})
    with numa.near_device(0):
        assert os.sched_getaffinity(0) == before
