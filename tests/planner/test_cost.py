"""Seconds of one operation: rooflines, links over the true topology, and what was measured."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opensora_accel import Plan
from opensora_accel.links import Link, one_level_s
from opensora_accel.planner.cost import (
    Placement,
    between_points,
    collective_s,
    contention,
    host_s,
    kernel_s,
    operation_s,
)
from opensora_accel.planner.hardware import Efficiency, Hardware, InPhase
from opensora_accel.planner.operators import kernel_of
from opensora_accel.planner.simulate import simulate
from opensora_accel.planner.trace import Operation, Trace

H100 = Hardware.named("h100x8-ib400")
# Kernels by themselves, outside of a step.
ALONE = dataclasses.replace(H100, slowness=dict.fromkeys(H100.slowness, 1.0))
ON_64 = Placement.on(H100, 64)
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send")


def collective(kind, group, sent_bytes=10**8):
    return Operation(kind, "collective", "gather", num_bytes=sent_bytes, collective=kind, group=tuple(group))


def product(m, n, k, dtype="bfloat16"):
    moved = 2 * (m * k + k * n + m * n)
    return Operation(
        "aten.mm", "gemm", "compute", flops=2 * m * n * k, num_bytes=moved, shape=(1, m, n, k), dtype=dtype
    )


def test_a_large_product_reaches_the_share_of_the_peak_that_is_known():
    taken = operation_s(product(32768, 16384, 16384), ALONE, ON_64)
    reached = 2 * 32768 * 16384**2 / taken / 989.4e12
    assert 0.78 < reached <= 0.801
    # A thin one is bound by the bytes of its weights.
    thin = product(1, 16384, 16384)
    assert operation_s(thin, H100, ON_64) >= thin.num_bytes / H100.memory_bytes_per_s


def test_a_dtype_without_a_figure_computes_as_float32():
    as_is, other = (
        operation_s(product(4096, 4096, 4096, dtype), H100, ON_64) for dtype in ("float32", "int32")
    )
    assert as_is == other > operation_s(product(4096, 4096, 4096), H100, ON_64)


def test_an_operator_that_has_figures_of_its_own_takes_them():
    efficiencies = dict(H100.efficiencies)
    efficiencies["memory aten.gelu"] = dataclasses.replace(efficiencies["memory"], points=(((1e6,), 0.01),))
    hardware = dataclasses.replace(H100, efficiencies=efficiencies)
    gelu, add = (Operation(name, "memory", "compute", num_bytes=10**8) for name in ("aten.gelu", "aten.add"))
    assert operation_s(gelu, hardware, ON_64) > 50 * operation_s(add, hardware, ON_64)


def test_backward_of_attention_has_its_own_efficiency():
    shape = (1, 12, 16384, 16384, 128)
    forward, backward = (
        Operation(
            f"aten._attention{end}", "attention", "compute", flops=10**13, shape=shape, dtype="bfloat16"
        )
        for end in ("", "_backward")
    )
    assert operation_s(backward, H100, ON_64) > operation_s(forward, H100, ON_64)


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_that_leaves_its_node_takes_longer(kind):
    near, far = (collective_s(collective(kind, group), H100, ON_64) for group in (range(8), range(0, 64, 8)))
    assert far > 3 * near


def test_an_all_to_all_is_that_of_links():
    call = collective("all-to-all", range(16), sent_bytes=15 * 10**6)
    placement = Placement.on(H100, 16)
    expected = one_level_s("all-to-all", 16 * 10**6, 2, 8, (H100.within, H100.between))
    assert collective_s(call, H100, placement) == pytest.approx(expected)


def test_ranks_of_a_node_gather_through_all_its_ports():
    # 8 ranks a node have 8 ports: 16 ranks on two nodes gather nearly as fast as 8 on one.
    two_nodes = collective_s(collective("all-gather", range(16)), H100, ON_64)
    pairs = collective_s(collective("all-gather", range(0, 16, 8)), H100, ON_64)
    assert two_nodes < pairs / 5


def test_a_message_to_nobody_takes_no_time():
    assert collective_s(collective("all-gather", [3]), H100, ON_64) == 0
    assert collective_s(collective("barrier", range(8)), H100, ON_64) == 0


def test_what_was_measured_is_taken():
    points = ((100.0, 1e-3), (1000.0, 2e-3))
    hardware = dataclasses.replace(Hardware.named("cpux4"), collectives={"all-gather 2/4": points})
    placement = Placement.on(hardware, 4)
    assert collective_s(collective("all-gather", (0, 1), 550), hardware, placement) == pytest.approx(1.5e-3)
    # Another number of busy ranks was not measured.
    assert collective_s(
        collective("all-gather", (0, 1), 550), hardware, Placement.on(hardware, 2)
    ) != pytest.approx(1.5e-3)


def test_a_line_between_points_goes_on_beyond_them():
    points = ((100.0, 1.0), (200.0, 2.0), (400.0, 3.0))
    found = [between_points(points, size) for size in (1, 100, 150, 200, 300, 400, 800)]
    assert found == pytest.approx([1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 5.0])


def test_ranks_that_share_cores_take_longer():
    cpu = dataclasses.replace(Hardware.named("cpux4"), cores=2)
    alone, crowded = (
        operation_s(product(512, 512, 512), cpu, Placement.on(cpu, number)) for number in (2, 4)
    )
    assert crowded == pytest.approx(2 * alone)
    assert host_s(product(512, 512, 512), cpu, Placement.on(cpu, 4), Plan()) == pytest.approx(
        2 * cpu.launch_s
    )
    measured = dataclasses.replace(cpu, crowding={"4": 2.5})
    assert operation_s(product(512, 512, 512), measured, Placement.on(cpu, 4)) == pytest.approx(2.5 * alone)


def test_phases_of_a_step_differ():
    """The optimizer's kernels find nothing in a cache, and the host is through with its operators soon."""
    phases = {"forward": InPhase(), "optimizer": InPhase(launch=0.25, slowness=2.0)}
    cpu = dataclasses.replace(Hardware.named("cpu"), launch_s=1e-5, hook_s=1e-4, phases=phases)
    add = Operation("aten.add", "memory", "compute", num_bytes=10**6)
    of_phase = {
        phase: dataclasses.replace(add, phase=phase)
        for phase in ("forward", "recompute", "backward", "optimizer")
    }
    alone = kernel_s(add, dataclasses.replace(cpu, phases={}))
    assert {phase: kernel_s(each, cpu) / alone for phase, each in of_phase.items()} == pytest.approx(
        {"forward": 1, "recompute": 1, "backward": 1, "optimizer": 2}
    )
    placement = Placement.on(cpu, 1)
    assert host_s(of_phase["optimizer"], cpu, placement, Plan()) == pytest.approx(0.25e-5)
    # In bf16 the parameters are FSDP2's, of one rank too, and its hooks go through them.
    apart = dataclasses.replace(cpu, phases=phases | {"recompute": InPhase(launch=3.0)})
    assert host_s(of_phase["recompute"], apart, placement, Plan()) == pytest.approx(3e-5)
    in_bf16 = host_s(of_phase["optimizer"], cpu, placement, Plan(precision="bf16"))
    assert in_bf16 == pytest.approx(0.25e-5 + cpu.sharded_launch_s)
    hooked = dataclasses.replace(of_phase["backward"], hooked=7)
    assert host_s(hooked, cpu, placement, Plan()) == pytest.approx(1e-5 + 7e-4)


