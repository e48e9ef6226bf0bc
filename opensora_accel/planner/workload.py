"""What is planned for: a model at its true size, its training step, and the sizes of a batch.

A workload is two functions. `model_fn()` builds the model; `prepare(model, run)` applies the
run's Plan to it, as a loop does before its first step, and returns what runs forward and backward of one microbatch.
Both are called on tensors without values. What the two do is what trains: the planner has no model of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from opensora_accel.fsdp import set_last_microbatch
from opensora_accel.observe import Run, load_file
from opensora_accel.parallel_states import init_parallel
from shardformer import parallelize
from shardformer.engine import weight_dtype

# Forward, loss and backward of one microbatch; its argument says whether it is the last one of a step.
Pass = Callable[[bool], None]


@dataclass(frozen=True)
class Workload:
    """A model, its step, and the sizes of a batch."""

    name: str
    model_fn: Callable[[], nn.Module]
    # Applies the plan of a `Run` to the model, and returns a pass of one microbatch.
    prepare: Callable[[nn.Module, Run], Pass]
    # Samples of each data rank in one pass.
    batch: int = 1
    # Passes of one optimizer step, whose gradients add up.
    accumulation: int = 1
    # Tokens of a sample, with those of its caption where both share a sequence; 0 where that is not known.
    num_tokens: int = 0
    text_tokens: int = 0
    num_heads: int = 0
    # Whether the optimizer steps all parameters in one kernel, as it does on a GPU, or one after the other.
    fused_optimizer: bool = True
    # Whose operators are traced: those of a GPU's architecture, as sm_90, or of the CPU, "cpu".
    architecture: str = "sm_90"
    # Whether a pass may be run several times. A user's step applies its plan each time, and a model is sharded once.
    is_repeatable: bool = True


def step_file(path: Path, *, batch: int = 1) -> Workload:
    """A loop of the user's own: a file that defines model_fn() and step(model, run), as `verify` takes it.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it cannot be loaded, or does not define both.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; --step names a Python file with step and model_fn")
    module = load_file(path)
    for name, signature in (("step", "step(model, run)"), ("model_fn", "model_fn()")):
        if not callable(getattr(module, name, None)):
            raise ValueError(
                f"{path} defines no {signature}; `opensora-accel verify --help` shows a step file"
            )
    return of_step(path.name, module.model_fn, module.step, batch=batch)


def of_step(
    name: str, model_fn: Callable[[], nn.Module], step: Callable[[nn.Module, Run], Any], *, batch: int = 1
) -> Workload:
    """From a step that applies the plan itself and runs forward and backward, as `verify` and `record_step` take it.

    It runs once, so what only later steps do (DDP's buckets in the order of gradients) is not in its trace.
    """
    return Workload(name, model_fn, _GivenStep(step), batch=batch, is_repeatable=False)


@dataclass(frozen=True)
class _GivenStep:
    step: Callable[[nn.Module, Run], Any]

    def __call__(self, model: nn.Module, run: Run) -> Pass:
        return lambda _is_last: self.step(model, run)


def workload_of_model(
    name: str,
    model_fn: Callable[[], nn.Module],
    inputs: Callable[[nn.Module, torch.dtype], Mapping[str, Any]],
    **sizes: Any,
) -> Workload:
    """A model that predicts a velocity from noisy latents, trained as this package's trainer does it.

    Args:
        inputs: arguments of its forward, floating-point ones in the dtype that it is given. The first one holds the
            latents, and what the model returns has their shape.
        sizes: further fields of `Workload`.
    """
    return Workload(name, model_fn, _FlowMatching(inputs), **sizes)


@dataclass(frozen=True)
class _FlowMatching:
    inputs: Callable[[nn.Module, torch.dtype], Mapping[str, Any]]

    def __call__(self, model: nn.Module, run: Run) -> Pass:
        init_parallel(run.plan, "cpu")
        model, forward = parallelize(model, run.plan, torch.device("cpu"))
        given = dict(self.inputs(model, weight_dtype(run.plan)))
        name, clean = next(iter(given.items()))
        noise = torch.randn_like(clean)

        def one_pass(is_last: bool) -> None:
            set_last_microbatch(model, is_last)
            is_ddp = isinstance(forward, DistributedDataParallel)
            with nullcontext() if is_last or not is_ddp else cast(Any, forward).no_sync():
                # As `training.flow.flow_loss` has it.
                output = forward(**given | {name: 0.5 * clean + 0.5 * noise})
                error = (output[0] if isinstance(output, tuple) else output) - (noise - clean)
                loss = (error.float() if error.dtype != torch.float64 else error).square().mean()
                del output, error
                loss.backward()

        return one_pass
