"""Parameters that are random, not zero, and the same in every process."""

import torch
from torch import nn


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Matrices keep the size of what passes through; norm weights are near 1; the other vectors and tables are small.

    Frozen parameters (rotary frequencies) and buffers stay, and so do parameters that wait for their values.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad or parameter.is_meta:
                continue
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            is_norm = name.endswith("norm.weight") or name.endswith("norm.scale")
            if is_norm:
                noise = 1 + 0.2 * noise
            elif parameter.dim() == 1 or name.endswith("table"):
                noise *= 0.2
            else:
                noise /= parameter[0].numel() ** 0.5
            parameter.copy_(noise)
    return model
