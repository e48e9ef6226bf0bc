"""LoRA: small matrices beside some layers are trained, and the model itself stays as it is.

A layer W [out, in] computes W·x + alpha/rank · B·(A·x). A [rank, in] is drawn and B [out, rank] zero at first, so that
training starts at the model itself. The trained matrices alone have gradients, moments and averages, and are all that
a saved state holds: the model comes from `model.path`, or from the seed, again.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from opensora_accel.deferred import resume_recording
from opensora_accel.training.config import LoraConfig
from opensora_accel.training.pretrained import in_one_line


def add_adapters(model: Any, config: LoraConfig) -> None:
    """Freezes a model of diffusers that waits for its values, and puts adapters on `config.targets`.

    Raises:
        ValueError: PEFT is missing, or the model has no such layers.
    """
    model.requires_grad_(False)
    try:
        import peft

        alpha = config.alpha or config.rank
        settings = peft.LoraConfig(r=config.rank, lora_alpha=alpha, target_modules=list(config.targets))  # type: ignore[arg-type]
        with resume_recording(model):
            model.add_adapter(settings)
    except ImportError as error:
        raise ValueError(f"lora.rank needs peft ({error}); pip install 'opensora-accel[train]'") from error
    except ValueError as error:
        kinds = sorted(
            {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, nn.Linear)}
        )
        raise ValueError(
            f"lora.targets {list(config.targets)} do not fit ({in_one_line(error)}); the model's linear layers end in "
            f"{', '.join(kinds)}"
        ) from error


def saved_weights(model: nn.Module) -> dict[str, Tensor]:
    """What a saved state holds of the model, by name: its adapters alone where it has some."""
    state = dict(model.state_dict())
    if not getattr(model, "peft_config", None):
        return state
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name: tensor for name, tensor in state.items() if name in trained}
