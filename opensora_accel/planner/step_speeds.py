"""What the host takes in a training step, and how much slower kernels are there, from steps of a small transformer.

`calibrate` puts it into a hardware file: by phase of a step, and what FSDP2 adds to it.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from opensora_accel.checkpoint import checkpoint_blocks
from opensora_accel.observe import architecture_of
from opensora_accel.plan import Plan
from opensora_accel.planner.cost import kernel_s
from opensora_accel.planner.hardware import Hardware, InPhase
from opensora_accel.planner.operators import starts_kernel
from opensora_accel.planner.run import trace_step
from opensora_accel.planner.trace import Phase
from opensora_accel.planner.workload import Workload, workload_of_model

PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer")
_RECOMPUTE: Phase = "recompute"
# Head dim, heads, and side in tokens of the steps that are measured.
_TINY, _SMALL, LARGE = (16, 2, 4), (40, 3, 20), (48, 5, 26)


@dataclass(frozen=True)
class SmallStep:
    """A step of a small video transformer, whole or by its phases, and the same as a workload."""

    model: nn.Module
    given: Mapping[str, Any]
    optimizer: torch.optim.Optimizer
    workload: Workload

    def __call__(self) -> None:
        self.phases_s()

    def phases_s(self) -> dict[str, float]:
        """Runs it; the host's seconds by phase."""
        # On a CPU other programs do not count. Of a GPU's backward another thread starts the kernels.
        clock = time.perf_counter if self.given["hidden_states"].is_cuda else time.thread_time
        ends = [clock()]
        loss = functional.mse_loss(self.model(**self.given)[0], self.given["hidden_states"])
        ends.append(clock())
        loss.backward()
        ends.append(clock())
        self.optimizer.step()
        self.optimizer.zero_grad()
        ends.append(clock())
        return {
            name: after - before
            for name, (before, after) in zip(PHASES, itertools.pairwise(ends), strict=True)
        }

    def medians_s(self) -> dict[str, float]:
        """The same of some steps."""
        found = []
        for number in range(12):
            phases_s = self.phases_s()
            if number >= 2:
                found.append(phases_s)
            if self.given["hidden_states"].is_cuda:
                torch.cuda.synchronize()
        return {name: statistics.median(each[name] for each in found) for name in PHASES}


def small_step(
    device: torch.device,
    head_dim: int,
    heads: int,
    side: int,
    mesh: DeviceMesh | None = None,
    *,
    is_checkpointed: bool = False,
) -> SmallStep:
    """Of side × side tokens; its blocks are sharded by FSDP2 over a mesh, if there is one.

    Raises:
        ModuleNotFoundError: diffusers is not installed.
    """
    from diffusers import WanTransformer3DModel

    channels = heads * head_dim

    def build() -> nn.Module:
        made: Any = WanTransformer3DModel
        model: nn.Module = made(
            num_attention_heads=heads, attention_head_dim=head_dim, in_channels=4, out_channels=4, text_dim=16,
            freq_dim=32, ffn_dim=4 * channels, num_layers=4, rope_max_seq_len=64,
        )  # fmt: skip
        return model

    def inputs(_model: nn.Module, dtype: torch.dtype) -> dict[str, Any]:
        return {
            "hidden_states": torch.randn(1, 4, 1, 2 * side, 2 * side, dtype=dtype),
            "timestep": torch.tensor([500.0]),
            "encoder_hidden_states": torch.randn(1, 8, 16, dtype=dtype),
            "return_dict": False,
        }

    fused = device.type == "cuda"
    workload = workload_of_model(
        "small", build, inputs, num_tokens=side * side, num_heads=heads, fused_optimizer=fused,
        architecture=architecture_of(device),
    )  # fmt: skip
    model = build().to(device)
    blocks = [*model.get_submodule("blocks").children()]
    if is_checkpointed:
        checkpoint_blocks(blocks, "full")
    if mesh is not None:
        # FSDP2 warns of outputs that are views.
        model.register_forward_hook(lambda _module, _args, out: (out[0].clone(),))
        for module in (*blocks, model):
            fully_shard(module, mesh=mesh)
    given = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in inputs(model, torch.float32).items()
    }
    return SmallStep(model, given, torch.optim.AdamW(model.parameters(), fused=fused), workload)


