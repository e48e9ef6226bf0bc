"""Adapters: small matrices beside some layers are trained, and the model itself stays as it is.

A layer W [out, in] computes, with s = alpha/rank,

    LoRA    W·x + s·B·(A·x)                A [rank, in], B [out, rank]
    DoRA    (W + s·B·A)·x, each row made as long as m says; at first as long as W's. m [out]
    LoKr    W·x + s·(w1 ⊗ w2)·x            of 12 by 8: w1 [3, 2] and w2 [4, 4], itself a product where rank is below 2

One of two matrices is drawn and the other zero at first, so that training starts at the model itself. What is trained
alone has gradients, moments and averages, and is all that a saved state holds: the model comes from `model.path`, or
from the seed, again.

An adapter may go on from a file (`lora.path`). Its tensors are small, and every rank reads them whole.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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
_PART = re.compile(
    r"(?P<layer>.+)\.(?P<part>lora_[AB]|lora_magnitude_vector|lokr_w[12](_[ab])?)(\.default)?(\.weight)?"
)
_NAMES = {"lora": "LoRA", "dora": "DoRA", "lokr": "LoKr"}
_LORA = frozenset({"lora_A", "lora_B"})
# The parts that a layer has of an adapter of each kind.
_PARTS = {
    "lora": (_LORA,),
    "dora": (_LORA | {"lora_magnitude_vector"},),
    # The second matrix is a product, where its rank is low against its size.
    "lokr": (frozenset({"lokr_w1", "lokr_w2"}), frozenset({"lokr_w1", "lokr_w2_a", "lokr_w2_b"})),
}


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
    """An adapter of a file, by the names that its layers have in the model."""

    path: Path
    # For the layers that it has, and no others.
    config: LoraConfig
    # Of each layer, as PEFT calls them: "lora_A" [rank, in], "lora_B" [out, rank], …
    parts: dict[str, dict[str, Tensor]]

    @property
    def config_by_ends(self) -> LoraConfig:
        """The same for a model of fewer blocks: layers by what follows the number of their block."""
        ends = {re.sub(r"^.*?\.\d+\.", "", layer) for layer in self.parts}
        return dataclasses.replace(self.config, targets=tuple(sorted(ends)))

    @property
    def stored(self) -> dict[str, Stored]:
        """Its tensors, by the names that they have in the model."""
        return {
            # Matrices of a LoRA are layers of their own.
            f"{layer}.{part}.default{'.weight' if part.startswith('lora') else ''}": _Read(
                self.path, layer, tensor
            )
            for layer, parts in self.parts.items()
            for part, tensor in parts.items()
        }

    def fill(self, model: nn.Module) -> None:
        """Gives its values to the adapters of a model, at once or when they are made.

        Raises:
            ValueError: shapes do not fit.
        """
        fill(model, self.stored)


def read_adapter(path: str, pipeline: Any) -> SavedAdapter:
    """The adapter of a file, or of a folder as diffusers and PEFT write it.

    Args:
        pipeline: the class of diffusers which knows the names that others have for its family's layers.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged, or no adapter of one kind and rank.
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
    if any("dora_scale" in name for name in tensors):
        raise ValueError(
            f"lora.path {file} has lengths of rows as other trainers write them (dora_scale); choose a DoRA of PEFT or "
            "diffusers, whose lora_magnitude_vector they are"
        )
    is_lokr = any(".lokr_" in name for name in tensors)
    try:
        # Some pipelines know of no adapters, and of no other trainer's names (HunyuanVideo 1.5); and most of no LoKr.
        if hasattr(pipeline, "lora_state_dict") and not is_lokr:
            tensors = pipeline.lora_state_dict(tensors)
    except Exception as error:  # whatever its conversion raises for names that it does not know
        raise ValueError(
            f"lora.path {file} has names that {pipeline.__name__} does not know ({in_one_line(error)}); choose an "
            "adapter of this family"
        ) from error
    parts, unknown = dict[str, dict[str, Tensor]](), list[str]()
    for name, tensor in tensors.items():
        found = _PART.fullmatch(name.removeprefix("transformer."))
        if found is None or tensor.dim() != (1 if found["part"] == "lora_magnitude_vector" else 2):
            unknown.append(name)
        else:
            parts.setdefault(found["layer"], {})[found["part"]] = tensor
    return SavedAdapter(file, _config_of(file, parts, unknown, settings), parts)


