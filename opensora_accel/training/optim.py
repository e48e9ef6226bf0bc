"""AdamW, with a schedule or without, gradient clipping and averaged weights, for whole and for sharded parameters."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from opensora_accel.communications import gather_objects
from opensora_accel.experimental import experiment
from opensora_accel.fsdp import reshard
from opensora_accel.training.sections import OptimConfig
from shardformer import blocks_of


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW with moments in the form of `config.state`, Muon for blocks' matrices, or Prodigy; matrices decay."""
    # Biases, norms and embeddings of single vectors are better not drawn towards 0.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    if config.state != "fp32":
        low_bit: torch.optim.Optimizer = experiment("low_bit").low_bit_adamw(groups, config)
        return low_bit
    if config.schedule == "free":
        import schedulefree

        free: Any = schedulefree.AdamWScheduleFree(groups, lr=config.lr, betas=config.betas, eps=config.eps)
        free.train()  # for good: `FreeAverage` leaves its weights alone
        optimizer: torch.optim.Optimizer = free
        return optimizer
    if config.algorithm == "prodigy":
        from opensora_accel.training.prodigy import Prodigy

        return Prodigy(groups, lr=config.lr, betas=config.betas, eps=config.eps)
    # On a GPU one kernel steps all parameters, where a loop would launch several for each.
    options: dict[str, Any] = {
        "lr": config.lr,
        "betas": config.betas,
        "eps": config.eps,
        "fused": trained[0].is_cuda,
    }
    if config.algorithm == "muon":
        return _muon(model, groups, options)
    return ShardwiseAdamW(groups, **options)


def _muon(model: nn.Module, groups: list[dict[str, Any]], options: dict[str, Any]) -> torch.optim.Optimizer:
    from opensora_accel.training.muon import Muon, hidden_matrices

    matrices = hidden_matrices(blocks_of(model))
    hidden = set(matrices)
    groups[0]["params"] = [parameter for parameter in groups[0]["params"] if parameter not in hidden]
    of_blocks = {"params": matrices, "weight_decay": groups[0]["weight_decay"], "is_matrix": True}
    return Muon([of_blocks, *(each | {"is_matrix": False} for each in groups)], **options)


def shard_of(tensor: Tensor) -> Tensor:
    """The memory of this rank's shard, where a tensor is a DTensor. Call it without gradients."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class ShardwiseAdamW(torch.optim.AdamW):
    """AdamW whose steps see shards as plain tensors; its moments are DTensors all the same, and saved as such.

    AdamW's arithmetic is elementwise, so that a step of the shards is the step. For DTensors the host would look
    through the lists of all parameters, moments and gradients: 17 ms for 430 parameters where plain tensors take 2,
    and a GPU has nothing to do meanwhile, as the gradients' norm was waited for.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Any]) -> Any:
        # Fills the lists that the step is made of: parameters, gradients, moments, numbers of steps.
        has_complex = super()._init_group(group, *lists)
        for each in lists:
            each[:] = map(shard_of, each)
        return has_complex


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the rate of the next step."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)  # a compiled step reads it
        else:
            group["lr"] = rate


def new_moment(optimizer: torch.optim.Optimizer, parameter: Tensor, name: str) -> Tensor:
    """A moment of zeros, in the shape of the parameter, in the optimizer's form: "exp_avg" or "exp_avg_sq"."""
    # torchao's own method, of moments of few bits. Its last argument asks for signed codes, which a mean of squares
    # does not need.
    if hasattr(optimizer, "_new_buffer"):
        moment: Tensor = optimizer._new_buffer(parameter, name == "exp_avg")
        return moment
    return torch.zeros_like(parameter, requires_grad=False)


def is_quantized(moment: Tensor) -> bool:
    """Whether a moment is kept as codes and scales, of which `experiments.low_bit.saved_values` makes new values."""
    return hasattr(moment.to_local() if isinstance(moment, DTensor) else moment, "codes")