def phases(device: torch.device, hardware: Hardware) -> tuple[float, dict[str, InPhase]]:
    """The host's seconds for an operator of a forward; and how much longer it and kernels take in each phase.

    In a step, memory is new and caches are cold for a kernel, most of all in the optimizer, which meets each number
    once; and the host passes through modules, views and autograd. Two steps of the same operators, a small one and a
    large one, tell the two apart. A forward of 300 operators, whose kernels take k seconds by themselves:

        small: 18 ms taken, k = 12 ms        slowness = (75 - 18) / (66 - 12) = 1.06
        large: 75 ms taken, k = 66 ms        launch = (18 - 1.06 · 12) / 300 = 18 µs

    What is recomputed has the kernels of a forward, and what the same step takes longer with checkpoints is beside them
    the host's. On a GPU the host runs ahead, and a step whose kernels take no time shows what it takes.
    """

    def taken(sizes: tuple[int, int, int]) -> dict[Phase, tuple[float, float, int]]:
        step = small_step(device, *sizes)
        again = small_step(device, *sizes, is_checkpointed=True)
        medians_s, again_s = step.medians_s(), again.medians_s()
        medians_s["recompute"] = sum(again_s[each] - medians_s[each] for each in ("forward", "backward"))
        plain, checkpointed = (
            trace_step(step.workload, Plan()),
            trace_step(again.workload, Plan(checkpoint="full")),
        )
        found: dict[Phase, tuple[float, float, int]] = {}
        for phase in (*PHASES, _RECOMPUTE):
            operations = (checkpointed if phase == _RECOMPUTE else plain).operations
            of_phase = [kernel_s(each, hardware) for each in operations if each.phase == phase]
            found[phase] = medians_s[phase], sum(of_phase, 0.0), len(of_phase)
        return found

    on_gpu = device.type == "cuda"
    slower = dict.fromkeys((*PHASES, _RECOMPUTE), 1.0)
    small = taken(_TINY if on_gpu else _SMALL)
    if not on_gpu:
        large = taken(LARGE)
        for phase in PHASES:
            (small_s, small_kernels_s, _), (large_s, large_kernels_s, _) = small[phase], large[phase]
            times = (large_s - small_s) / (large_kernels_s - small_kernels_s)
            # Beyond these bounds something else ran beside it.
            slower[phase] = min(4.0 if phase == "optimizer" else 1.5, max(0.8, times))
        slower[_RECOMPUTE] = slower["forward"]
    launches_s = {
        phase: max(taken_s - (0.0 if on_gpu else slower[phase] * kernels_s), taken_s / 20) / count
        for phase, (taken_s, kernels_s, count) in small.items()
    }
    launch_s = launches_s["forward"]
    return launch_s, {
        phase: InPhase(launch=max(launches_s[phase], 0.01 * launch_s) / launch_s, slowness=times)
        for phase, times in slower.items()
    }


def sharded_host_s(device: torch.device) -> tuple[float, float]:
    """What the host takes longer for an operator of the optimizer under FSDP2, and for each parameter in its hooks.

    A rank by itself shards a small step's blocks with nobody; what is left of the hooks without the copies is theirs.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(), 1), mesh_dim_names=("ranks", "own"))
    plain, sharded = small_step(device, *_SMALL), small_step(device, *_SMALL, mesh=mesh["own"])
    plain_s, sharded_s = plain.medians_s(), sharded.medians_s()
    parameters = [each.detach() for each in plain.model.parameters()]
    copied_s = []
    for _ in range(5):
        before = time.thread_time()
        for each in parameters:
            each.clone()
        copied_s.append(time.thread_time() - before)
    for each in plain.model.parameters():
        each.grad = torch.zeros_like(each)
    with _Count() as count:
        plain.optimizer.step()
    in_hooks_s = sum(sharded_s[each] - plain_s[each] for each in ("forward", "backward"))
    in_optimizer_s = sharded_s["optimizer"] - plain_s["optimizer"]
    hooked = 3 * len(parameters)
    # Each of the three hooks copies all parameters once.
    in_hooks_s -= 3 * statistics.median(copied_s)
    return max(0.0, in_optimizer_s) / count.kernels, max(0.0, in_hooks_s) / hooked


class _Count(TorchDispatchMode):
    """Counts operators that start a kernel."""

    kernels = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.kernels += starts_kernel(func)
        return func(*args, **(kwargs or {}))
