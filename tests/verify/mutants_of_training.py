"""Defects of the engine and its policies, of what averages gradients, and of the trainer's step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from opensora_accel.parallel_states import _COMPOSED_AXES
from opensora_accel.verify.findings import Kind
from shardformer.policy.wan import WAN
from tests.verify.meshes import (
    HYBRID,
    SHARDED,
    TRAINER,
    TWO_RANKS,
    ULYSSES,
    ULYSSES_BESIDE_DATA,
    Meshes,
)
from tests.verify.mutation import Edit, Mutant, Replacement
from tests.verify.steps import TINY_POLICY, DiTStep, TrainerStep, WanStep

ENGINE = "shardformer.engine."
FSDP = "opensora_accel.fsdp:"
BUILD = "opensora_accel.training.build:"
LOOP = "opensora_accel.training.loop:Trainer."
OPTIM = "opensora_accel.training.optim:"
DIT = DiTStep()


def _engine() -> list[Mutant]:
    def mutant(
        name: str,
        function: str,
        old: str,
        new: str,
        kind: Kind = "values",
        factor: str = "",
        *,
        step: Any = DIT,
        axes: tuple[str, ...] = ("ulysses",),
        meshes: Meshes = ULYSSES,
    ) -> Mutant:
        edit = Edit(ENGINE + function, old, new)
        return Mutant(f"engine: {name}", (edit,), step, meshes, kind, axes, factor)

    both = ("dp_replicate", "ulysses")
    registered = (
        '__import__("opensora_accel", fromlist=["parallel_states"]).parallel_states.get_parallel_group'
    )
    split, gather, attention = (
        "tokens:Tokens.split",
        "boundaries:gather_output",
        "attentions:_Kernels.spread",
    )
    return [
        mutant("split not scaled", split, '"down"', "None", "scale", "ulysses"),
        mutant("split scaled up", split, '"down"', '"up"', "scale", "ulysses²"),
        mutant("gather not scaled", gather, '"up"', "None", "scale", "ulysses⁻¹"),
        mutant("gather scaled down", gather, '"up"', '"down"', "scale", "ulysses⁻²"),
        mutant("gather over the world", gather, "tokens.group", "None", "failure", axes=both),
        mutant(
            "split over data",
            split,
            "tensor, self.group",
            f'tensor, {registered}("data")',
            step=DiTStep(tokens=12),
            meshes=ULYSSES_BESIDE_DATA,
        ),
        mutant(
            "no attention redirected",
            "attentions:_attentions",
            "(policy.self_attention, _self_attention)",
            "((), _self_attention)",
        ),
        mutant(
            "Ulysses over mixed",
            attention,
            "q, k, v, self._group",
            f'q, k, v, {registered}("mixed")',
            "failure",
            axes=both,
        ),
    ]


def _policies() -> list[Mutant]:
    def wan(name: str, kind: Kind = "failure", options: tuple[str, ...] = (), **changes: Any) -> Mutant:
        edit = Replacement("shardformer.policy:_POLICIES", (replace(WAN, **changes),))
        meshes = TWO_RANKS if kind == "failure" else ULYSSES
        return Mutant(f"Wan: {name}", (edit,), WanStep(options), meshes, kind, ("ulysses",))

    def tiny(name: str, kind: Kind = "failure", **changes: Any) -> Mutant:
        step = DiTStep(policy=replace(TINY_POLICY, **changes))
        meshes = ULYSSES_BESIDE_DATA if kind == "failure" else ULYSSES
        return Mutant(f"policy: {name}", (), step, meshes, kind, ("ulysses",))

    rope, _ = WAN.split_outputs
    return [
        wan("output not gathered", gather_outputs=()),
        wan("rotary tables whole", split_outputs=WAN.split_outputs[1:]),
        wan("one block attends alone", "values", self_attention=("blocks.0.attn1",)),
        wan("time of every token whole", options=("per_token_time",), split_outputs=(rope,)),
        tiny("tokens whole", split_inputs=()),
        tiny("cross-attention taken for self-attention", self_attention=("blocks.*.*_attention",)),
        tiny("no self-attention", "values", self_attention=()),
    ]


def _sharding() -> list[Mutant]:
    """Averages over the wrong ranks, and wrong divisors: FSDP2, DDP, named groups."""

    def sharded(
        name: str,
        function: str,
        old: str,
        new: str,
        kind: Kind,
        axes: tuple[str, ...],
        factor: str = "",
        meshes: Meshes = SHARDED,
    ) -> Mutant:
        return Mutant(f"FSDP2: {name}", (Edit(FSDP + function, old, new),), DIT, meshes, kind, axes, factor)

    def divisor(size: str, axes: tuple[str, ...], factor: str) -> Mutant:
        new = f"return [m.set_gradient_divide_factor(float({size})) for m in (*blocks, model)] and model"
        return sharded(f"divides by {size}", "shard_parameters", "return model", new, "scale", axes, factor)

    def replicated(name: str, old: str, new: str, axes: tuple[str, ...]) -> Mutant:
        edit = Edit(BUILD + "parallelize", old, new)
        return Mutant(f"DDP: {name}", (edit,), DIT, ULYSSES, "missing sum", axes)

    def groups(name: str, axes: tuple[str, ...], **changes: tuple[str, ...]) -> Mutant:
        edit = Replacement("opensora_accel.parallel_states:_COMPOSED_AXES", {**_COMPOSED_AXES, **changes})
        return Mutant(f"groups: {name}", (edit,), DIT, ULYSSES, "missing sum", axes)

    ulysses, data = ("ulysses",), ("dp_shard",)
    get, ddp = 'get_mesh("mixed")', 'group = get_parallel_group("mixed")'
    hybrid = 'if plan.dp_replicate == 1:\n        return get_mesh("mixed")'
    without = 'if True:\n        return get_mesh("mixed" if plan.dp_replicate == 1 else "sequence")'
    root = "fully_shard(model, mesh=mesh, reshard_after_forward=reshard)"
    return [
        sharded("over data", "_parameter_mesh", get, 'get_mesh("data")', "missing sum", ulysses),
        sharded("over sequence", "_parameter_mesh", get, 'get_mesh("sequence")', "missing sum", data),
        sharded("without the root", "shard_parameters", root, "pass", "missing sum", (*data, *ulysses)),
        sharded(
            "without replicas",
            "_parameter_mesh",
            hybrid,
            without,
            "missing sum",
            ("dp_replicate",),
            meshes=HYBRID,
        ),
        divisor("1", (*data, *ulysses), "dp_shard · ulysses"),
        divisor("plan.data", ulysses, "ulysses"),
        divisor("plan.mixed * plan.sequence", ulysses, "ulysses⁻¹"),
        replicated("over data", ddp, ddp.replace("mixed", "data"), ulysses),
        replicated("over sequence", ddp, ddp.replace("mixed", "sequence"), ("dp_replicate",)),
        replicated("left out", "plan.mixed == 1", "True", ("dp_replicate", *ulysses)),
        groups("mixed is data", ulysses, mixed=("dp_replicate", "dp_shard")),
        groups("mixed is sequence", ("dp_replicate",), mixed=("ring", "ulysses")),
    ]


def _trainer() -> list[Mutant]:
    """The real trainer's step. Without clipping where that would hide a factor on all gradients."""
    clipped = TrainerStep(Path())
    free = TrainerStep(Path(), changes=(("optim.clip_norm", 0.0),))
    twice = replace(free, accumulation=2)
    always = TrainerStep(Path(), changes=(("optim.clip_norm", 1e-3),))

    def mutant(
        name: str,
        place: str,
        old: str,
        new: str,
        kind: Kind,
        axes: tuple[str, ...],
        factor: str = "",
        *,
        step: TrainerStep = free,
        meshes: Meshes = TRAINER[:2],
    ) -> Mutant:
        return Mutant(f"trainer: {name}", (Edit(place, old, new),), step, meshes, kind, axes, factor)

    step, both = LOOP + "step", ("dp_replicate", "ulysses")
    sharded = ("dp_shard", "ulysses")
    divide, total, mean = "/ config.accumulation", "dist.all_reduce(total)", "/ dist.get_world_size()"
    ddp = "nullcontext() if last else self.forward.no_sync()"
    data = "get_data_parallel_group()"
    return [
        mutant("not divided by accumulation", step, divide, "", "scale", (), "2", step=twice),
        mutant("divided by accumulation twice", step, divide, divide + "**2", "scale", (), "0.5", step=twice),
        mutant(
            "divided by data",
            step,
            divide,
            f"{divide} / {data}.size()",
            "scale",
            ("dp_replicate",),
            "dp_replicate⁻¹",
        ),
        mutant(
            "reported loss not summed",
            step,
            total,
            "pass",
            "result",
            both,
            "dp_replicate⁻¹ · ulysses⁻¹",
            step=clipped,
        ),
        mutant(
            "reported loss summed over data",
            step,
            total,
            f"dist.all_reduce(total, group={data})",
            "result",
            ("ulysses",),
            "ulysses⁻¹",
        ),
        mutant("reported loss not divided", step, mean, "", "result", both, "dp_replicate · ulysses"),
        mutant(
            "never synchronised",
            LOOP + "_synchronized",
            ddp,
            "self.forward.no_sync()",
            "missing sum",
            both,
            step=twice,
        ),
        mutant(
            "the last batch is not synchronised",
            LOOP + "_synchronized",
            ddp,
            ddp.replace("if last", "if not last"),
            "missing sum",
            both,
            step=twice,
        ),
        mutant(
            "shards never synchronised",
            LOOP + "_synchronized",
            "sync(last)",
            "sync(False)",
            "missing gradient",
            sharded,
            meshes=SHARDED,
        ),
        mutant(
            "norm of one shard",
            OPTIM + "clip_gradients",
            "[p.grad for p",
            "[p.grad.to_local() for p",
            "result",
            sharded,
            step=clipped,
            meshes=SHARDED,
        ),
        mutant(
            "clipped twice",
            OPTIM + "clip_gradients",
            "max_norm, norm)",
            "max_norm / 2, norm)",
            "clipping",
            (),
            "0.5",
            step=always,
        ),
        mutant(
            "samples by global rank",
            LOOP + "__init__",
            "data_rank=data_group.rank()",
            "data_rank=dist.get_rank() % data_group.size()",
            "inputs",
            both,
            meshes=TRAINER,
        ),
        mutant(
            "noise by global rank",
            LOOP + "loss",
            "draw_noise(clean, seed,",
            "draw_noise(clean, seed + dist.get_rank(),",
            "inputs",
            ("ulysses",),
            meshes=TRAINER,
        ),
        mutant(
            "times by global rank",
            LOOP + "loss",
            "self.alpha, seed,",
            "self.alpha, seed + dist.get_rank(),",
            "inputs",
            ("ulysses",),
            meshes=TRAINER,
        ),
    ]


TRAINING_MUTANTS = [*_engine(), *_policies(), *_sharding(), *_trainer()]
