"""AdamW whose moments take 8 or 4 bits an element, by torchao.

Moments are kept in blocks of 256 elements (128 with 4 bits): an fp32 scale for each block, and a code for each element.
A step makes a block's values, takes the gradient in, and quantizes them again:

    moments    bytes for a parameter, both moments    of 14 billion parameters
    fp32       8                                      112 GB
    8bit, fp8  2 · (1 + 4/256) = 2.03                 28.4 GB
    4bit       2 · (1/2 + 4/128) = 1.06               14.9 GB

Blocks run through what a rank holds of a parameter. A part of fewer than 4,096 elements, or one that whole blocks do
not fill, keeps fp32 moments; that is torchao's rule.

Saved values. A saved state holds moments in fp32, so that it loads under any Plan and into any form. Quantized again
they must give the same codes and scales, or a run that goes on would not be the run that went on. A scale is the
largest |value| of its block. The signed codes of torchao hold +1 and no −1: where that value is −3, it becomes −2.98
with 8 bits and −2.66 with 4, and the next scale would be that. So in a block with the lowest code and
without the highest, one value is saved as minus the scale, which the largest value was. It gets the lowest code again.
All codes are further apart than rounding reaches. fp8 holds −448 and +448, and a scale s that is a/448 rounded comes
back from 448·s rounded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from opensora_accel.communications import gather_objects
from opensora_accel.training import OptimConfig, in_one_line

_CLASSES = {"8bit": "AdamW8bit", "4bit": "AdamW4bit", "fp8": "AdamWFp8"}
# The fewest elements that torchao quantizes.
_FEWEST = 4096


def low_bit_adamw(groups: Any, config: OptimConfig) -> torch.optim.Optimizer:
    """torchao's AdamW for `config.state`, over parameters that are whole or sharded by FSDP2."""
    import torchao.optim

    cls: Any = getattr(torchao.optim, _CLASSES[config.state])

    class AdamW(cls):
        def step(self, closure: Any = None) -> Any:
            # torchao compiles a kernel for each shape. On a CPU that takes longer than it saves.
            on_host = not self.param_groups[0]["params"][0].is_cuda
            with torch.compiler.set_stance("force_eager" if on_host else "default"):
                return super().step(closure)

    optimizer: torch.optim.Optimizer = AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
    return optimizer


def check_low_bit(config: OptimConfig, device: torch.device) -> None:
    """Takes one step with a small parameter: what does not work here is said before the run starts.

    Communication: an object all-gather.

    Raises:
        ValueError: on all ranks, where torchao is missing on one of them, or cannot do this step on its device.
    """
    problem = None
    try:
        # A smaller one would keep fp32 moments, and the step would show nothing.
        parameter = nn.Parameter(torch.ones(_FEWEST, device=device))
        parameter.grad = torch.ones_like(parameter)
        low_bit_adamw([parameter], config).step()
    except ImportError as error:
        problem = f"needs torchao ({error}); pip install 'opensora-accel[lowbit]'"
    except Exception as error:  # noqa: BLE001 — of torchao, of the compiler, or of the driver
        others = " or ".join(f"--optim.state {form}" for form in ("fp32", *_CLASSES) if form != config.state)
        problem = f"does not work on this device, {device} ({in_one_line(error)}); set {others}"
    problems = [each for each in gather_objects(problem) if each is not None]
    if problems:
        raise ValueError(f"optim.state={config.state!r} {problems[0]}")


@torch.no_grad()
def saved_values(moment: Tensor) -> Tensor:
    """What this rank holds of a quantized moment in fp32, as it is saved."""
    local: Any = moment.to_local() if isinstance(moment, DTensor) else moment.detach()
    values: Tensor = local.dequantize()
    if getattr(local, "signed", False):
        blocks, scale = values.view(-1, local.block_size), local.scale
        # The smallest value of each block and one place that has it, both [number of blocks].
        lowest, at = blocks.min(1)
        # The block has the lowest code and no value of the highest: then the scale was the size of a negative value.
        was_negative = (lowest == local.qmap[0] * scale) & (blocks.amax(1) < scale)
        blocks.scatter_(1, at.unsqueeze(1), torch.where(was_negative, -scale, lowest).unsqueeze(1))
    return values
