"""Small workloads, and the same steps on real ranks, with live bytes and collectives counted there."""

from __future__ import annotations

import gc
from collections import Counter
from functools import partial

import torch
from diffusers import HunyuanVideoTransformer3DModel, WanTransformer3DModel
from torch.utils._python_dispatch import TorchDispatchMode

from opensora_accel import parallel_states
from opensora_accel.checkpoint import GLOBAL_ACTIVATION_MANAGER
from opensora_accel.observe import CollectiveRecorder
from opensora_accel.observe.meshes import MeshShape, Run, group_of
from opensora_accel.observe.owners import arena_memory
from opensora_accel.planner.workload import workload_of_model
from opensora_accel.profiler import LiveBytes
from tests.video_models.case import randn, text_mask

_COMPOSITE = torch._C.DispatchKey.CompositeExplicitAutograd


def wan(layers=2, heads=4, head_dim=12):
    torch.manual_seed(0)
    return WanTransformer3DModel(
        num_attention_heads=heads,
        attention_head_dim=head_dim,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=64,
        num_layers=layers,
        rope_max_seq_len=32,
    )


def hunyuan_video(double=2, single=2):
    torch.manual_seed(0)
    return HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=4,
        attention_head_dim=8,
        num_layers=double,
        num_single_layers=single,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        patch_size=2,
        patch_size_t=1,
        text_embed_dim=16,
        pooled_projection_dim=10,
        rope_axes_dim=(2, 2, 4),
    )


MODELS = {"Wan": wan, "HunyuanVideo": hunyuan_video}


def inputs_of(name, _model, dtype):
    """5 × 3 × 5 = 75 tokens, which divide by 3 and 5 only, and 7 of text."""
    given = {
        "hidden_states": randn(2, 4, 5, 6, 10).to(dtype),
        "timestep": torch.tensor([100.0, 700.0]),
        "encoder_hidden_states": randn(2, 7, 16, seed=2).to(dtype),
        "return_dict": False,
    }
    if name == "HunyuanVideo":
        given["encoder_attention_mask"] = text_mask((7, 4), 7).long()
        given["pooled_projections"] = randn(2, 10, seed=3).to(dtype)
        given["guidance"] = torch.tensor([1000.0, 6000.0])
    return given


def small(name="Wan", fused_optimizer=False, accumulation=1, architecture="cpu", **sizes):
    return workload_of_model(
        name,
        partial(MODELS[name], **sizes),
        partial(inputs_of, name),
        fused_optimizer=fused_optimizer,
        architecture=architecture,
        accumulation=accumulation,
    )


class AllLiveBytes(LiveBytes):
    """Also of what custom operators make and free inside."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inner = func.namespace not in ("aten", "prim", "prims", "c10d", "_c10d_functional")
        if inner and func.has_kernel_for_dispatch_key(_COMPOSITE):
            TorchDispatchMode.__enter__(self)
            try:
                return func._op_dk(_COMPOSITE, *args, **(kwargs or {}))
            finally:
                TorchDispatchMode.__exit__(self, None, None, None)
        return super().__torch_dispatch__(func, types, args, kwargs)


def really(workload, plan, steps=3):
    """On a rank of a real world: peak of live bytes in a step, and what a step sends by kind and axis."""
    shape = MeshShape.of(plan)
    rank = torch.distributed.get_rank()
    run = Run(shape, rank, shape.data_rank(rank), shape.data_size)
    GLOBAL_ACTIVATION_MANAGER.close()
    with AllLiveBytes() as live:
        model = workload.model_fn()
        one_pass = workload.prepare(model, run)
        optimizer = torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad], fused=workload.fused_optimizer
        )

        def step():
            for number in range(workload.accumulation):
                one_pass(number == workload.accumulation - 1)
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(steps - 1):
            step()
        for memory in arena_memory():
            live.ignore(memory)
        peaks = []
        # gloo's threads let go of what has arrived when they come to it: where the cores are busy, that is late.
        for _ in range(3):
            gc.collect()
            live.peak_bytes = live.now_bytes
            step()
            peaks.append(live.peak_bytes)
        peak_bytes = min(peaks)
        arena = GLOBAL_ACTIVATION_MANAGER.engine.arena
        host_bytes = 0 if arena is None else arena.size_bytes
    recorder = CollectiveRecorder()
    with recorder:
        step()
    calls = Counter()
    sent = Counter()
    for call in recorder.calls:
        if call.kind not in ("recv", "barrier"):
            key = call.kind, str(group_of(call.group, shape))
            calls[key] += 1
            sent[key] += call.sent_bytes
    GLOBAL_ACTIVATION_MANAGER.close()
    parallel_states.reset()
    return {
        "peak": peak_bytes,
        "host": host_bytes,
        "communication": {key: (calls[key], sent[key]) for key in calls},
    }
