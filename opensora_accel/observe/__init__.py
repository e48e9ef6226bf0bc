"""What a step does, seen from outside, on real ranks or on one rank of a world that is not there.

Verifier, profiler and planner read a step through this room: where it is, what it computes, sends and holds, whether
ranks agree, and the stand-ins under which it runs without a GPU or without other ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opensora_accel import lazy

if TYPE_CHECKING:
    from opensora_accel.observe.as_cuda import CPU, Architecture, architecture_of, operators_of_cuda
    from opensora_accel.observe.call_site import find_call_site
    from opensora_accel.observe.clipping import ClipKind, before_clipping
    from opensora_accel.observe.collectives import CollectiveRecorder
    from opensora_accel.observe.equality import (
        Holders,
        digest,
        digest_of_all,
        first_difference,
        holders_of,
        local_part,
        norms,
        states_of,
    )
    from opensora_accel.observe.fakes import (
        Exchanges,
        FakeFloats,
        OtherRanks,
        are_settled,
        fake_world,
        merge_exchanges,
        without_values,
    )
    from opensora_accel.observe.fitting import BlockMemory, Change, StepMemory, changes, smallest_change
    from opensora_accel.observe.flops import FlopCounter, SharedAttention
    from opensora_accel.observe.forecast import (
        IDLE,
        Forecast,
        ForeseenCalls,
        ForeseenCopies,
        ForeseenPart,
        MeasuredParts,
        Three,
        axes_named,
        differences,
        digest_of,
    )
    from opensora_accel.observe.gpus import GPUS, gpu_of, peak_of
    from opensora_accel.observe.kinds import AFTER, BACKWARD, FORWARD, KINDS, RECOMPUTE, class_of
    from opensora_accel.observe.live_bytes import DeviceBytes, LimitedBytes, LiveBytes
    from opensora_accel.observe.loaded import Whole, sums_of, unlike_file
    from opensora_accel.observe.meshes import (
        MAX_RANKS,
        PART_AXIS_NAMES,
        MeshShape,
        ModelFn,
        Run,
        Step,
        axes_between,
        compose_axes,
        group_of,
        meshes_of,
        name_of,
        promised_groups,
        subsets,
    )
    from opensora_accel.observe.module_regions import blocks_by_policy, follow_modules, phase_of_modules
    from opensora_accel.observe.nonfinite import ForwardCall, StepInputs, as_then, trace_nonfinite
    from opensora_accel.observe.on_cpu import (
        accelerator_stand_ins,
        call_to_its_end,
        casts_lifted,
        dropouts_of,
        launcher_environment,
        prepare_model,
        without_loss_scaling,
    )
    from opensora_accel.observe.operators import (
        NAMESPACES,
        CollectiveCall,
        arguments_of,
        calls_of,
        process_group_of,
        transfer_operators,
    )
    from opensora_accel.observe.owners import (
        DETAILED_KINDS,
        ELSEWHERE,
        GATHERED,
        OFFLOAD,
        Owner,
        Owners,
        arena_bytes,
        arena_memory,
        plain_tensors,
    )
    from opensora_accel.observe.places import OUTSIDE, Place, Places, find_blocks
    from opensora_accel.observe.step_file import load_file

__all__ = [
    "AFTER",
    "BACKWARD",
    "CPU",
    "DETAILED_KINDS",
    "ELSEWHERE",
    "FORWARD",
    "GATHERED",
    "GPUS",
    "IDLE",
    "KINDS",
    "MAX_RANKS",
    "NAMESPACES",
    "OFFLOAD",
    "OUTSIDE",
    "PART_AXIS_NAMES",
    "RECOMPUTE",
    "Architecture",
    "BlockMemory",
    "Change",
    "ClipKind",
    "CollectiveCall",
    "CollectiveRecorder",
    "DeviceBytes",
    "Exchanges",
    "FakeFloats",
    "FlopCounter",
    "Forecast",
    "ForeseenCalls",
    "ForeseenCopies",
    "ForeseenPart",
    "ForwardCall",
    "Holders",
    "LimitedBytes",
    "LiveBytes",
    "MeasuredParts",
    "MeshShape",
    "ModelFn",
    "OtherRanks",
    "Owner",
    "Owners",
    "Place",
    "Places",
    "Run",
    "SharedAttention",
    "Step",
    "StepInputs",
    "StepMemory",
    "Three",
    "Whole",
    "accelerator_stand_ins",
    "architecture_of",
    "are_settled",
    "arena_bytes",
    "arena_memory",
    "arguments_of",
    "as_then",
    "axes_between",
    "axes_named",
    "before_clipping",
    "blocks_by_policy",
    "call_to_its_end",
    "calls_of",
    "casts_lifted",
    "changes",
    "class_of",
    "compose_axes",
    "differences",
    "digest",
    "digest_of",
    "digest_of_all",
    "dropouts_of",
    "fake_world",
    "find_blocks",
    "find_call_site",
    "first_difference",
    "follow_modules",
    "gpu_of",
    "group_of",
    "holders_of",
    "launcher_environment",
    "load_file",
    "local_part",
    "merge_exchanges",
    "meshes_of",
    "name_of",
    "norms",
    "operators_of_cuda",
    "peak_of",
    "phase_of_modules",
    "plain_tensors",
    "prepare_model",
    "process_group_of",
    "promised_groups",
    "smallest_change",
    "states_of",
    "subsets",
    "sums_of",
    "trace_nonfinite",
    "transfer_operators",
    "unlike_file",
    "without_loss_scaling",
    "without_values",
]

__getattr__, __dir__ = lazy.attach(__name__)