def learning_rate(config: OptimConfig, step: int, num_steps: int) -> float:
    """The rate of a step counted from 0: a linear warm-up, then constant or cosine down to a thousandth."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule != "cosine":
        return config.lr
    progress = (step - config.warmup_steps) / max(1, num_steps - 1 - config.warmup_steps)
    return config.lr * (1e-3 + (1 - 1e-3) * (1 + math.cos(math.pi * min(1.0, progress))) / 2)


class EMA:
    """Exponentially averaged weights, in the parameters' own sharding and precision.

    The decay starts low and rises to `decay`, so that the first steps do not keep the random initialisation.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay, self.num_updates = decay, 0
        self._model = model
        self._live = {
            name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
        }
        self.weights: dict[str, Tensor] = {name: p.detach().clone() for name, p in self._live.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Takes the live weights into the average."""
        self.num_updates += 1
        # 0.1 at the first update, 0.5 at the ninth, and `decay` in the end.
        decay = min(self.decay, self.num_updates / (self.num_updates + 9))
        averages, live = (list(map(shard_of, each.values())) for each in (self.weights, self._live))
        torch._foreach_lerp_(averages, live, 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within it the model runs on the averaged weights."""
        self._exchange()
        try:
            yield
        finally:
            reshard(self._model)
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        # Values change places. The parameters stay what the optimizer and FSDP2 hold on to.
        for name, parameter in self._live.items():
            live = parameter.detach().clone()
            parameter.copy_(self.weights[name])
            self.weights[name].copy_(live)


class FreeAverage:
    """The average that a schedule-free optimizer makes of its steps, with what `EMA` offers.

    It steps in z, takes gradients at y = (1 − β) z + β x, which are the model's weights, and x is the average that one
    samples with. It keeps z; x follows from both. With β = 0.9, y = 1.9 and z = 1 there is x = 2.

    Source: Defazio et al., The Road Less Scheduled (arXiv:2405.15682).
    """

    # The optimizer counts the steps of this average itself.
    num_updates = 0

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self._model, self._optimizer = model, optimizer
        self._live = {
            name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
        }

    @property
    def weights(self) -> dict[str, Tensor]:
        """x, made anew."""
        beta = self._optimizer.param_groups[0]["betas"][0]
        weights = {}
        for name, parameter in self._live.items():
            y = parameter.detach()
            z = self._optimizer.state.get(parameter, {}).get("z", y)
            # y = (1 − β) z + β x, solved for x.
            weights[name] = torch.lerp(y, z, 1 - 1 / beta)
        return weights

    def update(self) -> None:
        """Nothing: the optimizer's step has done it."""

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within it the model runs on x."""
        live = {name: parameter.detach().clone() for name, parameter in self._live.items()}
        self._fill(self.weights)
        try:
            yield
        finally:
            reshard(self._model)
            self._fill(live)

    @torch.no_grad()
    def _fill(self, weights: dict[str, Tensor]) -> None:
        for name, parameter in self._live.items():
            parameter.copy_(weights[name])


# What schedule-free AdamW and Prodigy keep of all parameters together. Both count their steps.
_FREE_NUMBERS, _PRODIGY_NUMBERS = ("k", "weight_sum", "lr_max"), ("k", "d", "d_numerator")
_NUMBERS = dict.fromkeys(_FREE_NUMBERS + _PRODIGY_NUMBERS)


def numbers_of(optimizer: torch.optim.Optimizer) -> list[dict[str, float]]:
    """What the optimizer keeps beside tensors, for each group of parameters."""
    return [{name: group[name] for name in _NUMBERS if name in group} for group in optimizer.param_groups]


def set_numbers(optimizer: torch.optim.Optimizer, numbers: Sequence[Mapping[str, float]]) -> None:
    """Gives the optimizer what `numbers_of` gave of another.

    Raises:
        ValueError: it is of another kind.
    """
    if len(numbers) != len(optimizer.param_groups):
        raise ValueError(
            f"the saved state has {len(numbers)} groups of parameters, and this optimizer has "
            f"{len(optimizer.param_groups)}; resume with the options of optim that it was saved with"
        )
    for group, own, saved in zip(optimizer.param_groups, numbers_of(optimizer), numbers, strict=True):
        if own.keys() != saved.keys():
            raise ValueError(
                f"the saved state was trained with {_kind_of(saved)}, and this run has {_kind_of(own)}, whose "
                "optimizer keeps other values; resume with the options of optim that it had, or begin a new run with "
                "--model.path set to its transformer"
            )
        group.update(saved)


def _kind_of(numbers: Mapping[str, float]) -> str:
    """What of `OptimConfig` makes an optimizer keep these."""
    if "d" in numbers:
        return 'optim.algorithm="prodigy"'
    return 'optim.schedule="free"' if numbers else "AdamW and a schedule"


def check_schedule_free(config: OptimConfig) -> None:
    """Checks that schedulefree is there, if the configuration needs it.

    Communication: an object all-gather, where it does.

    Raises:
        ValueError: on all ranks, where it is not installed on one of their machines.
    """
    if config.schedule == "free" and not all(
        gather_objects(importlib.util.find_spec("schedulefree") is not None)
    ):
        raise ValueError(
            'optim.schedule="free" needs schedulefree (pip install "opensora-accel[schedulefree]"); install it, or '
            "choose cosine or constant"
        )
