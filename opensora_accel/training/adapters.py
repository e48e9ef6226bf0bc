"""LoRA: small matrices beside some layers are trained, and the model itself stays as it is.

A layer W [out, in] computes W·x + alpha/rank · B·(A·x). A [rank, in] is drawn and B [out, rank] zero at first, so that
training starts at the model itself. The trained matrices alone have gradients, moments and averages, and are all that
a saved state holds: the model comes from `model.path`, or from the seed, again.

An adapter may go on from a file (`lora.path`). Its tensors are small, and every rank reads them whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from opensora_accel.deferred import resume_recording
from opensora_accel.documents import read_text
from opensora_accel.training.pretrained import in_one_line
from opensora_accel.training.sections import LoraConfig
from opensora_accel.weights import Stored, fill

# In a folder, as diffusers and PEFT name them.
_FILES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")
_MATRIX = re.compile(r"(?P<layer>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")


@dataclass(frozen=True)
class _Read(Stored):
    """A tensor that was read, and given other names, already."""

    tensor: Tensor

    def read(self, dtype: torch.dtype, region: tuple[slice, ...] = ()) -> Tensor:
        return self.tensor[region].to(dtype, copy=True)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter of a file: W·x + alpha/rank · B·(A·x) for each layer, by its name in the model."""

    path: Path
    rank: int
    alpha: float
    # A [rank, in] and B [out, rank] of each layer.
    matrices: dict[str, dict[str, Tensor]]

    @property
    def config(self) -> LoraConfig:
        """For the layers that it has, and no others."""
        return LoraConfig(rank=self.rank, alpha=self.alpha, targets=tuple(sorted(self.matrices)))

    @property
    def config_by_ends(self) -> LoraConfig:
        """The same for a model of fewer blocks: layers by what follows the number of their block."""
        ends = {re.sub(r"^.*?\.\d+\.", "", layer) for layer in self.matrices}
        return LoraConfig(rank=self.rank, alpha=self.alpha, targets=tuple(sorted(ends)))

    def fill(self, model: nn.Module) -> None:
        """Gives its values to the adapters of a model, at once or when they are made.

        Raises:
            ValueError: shapes do not fit.
        """
        fill(
            model,
            {
                f"{layer}.lora_{side}.default.weight": _Read(self.path, layer, tensor)
                for layer, sides in self.matrices.items()
                for side, tensor in sides.items()
            },
        )


def read_adapter(path: str, pipeline: Any) -> SavedAdapter:
    """The adapter of a file, or of a folder as diffusers and PEFT write it.

    Args:
        pipeline: the class of diffusers which knows the names that others have for its family's layers.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged, or no LoRA of one rank.
    """
    file = _find_file(Path(path))
    try:
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no dict)
            metadata = dict(opened.metadata() or {})
    except SafetensorError as error:
        raise ValueError(f"lora.path {file} is no whole safetensors file ({error}); copy it again") from error
    # Of PEFT, as diffusers names them.
    tensors = {re.sub(r"^base_model\.model\.", "transformer.", name): each for name, each in tensors.items()}
    settings = _settings(file, metadata)
    if settings.get("use_dora") or any("dora_scale" in name or "magnitude" in name for name in tensors):
        raise ValueError(f"lora.path {file} is a DoRA, which this trainer has not; choose a LoRA")
    try:
        # Some pipelines know of no adapters, and of no other trainer's names (HunyuanVideo 1.5).
        if hasattr(pipeline, "lora_state_dict"):
            tensors = pipeline.lora_state_dict(tensors)
    except Exception as error:  # whatever its conversion raises for names that it does not know
        raise ValueError(
            f"lora.path {file} has names that {pipeline.__name__} does not know ({in_one_line(error)}); choose an "
            "adapter of this family"
        ) from error
    matrices, unknown = dict[str, dict[str, Tensor]](), list[str]()
    for name, tensor in tensors.items():
        found = _MATRIX.fullmatch(name.removeprefix("transformer."))
        if found is None or tensor.dim() != 2:
            unknown.append(name)
        else:
            matrices.setdefault(found["layer"], {})[found["side"]] = tensor
    halves = [layer for layer, sides in matrices.items() if len(sides) != 2]
    ranks = {sides["A"].size(0) for sides in matrices.values() if "A" in sides}
    if unknown or halves or len(ranks) != 1:
        reasons = [
            f"its {', '.join(unknown[:3])} are no matrices of a LoRA" if unknown else "",
            f"{', '.join(halves[:3])} have one matrix of two" if halves else "",
            f"it has the ranks {sorted(ranks)}" if len(ranks) != 1 else "",
        ]
        raise ValueError(
            f"lora.path {file} is no LoRA of one rank: {'; '.join(filter(None, reasons))}; choose another one"
        )
    (rank,) = ranks
    return SavedAdapter(file, rank, float(settings.get("lora_alpha") or rank), matrices)


def _find_file(path: Path) -> Path:
    if path.is_file():
        return path
    candidates = [path / name for name in _FILES if (path / name).is_file()] or sorted(
        path.glob("*.safetensors")
    )
    if len(candidates) == 1 or (candidates and candidates[0].name in _FILES):
        return candidates[0]
    there = f"it has {', '.join(each.name for each in candidates)}" if candidates else "there is none"
    raise FileNotFoundError(
        f"lora.path {path} is no file of an adapter, and no folder with one ({there}); name the file, as "
        f"{path / _FILES[0]}"
    )


def _settings(file: Path, metadata: dict[str, str]) -> dict[str, Any]:
    """What is said of an adapter beside its tensors: by diffusers within the file, by PEFT beside it."""
    beside = file.parent / "adapter_config.json"
    text = metadata.get("lora_adapter_metadata")
    if text is None and file.name == _FILES[1] and beside.is_file():
        text = read_text(beside)
    try:
        said = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"what is said of {file} is no JSON ({error}); copy the adapter again") from error
    said = said if isinstance(said, dict) else {}
    settings = {name.removeprefix("transformer."): value for name, value in said.items()}
    for name in ("rank_pattern", "alpha_pattern", "use_rslora"):
        if settings.get(name):
            raise ValueError(
                f"lora.path {file} has {name} {settings[name]}, and this trainer one rank and alpha for all layers; "
                "choose another one"
            )
    return settings


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
            if hasattr(model, "add_adapter"):
                model.add_adapter(settings)
            else:  # a class that diffusers gives no adapters
                peft.inject_adapter_in_model(settings, model)
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


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Within it the model answers as it does without its adapters: they count 0 times.

    PEFT's own switch would also take the gradients from them, which sharded parameters do not see coming back.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: list[Any] = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    scales: list[dict[str, float]] = [layer.scaling for layer in layers]
    before = [dict(each) for each in scales]
    try:
        for each in scales:
            each.update(dict.fromkeys(each, 0.0))
        yield
    finally:
        for each, values in zip(scales, before, strict=True):
            each.update(values)


def saved_weights(model: nn.Module) -> dict[str, Tensor]:
    """What a saved state holds of the model, by name: its adapters alone where it has some."""
    state = dict(model.state_dict())
    if not getattr(model, "peft_config", None):
        return state
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name: tensor for name, tensor in state.items() if name in trained}