@pytest.mark.parametrize(("device", "step_s"), [("l40sx8", 4.0), ("h100x8", 3.0)])
def test_copies_share_pcie_with_collectives_where_there_is_no_nvlink(device, step_s):
    """A copy of 3 s beside an all-gather of 1 s: over the same lanes each is half as fast as long as both run."""
    hardware = Hardware.named(device)
    group = tuple(range(8))
    operations = (
        Operation("copy out", "copy_out", "copy_out", num_bytes=3),
        Operation("all-gather", "collective", "gather", num_bytes=1, collective="all-gather", group=group),
    )
    trace = Trace(Plan(), 0, 1, operations, (), 0, 0, 0, 0)
    found = simulate(
        trace,
        lambda operation: float(operation.num_bytes),
        contention=contention(hardware, Placement.on(hardware, 8)),
    )
    assert found.step_s == pytest.approx(step_s)


def test_ranks_come_late_to_each_other_as_was_measured():
    cpu = dataclasses.replace(Hardware.named("cpux2"), lateness={"2": ((0.01, 1e-3), (0.03, 5e-3))})
    late_s = contention(cpu, Placement.on(cpu, 2)).late_s
    assert [late_s(since_s) for since_s in (0.001, 0.02, 0.04)] == pytest.approx([1e-3, 3e-3, 7e-3])
    assert contention(cpu, Placement.on(cpu, 1)).late_s(0.02) == 0
    assert contention(H100, ON_64).late_s(1.0) == 0


def test_ranks_without_a_network_are_refused():
    with pytest.raises(ValueError, match="names no network between nodes"):
        Placement.on(Hardware.named("h100x8"), 9)


@settings(max_examples=60)
@given(
    st.sampled_from(KINDS), st.integers(0, 10**9), st.sampled_from([2, 4, 8, 16, 64]), st.sampled_from([1, 2, 8]),
    st.floats(1, 20), st.floats(1, 20),
)  # fmt: skip
def test_a_faster_link_never_makes_a_collective_slower(kind, sent, ranks, stride, within, between):
    def faster(link, times):
        return Link(link.bandwidth_bytes_per_s * times, link.latency_s / times)

    better = dataclasses.replace(
        H100, within=faster(H100.within, within), between=faster(H100.between, between)
    )
    placement = Placement(ranks * stride, 8)
    call = collective(kind, range(0, ranks * stride, stride), sent)
    assert collective_s(call, better, placement) <= collective_s(call, H100, placement) * (1 + 1e-12)