def _config_of(
    file: Path, parts: dict[str, dict[str, Tensor]], unknown: list[str], settings: dict[str, Any]
) -> LoraConfig:
    """What makes the layers of an adapter of these parts.

    Args:
        unknown: names in the file that are no part.
        settings: what is said beside the tensors.

    Raises:
        ValueError: it is no whole adapter of one kind and rank.
    """
    has = {part for of_layer in parts.values() for part in of_layer}
    kind: Literal["lora", "dora", "lokr"] = "lora"
    if settings.get("use_dora") or "lora_magnitude_vector" in has:
        kind = "dora"
    elif any(part.startswith("lokr") for part in has):
        kind = "lokr"
    # Of a LoKr shapes do not say them all.
    said: dict[str, Any] = {}
    if kind == "lokr":
        said = {name: settings.get(name) for name in ("r", "decompose_factor")}
    is_said = all(isinstance(value, int) for value in said.values())
    alpha = settings.get("alpha" if said else "lora_alpha")
    partly = [layer for layer, of_layer in parts.items() if of_layer.keys() not in _PARTS[kind]]
    ranks = {of_layer["lora_A"].size(0) for of_layer in parts.values() if "lora_A" in of_layer}
    reasons = [
        f"its {', '.join(unknown[:3])} are none of its matrices" if unknown else "",
        f"{', '.join(partly[:3])} have not all of their matrices" if partly else "",
        f"it has the ranks {sorted(ranks)}" if len(ranks) > 1 else "",
        "" if is_said else "its rank and factor are not said beside it",
        "" if isinstance(alpha, (int, float)) or alpha is None else f"its alpha is said to be {alpha!r}",
        "" if parts else "it has none",
    ]
    if any(reasons):
        raise ValueError(
            f"lora.path {file} is no {_NAMES[kind]} of one rank: {'; '.join(filter(None, reasons))}; choose another one"
        )
    rank: int = said["r"] if said else ranks.pop()
    return LoraConfig(
        kind=kind,
        rank=rank,
        alpha=float(alpha or rank),
        factor=max(0, said["decompose_factor"]) if said else 0,
        targets=tuple(sorted(parts)),
    )


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
    for name in ("rank_pattern", "alpha_pattern", "use_rslora", "decompose_both"):
        if settings.get(name):
            raise ValueError(
                f"lora.path {file} has {name} {settings[name]}, and this trainer one rank, alpha and form for all "
                "layers; choose another one"
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
        from peft.tuners.lokr import LoKrLayer

        settings = _peft_config(config)
        with resume_recording(model):
            if hasattr(model, "add_adapter"):
                model.add_adapter(settings)
            else:  # a class that diffusers gives no adapters
                peft.inject_adapter_in_model(settings, model)
        for layer in model.modules():
            if isinstance(layer, LoKrLayer):
                layer.__class__ = _never_left_out(type(layer))
                layer.eval()
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


@functools.cache
def _never_left_out(cls: Any) -> Any:
    """The class of a LoKr's layer, whose forward makes no difference between training and not.

    PEFT's draws in each forward of training whether the layer is left out, though none ever is; and a pass on tensors
    without values, as plans are made of, cannot read what was drawn.
    """

    def train(self: nn.Module, mode: bool = True) -> Any:
        return cls.train(self, False)

    return type(cls.__name__, (cls,), {"train": train})


def _peft_config(config: LoraConfig) -> Any:
    import peft

    alpha: Any = config.alpha or config.rank
    shared: Any = {"r": config.rank, "target_modules": list(config.targets)}
    if config.kind == "lokr":
        return peft.LoKrConfig(**shared, alpha=alpha, decompose_factor=config.factor or -1)
    return peft.LoraConfig(**shared, lora_alpha=alpha, use_dora=config.kind == "dora")


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Within it the model answers as it does without its adapters: they count 0 times.

    PEFT's own switch would also take the gradients from them, which sharded parameters do not see coming back.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: list[Any] = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    # What a DoRA makes of rows is a variant of PEFT's, without which its layers are those of a LoRA.
    changed: list[dict[str, Any]] = [layer.scaling for layer in layers]
    variants = [layer.lora_variant for layer in layers if hasattr(layer, "lora_variant")]
    before = [dict(each) for each in (*changed, *variants)]
    try:
        for each in changed:
            each.update(dict.fromkeys(each, 0.0))
        for each in variants:
            each.clear()
        yield
    finally:
        for each, values in zip((*changed, *variants), before, strict=True):
            each.update(values)


def saved_weights(model: nn.Module) -> dict[str, Tensor]:
    """What a saved state holds of the model, by name: its adapters alone where it has some."""
    state = dict(model.state_dict())
    if not getattr(model, "peft_config", None):
        return state
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name: tensor for name, tensor in state.items() if name in trained}
