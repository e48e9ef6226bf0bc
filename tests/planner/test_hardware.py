"""Hardware by name and by file: what is there, where it is from, and what is refused."""

import dataclasses
import json
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opensora_accel.observe import GPUS, gpu_of
from opensora_accel.planner.devices import DEVICES, NETWORKS
from opensora_accel.planner.hardware import Efficiency, Hardware, hardware_names, this_machine


@pytest.mark.parametrize("name", hardware_names())
def test_every_figure_of_a_device_says_where_it_is_from(name):
    hardware = Hardware.named(name)
    figures = {field.name for field in dataclasses.fields(hardware)} - {
        *(
            "name",
            "architecture",
            "sources",
            "efficiencies",
            "collectives",
            "collective_slowness",
            "crowding",
            "lateness",
            "phases",
            "slowness",
            "between",
            "runs_ahead",
            "cores",
        )
    }
    # Of all kernels of attention, forward and backward, one sentence tells.
    efficiencies = {name.partition(" ")[0] for name in hardware.efficiencies}
    assert figures | efficiencies <= set(hardware.sources)
    assert all(len(text) > 5 for text in hardware.sources.values())
    assert hardware.peak("bfloat16") > 0 and hardware.peak("float16") <= max(hardware.peak_flops.values())


def test_a_name_tells_node_and_network():
    hardware = Hardware.named("h100x8-ib400")
    assert hardware.ranks_per_node == 8 and hardware.nodes_of(64) == 8
    # 400 gigabits are 50 gigabytes, of which nine tenths are reached.
    assert hardware.between is not None and hardware.between.bandwidth_bytes_per_s == pytest.approx(45e9)
    assert hardware.peak("bfloat16") == pytest.approx(989.4e12)
    assert Hardware.named("h100x4").host_memory_bytes * 2 == hardware.host_memory_bytes
    assert Hardware.named("rtx4090").ranks_per_node == 8 and Hardware.named("rtx4090x2").ranks_per_node == 2


@pytest.mark.parametrize("device", hardware_names())
@pytest.mark.parametrize("network", ["", *(f"-{name}100" for name in NETWORKS)])
def test_hardware_survives_a_file(device, network, tmp_path):
    hardware = Hardware.named(f"{device}x2{network}")
    hardware.save(tmp_path / "hardware.json")
    assert Hardware.load(tmp_path / "hardware.json") == hardware
    assert Hardware.named(str(tmp_path / "hardware.json")) == hardware


def test_measured_collectives_survive_a_file(tmp_path):
    measured = {"all-gather 2/4": ((64.0, 1e-4), (1e6, 2e-3))}
    hardware = dataclasses.replace(Hardware.named("cpu"), collectives=measured, crowding={"2": 1.2})
    hardware.save(tmp_path / "hardware.json")
    assert Hardware.load(tmp_path / "hardware.json") == hardware


def test_an_efficiency_passes_through_its_points_and_stays_between_them():
    efficiency = Efficiency(("flops",), (((1e9,), 0.2), ((1e12,), 0.8)))
    assert efficiency.at({"flops": 1e9}) == 0.2 and efficiency.at({"flops": 1e12}) == 0.8
    assert efficiency.at({"flops": 1e6}) == 0.2 and efficiency.at({"flops": 1e15}) == 0.8
    assert 0.2 < efficiency.at({"flops": 1e10}) < 0.5 < efficiency.at({"flops": 1e11}) < 0.8


@given(
    st.lists(st.tuples(st.floats(1, 1e9), st.floats(0.01, 1)), min_size=1, max_size=8), st.floats(1e-3, 1e12)
)
def test_an_efficiency_is_never_beyond_its_points(points, size):
    efficiency = Efficiency(("bytes",), tuple(((known,), share) for known, share in points))
    shares = [share for _known, share in points]
    assert min(shares) * (1 - 1e-9) <= efficiency.at({"bytes": size}) <= max(shares) * (1 + 1e-9)


def test_the_bounds_are_faster_and_slower():
    hardware = Hardware.named("h100x8-ib400")
    fast, slow = hardware.bound(-1), hardware.bound(+1)
    assert (
        fast.within.bandwidth_bytes_per_s
        > hardware.within.bandwidth_bytes_per_s
        > slow.within.bandwidth_bytes_per_s
    )
    assert fast.launch_s < hardware.launch_s < slow.launch_s
    assert fast.slowness["gemm"] < 1 < slow.slowness["gemm"]


def test_the_bounds_go_around_what_was_measured():
    measured = dataclasses.replace(
        Hardware.named("cpu"),
        slowness={"gemm": 1.2, "attention": 1.1, "memory": 1.0},
        cores=2,
        crowding={"1": 1.0, "2": 1.05, "4": 2.2},
        lateness={"2": ((0.01, 1e-3), (0.1, 4e-3))},
        hook_s=2e-5,
        uncertainties=dict.fromkeys(
            ("gemm", "attention", "memory", "collective", "copy", "host", "crowding"), 0.1
        )
        | {"oversubscription": 0.25},
    )
    fast, slow = measured.bound(-1), measured.bound(+1)
    assert slow.slowness == pytest.approx({"gemm": 1.32, "attention": 1.21, "memory": 1.1})
    assert fast.slowness["gemm"] == pytest.approx(1.08)
    assert slow.crowding == pytest.approx({"1": 1.0, "2": 1.155, "4": 2.75})
    for end, share in ((slow, 1.1), (fast, 0.9)):
        assert dict(end.lateness["2"]) == pytest.approx({0.01: share * 1e-3, 0.1: share * 4e-3})
        assert end.hook_s == pytest.approx(share * 2e-5)
    # Nobody computes faster because others do.
    assert fast.crowding == pytest.approx({"1": 1.0, "2": 1.0, "4": 1.65})