@settings(max_examples=60)
@given(st.sampled_from(KINDS), st.integers(1, 10**9), st.sampled_from([2, 8, 32]), st.floats(1, 10))
def test_more_bytes_never_take_less_time(kind, sent, ranks, times):
    few, many = (
        collective_s(collective(kind, range(ranks), int(number)), H100, ON_64)
        for number in (sent, sent * times)
    )
    assert few <= many * (1 + 1e-12) and math.isfinite(many)


@pytest.mark.parametrize(("phase", "products"), [("forward", 2), ("backward", 5)])
def test_operations_of_packed_samples_do_not_follow_from_lengths_without_values(phase, products):
    samples, tokens, heads, width = 2, 5, 3, 8
    rows, lse = torch.empty(samples * tokens, heads, width), torch.empty(heads, samples * tokens)
    starts, lengths = torch.full((samples + 1,), 10**9, dtype=torch.int32), (tokens, tokens)
    seed = torch.empty(0)
    if phase == "forward":
        func = torch.ops.aten._flash_attention_forward.default
        args = (rows, rows, rows, starts, starts, *lengths, 0.0, False, False)
        tensors = [rows] * 3
    else:
        func = torch.ops.aten._flash_attention_backward.default
        args = (rows, rows, rows, rows, rows, lse, starts, starts, *lengths, 0.0, False, seed, seed)
        tensors = [rows] * 5
    found = kernel_of(func, args, {}, None, tensors, [rows])
    assert found.kind == "attention" and found.shape == (samples, heads, tokens, tokens, width)
    assert found.flops == products * 2 * samples * heads * tokens * tokens * width


def test_each_kernel_of_attention_has_its_own_efficiency():
    shape = (1, 40, 32768, 32768, 128)
    flops = 4 * math.prod(shape)
    for kernel, reached in (("cudnn", 617e12), ("flash", 375e12)):
        operation = Operation(
            f"aten._scaled_dot_product_{kernel}_attention", "attention", "compute", flops=flops, shape=shape,
            dtype="bfloat16",
        )  # fmt: skip
        assert flops / kernel_s(operation, ALONE) == pytest.approx(reached, rel=0.01)
        narrow = dataclasses.replace(operation, shape=(*shape[:-1], 64))
        assert kernel_s(operation, ALONE) / kernel_s(narrow, ALONE) == pytest.approx(0.84)
        backward = dataclasses.replace(operation, name=f"{operation.name}_backward")
        assert kernel_s(backward, Hardware.named("h100")) > kernel_s(operation, Hardware.named("h100"))
    # A file of `doctor --calibrate` has measured one, which is that of all.
    one = Efficiency(("bytes",), (((1.0,), 0.5),))
    measured = dataclasses.replace(
        ALONE,
        efficiencies={"gemm": one, "memory": one, "attention": Efficiency(("queries",), (((1.0,), 0.5),))},
    )
    assert kernel_s(backward, measured) == pytest.approx(flops / (0.5 * measured.peak("bfloat16")))


@pytest.mark.parametrize(
    ("equation", "shapes", "shape"),
    [
        ("bshd,bthd->bhst", ((2, 5, 3, 8), (2, 7, 3, 8)), (6, 5, 7, 8)),
        ("bhst,bthd->bshd", ((2, 3, 5, 7), (2, 7, 3, 8)), (6, 5, 8, 7)),
        ("...i,ij->...j", ((2, 5, 8), (8, 3)), (1, 10, 3, 8)),
        ("ij->ji", ((2, 5),), (1, 10, 1, 1)),
    ],
)
def test_operations_of_an_einsum_are_those_of_its_product(equation, shapes, shape):
    operands = [torch.empty(each) for each in shapes]
    args, out = (equation, operands), torch.einsum(equation, *operands)
    found = kernel_of(torch.ops.aten.einsum.default, args, {}, out, operands, [out])
    assert (found.kind, found.shape, found.flops) == ("gemm", shape, 2 * math.prod(shape))


def test_a_convolution_of_a_hopper_is_slower_than_a_product_and_a_step_than_its_kernels():
    convolution = dataclasses.replace(product(32768, 16384, 16384), name="aten.convolution")
    assert convolution.flops / kernel_s(convolution, ALONE) == pytest.approx(52e12)
    a100 = Hardware.named("a100")
    assert kernel_s(convolution, a100) == kernel_s(product(32768, 16384, 16384), a100)
    in_a_step, alone = (kernel_s(convolution, hardware) for hardware in (H100, ALONE))
    assert in_a_step / alone == pytest.approx(H100.slowness["gemm"])
