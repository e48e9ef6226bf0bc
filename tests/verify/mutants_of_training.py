"""Defects around the engine and its policies, in what averages gradients, and in the trainer's step."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from opensora_accel.parallel_states import get_data_parallel_group, get_mesh, get_parallel_group
from shardformer.policy.wan import WAN
from tests.verify.defects import (
    FACTORS,
    Collective,
    Mutant,
    Patch,
    in_place_of,
    not_summed,
    over,
    scaled,
    with_arguments,
)
from tests.verify.meshes import (
    HYBRID,
    SHARDED,
    TRAINER,
    TWO_RANKS,
    ULYSSES,
    ULYSSES_BESIDE_DATA,
    Meshes,
)
from tests.verify.model_steps import TINY_POLICY, DiTStep, TrainerStep, WanStep
from tests.verify.mutants_of_attention import ATTENTION, alone, over_mixed
from tests.verify.mutants_of_communications import GATHER, SPLIT, rescaled

FIND_POLICY = "shardformer.policy:find_policy"
FULLY_SHARD = "torch.distributed.fsdp:fully_shard"
GET_GROUP = "opensora_accel.parallel_states:get_parallel_group"
DDP = "torch.nn.parallel:DistributedDataParallel."
FLOW = "opensora_accel.training.flow:"
DIT = DiTStep()
BOTH = ("dp_replicate", "ulysses")


def over_group(original: Any, input_: Tensor, _group: Any, *args: Any, name: str, **options: Any) -> Tensor:
    group = dist.group.WORLD if name == "world" else get_parallel_group(name)
    return original(input_, group, *args, **options)


def _engine() -> list[Mutant]:
    def mutant(
        name: str,
        *changes: Any,
        kind: str = "values",
        factor: str = "",
        step: Any = DIT,
        axes: tuple[str, ...] = ("ulysses",),
        meshes: Meshes = ULYSSES,
    ) -> Mutant:
        return Mutant(f"engine: {name}", changes, step, meshes, kind, axes, factor)

    def scale(name: str, place: str, by: str, factor: str) -> Mutant:
        return mutant(name, Patch(place, partial(rescaled, by=by)), kind="scale", factor=factor)

    attentions = ATTENTION + "ulysses_attention", ATTENTION + "usp_attention"
    return [
        scale("split not scaled", SPLIT, "1", "ulysses"),
        scale("split scaled up", SPLIT, "P", "ulysses²"),
        scale("gather not scaled", GATHER, "1", "ulysses⁻¹"),
        scale("gather scaled down", GATHER, "1/P", "ulysses⁻²"),
        mutant(
            "gather over the world", Patch(GATHER, partial(over_group, name="world")), kind="failure", axes=BOTH
        ),
        mutant(
            "split over data", Patch(SPLIT, partial(over_group, name="data")), step=DiTStep(tokens=12),
            meshes=ULYSSES_BESIDE_DATA,
        ),
        mutant("no attention redirected", *(Patch(place, partial(in_place_of, alone)) for place in attentions)),
        mutant("Ulysses over mixed", Patch(attentions[0], over_mixed), kind="failure", axes=BOTH),
    ]  # fmt: skip


def another_policy(original: Any, model: Any, *, changes: dict[str, Any]) -> Any:
    return replace(original(model), **changes)


def _policies() -> list[Mutant]:
    def wan(name: str, kind: str = "failure", options: tuple[str, ...] = (), **changes: Any) -> Mutant:
        change = Patch(FIND_POLICY, partial(another_policy, changes=changes))
        meshes = TWO_RANKS if kind == "failure" else ULYSSES
        return Mutant(f"Wan: {name}", (change,), WanStep(options), meshes, kind, ("ulysses",))

    def tiny(name: str, kind: str = "failure", **changes: Any) -> Mutant:
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


def on_mesh(original: Any, module: Any, *args: Any, mesh: Any = None, name: str, **options: Any) -> Any:
    return original(module, *args, mesh=get_mesh(name), **options)


def without_root(original: Any, module: Any, *args: Any, **options: Any) -> Any:
    return module if hasattr(module, "blocks") else original(module, *args, **options)


def in_each_replica(original: Any, module: Any, *args: Any, mesh: Any, **options: Any) -> Any:
    return original(module, *args, mesh=get_mesh("sequence") if mesh.ndim == 2 else mesh, **options)


def another_group(original: Any, name: str, *, of: str, instead: str) -> Any:
    return original(instead if name == of else name)


def ddp_over(original: Any, *args: Any, process_group: Any = None, name: str, **options: Any) -> None:
    """DDP over the group called `name`; over this rank alone where it is empty."""
    group = get_parallel_group(name) if name else get_mesh("tp").get_group()
    original(*args, process_group=group, **options)


def _sharding() -> list[Mutant]:
    """Averages over the wrong ranks, and wrong divisors: FSDP2, DDP, named groups."""

    def sharded(name: str, wrapper: Any, axes: tuple[str, ...], meshes: Meshes = SHARDED) -> Mutant:
        return Mutant(f"FSDP2: {name}", (Patch(FULLY_SHARD, wrapper),), DIT, meshes, "missing sum", axes)

    def divisor(name: str, axes: tuple[str, ...], factor: str) -> Mutant:
        return Mutant(f"FSDP2: divides by {name}", (), DiTStep(divisor=name), SHARDED, "scale", axes, factor)

    def replicated(name: str, group: str, axes: tuple[str, ...]) -> Mutant:
        change = Patch(DDP + "__init__", partial(ddp_over, name=group))
        return Mutant(f"DDP: {name}", (change,), DIT, ULYSSES, "missing sum", axes)

    def groups(instead: str, axes: tuple[str, ...]) -> Mutant:
        change = Patch(GET_GROUP, partial(another_group, of="mixed", instead=instead))
        return Mutant(f"groups: mixed is {instead}", (change,), DIT, ULYSSES, "missing sum", axes)

    ulysses, data, replicas = ("ulysses",), ("dp_shard",), ("dp_replicate",)
    return [
        sharded("over data", partial(on_mesh, name="data"), ulysses),
        sharded("over sequence", partial(on_mesh, name="sequence"), data),
        sharded("without the root", without_root, (*data, *ulysses)),
        sharded("without replicas", in_each_replica, replicas, HYBRID),
        divisor("1", (*data, *ulysses), "dp_shard · ulysses"),
        divisor("data", ulysses, "ulysses"),
        divisor("mixed * sequence", ulysses, "ulysses⁻¹"),
        replicated("over data", "data", ulysses),
        replicated("over sequence", "sequence", replicas),
        replicated("left out", "", BOTH),
        groups("data", ulysses),
        groups("sequence", replicas),
    ]


def loss_rescaled(original: Any, loss: Tensor, *args: Any, by: str, **options: Any) -> None:
    original(loss * FACTORS[by](get_data_parallel_group().size()), *args, **options)


def never_synchronised(original: Any, ddp: Any, *args: Any, **options: Any) -> Any:
    with ddp.no_sync():
        return original(ddp, *args, **options)


def all_but_the_last(original: Any, ddp: Any, *args: Any, **options: Any) -> Any:
    """Gradients are averaged where they should be kept back, and kept back where they should be averaged."""
    is_last = ddp.require_backward_grad_sync
    ddp.require_backward_grad_sync = not is_last
    try:
        return original(ddp, *args, **options)
    finally:
        ddp.require_backward_grad_sync = is_last


def shards_kept_back(original: Any, module: Any, *args: Any, **options: Any) -> Any:
    sharded = original(module, *args, **options)
    module.set_requires_gradient_sync(False)
    return sharded


def never(original: Any, module: FSDPModule, *_: Any, **options: Any) -> None:
    original(module, False, **options)


def norm_of_one_shard(original: Any, tensors: Any, *args: Any, **options: Any) -> Tensor:
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    return original(local, *args, **options)


def _plus_rank(number: int) -> int:
    return number + dist.get_rank()


def _rank_of_all(_data_rank: int) -> int:
    return dist.get_rank() % get_data_parallel_group().size()


def _half(number: float) -> float:
    return number / 2


def _trainer() -> list[Mutant]:
    """The real trainer's step. Without clipping where that would hide a factor on all gradients."""
    clipped = TrainerStep(Path())
    free = TrainerStep(Path(), changes=(("optim.clip_norm", 0.0),))
    twice = replace(free, accumulation=2)
    always = TrainerStep(Path(), changes=(("optim.clip_norm", 1e-3),))

    def mutant(
        name: str,
        kind: str,
        axes: tuple[str, ...],
        factor: str,
        *changes: Any,
        step: TrainerStep = free,
        meshes: Meshes = TRAINER[:2],
    ) -> Mutant:
        return Mutant(f"trainer: {name}", changes, step, meshes, kind, axes, factor)

    def loss(by: str) -> Patch:
        return Patch("torch:Tensor.backward", partial(loss_rescaled, by=by))

    def reported(change: Any) -> Collective:
        return Collective("all-reduce", change, "after")

    def seeded(name: str) -> Patch:
        return Patch(FLOW + name, partial(with_arguments, _named={"seed": _plus_rank}))

    loader = Patch(
        "opensora_accel.training.data:ClipLoader.__init__",
        partial(with_arguments, _named={"data_rank": _rank_of_all}),
    )
    sync = Patch("torch.distributed.fsdp:FSDPModule.set_requires_gradient_sync", never)
    halved = partial(with_arguments, _named={"max_norm": _half})
    over_data = reported(partial(over, group="data"))
    sharded = ("dp_shard", "ulysses")
    return [
        mutant("not divided by accumulation", "scale", (), "2", loss("2"), step=twice),
        mutant("divided by accumulation twice", "scale", (), "0.5", loss("1/2"), step=twice),
        mutant("divided by data", "scale", ("dp_replicate",), "dp_replicate⁻¹", loss("1/P")),
        mutant(
            "reported loss not summed", "result", BOTH, "dp_replicate⁻¹ · ulysses⁻¹", reported(not_summed),
            step=clipped,
        ),
        mutant("reported loss summed over data", "result", ("ulysses",), "ulysses⁻¹", over_data),
        mutant(
            "reported loss not divided", "result", BOTH, "dp_replicate · ulysses",
            reported(partial(scaled, by="P")),
        ),
        mutant("never synchronised", "missing sum", BOTH, "", Patch(DDP + "forward", never_synchronised), step=twice),
        mutant(
            "the last batch is not synchronised", "missing sum", BOTH, "", Patch(DDP + "forward", all_but_the_last),
            step=twice,
        ),
        mutant(
            "shards never synchronised", "missing gradient", sharded, "", Patch(FULLY_SHARD, shards_kept_back), sync,
            meshes=SHARDED,
        ),
        mutant(
            "norm of one shard", "result", sharded, "", Patch("torch.nn.utils:get_total_norm", norm_of_one_shard),
            step=clipped, meshes=SHARDED,
        ),
        mutant(
            "clipped twice", "clipping", (), "0.5", Patch("torch.nn.utils:clip_grads_with_norm_", halved),
            step=always,
        ),
        mutant("samples by global rank", "inputs", BOTH, "", loader, meshes=TRAINER),
        mutant("noise by global rank", "inputs", ("ulysses",), "", seeded("draw_noise"), meshes=TRAINER),
        mutant("times by global rank", "inputs", ("ulysses",), "", seeded("draw_times"), meshes=TRAINER),
    ]  # fmt: skip


TRAINING_MUTANTS = [*_engine(), *_policies(), *_sharding(), *_trainer()]