def test_peaks_are_those_that_the_profiler_knows():
    assert {*GPUS} == {*DEVICES} - {"cpu"}
    for device, gpu in GPUS.items():
        peaks = DEVICES[device]["peak_flops"]
        assert peaks["bfloat16"] == pytest.approx(gpu.bf16_flops, rel=1e-9)
        assert peaks["float32"] == pytest.approx(gpu.fp32_flops, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100sxm40"),
        ("NVIDIA A100 80GB PCIe", "a100pcie"),
        ("NVIDIA A100-PCIE-40GB", "a100pcie40"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100pcie"),
        ("NVIDIA H100 NVL", "h100nvl"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GB300", "gb300"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA L40", None),
        ("NVIDIA A100X", None),
        ("NVIDIA H20", None),
        ("NVIDIA H800", None),
        ("Tesla V100-SXM2-32GB", None),
    ],
)
def test_a_gpu_is_known_by_its_whole_name_or_refused(monkeypatch, name, device):
    monkeypatch.delenv("OPENSORA_ACCEL_HARDWARE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=34 * 2**30)
    )
    assert gpu_of(name) == device
    if device is not None:
        found = this_machine(2)
        assert found.name.startswith(f"{device}x2") and found.memory_bytes == 34 * 2**30
        return
    with pytest.raises(ValueError, match=re.escape(f"no figures of {name!r}")) as refused:
        this_machine(2)
    assert ("a part of a GPU" in str(refused.value)) == ("MIG" in name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("h1000x8", "did you mean 'h100'"),
        ("h100x8-ip400", "did you mean 'ib'"),
        ("h100x0", "at least 1"),
        ("h100x8-ib", "as ib400"),
        ("", "DEVICExCOUNT"),
        ("gb250x72", "did you mean 'gb200'"),
    ],
)
def test_a_wrong_name_is_told_with_the_nearest(name, said):
    with pytest.raises(ValueError, match=said):
        Hardware.named(name)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("memory_bytes", 0, "memory_bytes must be a finite number above 0"),
        ("memory_bytes", float("nan"), "memory_bytes must be a valid integer"),
        ("ranks_per_node", -1, "ranks_per_node must be"),
        ("launch_s", -1e-6, "launch_s must be greater than or equal to 0"),
        ("allocator_slack", True, "allocator_slack must be"),
        ("within", {"bandwidth_bytes_per_s": 0, "latency_s": 0}, "within: a link needs a finite bandwidth"),
        ("within", 5e9, "within must be an object"),
        ("peak_flops", {}, "peak_flops needs a figure"),
        ("peak_flops", {"bfloat16": -1}, "peak_flops.bfloat16 must be"),
        ("efficiencies", {}, "has nothing for 'gemm'"),
        ("efficiencies", {"gemm": {"by": ["colour"], "points": [[[1], 0.5]]}}, "depends on some of flops"),
        ("efficiencies", {"gemm": {"by": ["flops"], "points": [[[1], 1.5]]}}, "above 0 and at most 1"),
        ("efficiencies", {"gemm": {"by": ["flops"], "points": []}}, "at least one point"),
        ("efficiencies", {"gemm": {"by": ["flops"], "points": [[[1, 2], 0.5]]}}, "one size above 0 for each"),
        ("uncertainties", {"gemm": 1.5}, "uncertainties.gemm is a share"),
        (
            "uncertainties",
            dict.fromkeys(("gemm", "attention", "memory", "collective", "copy", "host", "crowdng"), 0.1),
            "uncertainties has no 'crowdng'; did you mean 'crowding'",
        ),
        ("collectives", {"all-gather 2/2": [[1, 1]]}, "needs two points"),
        ("colour", 1, "has no field 'colour'"),
    ],
)
def test_a_wrong_file_is_told_with_its_field(field, value, said, tmp_path):
    values = json.loads(Hardware.named("h100x8").to_json())
    path = tmp_path / "hardware.json"
    path.write_text(json.dumps({**values, field: value}))
    with pytest.raises(ValueError, match=said) as error:
        Hardware.load(path)
    assert str(path) in str(error.value)


def test_a_file_that_is_none_is_told(tmp_path):
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ValueError, match="hardware is a JSON object"):
        Hardware.load(tmp_path / "a.json")
    (tmp_path / "b.json").write_text("[]")
    with pytest.raises(ValueError, match="must be an object; got \\[\\]"):
        Hardware.load(tmp_path / "b.json")
    (tmp_path / "c.json").write_text("{}")
    with pytest.raises(ValueError, match="missing; write the file"):
        Hardware.load(tmp_path / "c.json")


def test_several_nodes_need_a_network():
    with pytest.raises(ValueError, match="name one, as h100x8-ib400, or plan for at most 8 ranks"):
        Hardware.named("h100x8").nodes_of(16)
    assert Hardware.named("h100x8").nodes_of(8) == 1
