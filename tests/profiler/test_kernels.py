"""The table of kernels, of traces made by hand and of one by torch's profiler."""

import gzip
import json

import pytest
import torch
from torch import nn

from opensora_accel.profiler import profile
from opensora_accel.profiler.analyse import analyse
from opensora_accel.profiler.kernels import kernels_in, kind_of
from opensora_accel.profiler.report import write_report


def event(name, cat, start, dur, thread=1):
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": dur, "pid": 1, "tid": thread}


def test_operators_of_a_host_count_without_those_within_them():
    events = [
        event("aten::linear", "cpu_op", 0, 11),
        event("aten::addmm", "cpu_op", 1, 9),
        event("aten::copy_", "cpu_op", 2, 3),
        event("aten::addmm", "cpu_op", 20, 4),
        event("aten::add", "cpu_op", 21, 2, thread=2),  # beside it, not within
        event("a region", "user_annotation", 0, 100),
    ]
    found = kernels_in(events, 3, 5, 50e-6)
    assert (found.rank, found.step, found.is_gpu, found.num_names) == (3, 5, False, 4)
    rows = [(row.name, row.kind, row.count, round(row.seconds * 1e6, 6)) for row in found.by_name]
    assert rows == [
        ("aten::addmm", "matrix products", 2, 10), ("aten::copy_", "copies", 1, 3),
        ("aten::linear", "matrix products", 1, 2), ("aten::add", "elementwise", 1, 2),
    ]  # fmt: skip
    first = found.by_kind[0]
    assert (first.kind, first.count, first.seconds, first.share) == (
        "matrix products",
        3,
        12e-6,
        pytest.approx(0.24),
    )


def test_on_a_gpu_its_kernels_count_and_nothing_else():
    events = [
        event("aten::mm", "cpu_op", 0, 100),
        event("nvjet_tst_128x256_64x4_2x1_v_bz_TNT", "kernel", 5, 60),
        event("flash_fwd_kernel<Flash_fwd_traits>", "kernel", 65, 20),
        event("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", 70, 10, thread=2),
    ]
    found = kernels_in(events, 0, 1, 100e-6)
    assert found.is_gpu
    assert [(row.kind, round(row.share, 9)) for row in found.by_kind] == [
        ("matrix products", 0.6), ("attention", 0.2), ("copies", 0.1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "collectives"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matrix products"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>", "norms"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>", "elementwise"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "reductions"),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>",
            "optimizer",
        ),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float>", "copies"),
        ("triton_poi_fused_add_mul_0", "elementwise"),
        ("triton_red_fused_native_layer_norm_3", "norms"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::convolution", "convolutions"),
        ("a_kernel_of_ones_own", "other"),
    ],
)
def test_kinds_by_name(name, kind):
    assert kind_of(name) == kind


def test_a_traced_run_has_the_table(tmp_path):
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    with profile(model, folder=tmp_path, count_flops=False, trace_steps=[2]) as run:
        for _ in range(3):
            model(torch.ones(128, 64)).sum().backward()
            run.step()
    kernels = analyse(tmp_path).kernels
    write_report([tmp_path], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert 'data-path="runs/0/kernels/by_kind/0/share"' in page and '<th scope="row">aten::addmm</th>' in page
    assert (kernels.rank, kernels.step, kernels.is_gpu) == (0, 2, False)
    named = {row.name: row for row in kernels.by_name}
    # Two products forward, and backward two of the second layer and one of the first, whose input needs no gradient.
    assert named["aten::addmm"].count == 2 and named["aten::mm"].count == 3
    assert 0 < sum(row.share for row in kernels.by_kind) <= 1
    assert sum(row.seconds for row in kernels.by_name) == pytest.approx(
        sum(row.seconds for row in kernels.by_kind)
    )


def test_a_damaged_trace_is_named(tmp_path):
    with profile(nn.Linear(2, 2), folder=tmp_path, count_flops=False) as run:
        run.step()
    path = tmp_path / "trace_rank_00000_step_00001.json.gz"
    for content in (b"no archive", gzip.compress(b"{"), gzip.compress(json.dumps({"a": 1}).encode())):
        path.write_bytes(content)
        with pytest.raises(
            ValueError, match=r"trace_rank_00000_step_00001.json.gz is no trace of torch's profiler"
        ):
            analyse(tmp_path)
