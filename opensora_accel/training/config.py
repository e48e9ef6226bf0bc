"""The configuration of one training run: frozen dataclasses, read from TOML or JSON, never executed."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tomllib
import tyro

from opensora_accel.plan import Plan
from opensora_accel.training.index import DataConfig

JsonTable = Annotated[dict[str, Any], tyro.conf.arg(constructor=json.loads, metavar="JSON")]


def _at_least(name: str, value: float, bound: float) -> None:
    if value < bound:
        raise ValueError(f"{name} must be at least {bound:g}; got {value:g}")


def _at_most(name: str, value: float, bound: float) -> None:
    if value > bound:
        raise ValueError(f"{name} must be at most {bound:,}; got {value:,}")


def _check_finite(name: str, value: Any) -> None:
    """Of every option, lists and the table of the model too: NaN passes each comparison that refuses numbers."""
    if isinstance(value, (list, tuple)):
        for item in value:
            _check_finite(name, item)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number; got {value}")


@dataclass(frozen=True)
class ModelConfig:
    """The transformer that is trained."""

    class_name: str = "WanTransformer3DModel"
    """Class of diffusers that is built from `config`; with `path`, the folder names it."""
    config: JsonTable = field(default_factory=dict)
    """Arguments of that class, as JSON (a table in the file). Channels and text width follow from the codec."""
    path: str = ""
    """Local folder of a model saved by diffusers, to go on from its weights."""

    def __post_init__(self) -> None:
        if self.path and self.config:
            raise ValueError(
                "model.path brings its own config; leave model.config out, or leave model.path out"
            )


@dataclass(frozen=True)
class CodecConfig:
    """Pixels to latents: space-to-depth, or a video VAE."""

    patch: int = 4
    """Side of the pixel square that becomes one latent position, without a VAE."""
    path: str = ""
    """Local folder of a diffusers video VAE (AutoencoderKLWan, …)."""

    def __post_init__(self) -> None:
        _at_least("codec.patch", self.patch, 1)
        if self.path and self.patch != 4:
            raise ValueError("codec.patch is for a run without a VAE; leave it out, or leave codec.path out")


@dataclass(frozen=True)
class TextConfig:
    """Captions to embeddings: a small T5 with a tokenizer trained on the captions, or a real one."""

    path: str = ""
    """Local folder with a tokenizer and a T5 or UMT5 encoder."""
    length: int = 16
    """Tokens per caption; longer ones are cut, shorter ones padded."""
    width: int = 64
    """Embedding width of the small encoder."""

    def __post_init__(self) -> None:
        _at_least("text.length", self.length, 1)
        _at_most("text.length", self.length, 4096)
        _at_least("text.width", self.width, 8)
        _at_most("text.width", self.width, 8192)
        if self.path and self.width != 64:
            raise ValueError("text.width is for the small encoder; leave it out, or leave text.path out")


@dataclass(frozen=True)
class FlowConfig:
    """Flow matching: which times are trained, and how a clip is sampled."""

    shift: float | Literal["auto"] = "auto"
    """Time shift towards noise; auto grows with resolution and length."""
    time_distribution: Literal["logit-normal", "uniform"] = "logit-normal"
    """Distribution of times before the shift."""
    caption_drop: float = 0.1
    """Share of samples trained without caption, for guidance."""
    sample_steps: int = 30
    """Euler steps of a sampled clip."""
    guidance: float = 1.0
    """Classifier-free guidance of sampled clips; 1 is none."""

    def __post_init__(self) -> None:
        if self.shift != "auto" and self.shift <= 0:
            raise ValueError(f"flow.shift must be above 0, or auto; got {self.shift}")
        if not 0 <= self.caption_drop < 1:
            raise ValueError(f"flow.caption_drop is a share from 0 to below 1; got {self.caption_drop}")
        _at_least("flow.sample_steps", self.sample_steps, 1)
        _at_most("flow.sample_steps", self.sample_steps, 10_000)


@dataclass(frozen=True)
class OptimConfig:
    """AdamW, its schedule and what surrounds it."""

    lr: float = 1e-3
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Adam's decay rates."""
    eps: float = 1e-8
    """Adam's epsilon."""
    weight_decay: float = 0.01
    """On matrices only, not on biases and norms."""
    schedule: Literal["constant", "cosine"] = "cosine"
    """After the warm-up: constant, or cosine down to a tenth of a percent at the last step."""
    warmup_steps: int = 50
    """Steps of linear warm-up."""
    clip_norm: float = 1.0
    """Gradients are scaled down to this norm over all parameters; 0 does not clip."""
    accumulation: int = 1
    """Global batches per optimizer step."""
    ema_decay: float = 0.999
    """Decay of the averaged weights that sampling uses; 0 keeps none."""

    def __post_init__(self) -> None:
        _at_least("optim.lr", self.lr, 0)
        _at_least("optim.warmup_steps", self.warmup_steps, 0)
        _at_least("optim.weight_decay", self.weight_decay, 0)
        _at_least("optim.clip_norm", self.clip_norm, 0)
        _at_least("optim.accumulation", self.accumulation, 1)
        _at_most("optim.accumulation", self.accumulation, 100_000)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optim.betas must be from 0 to below 1; got {list(self.betas)}")
        if self.eps <= 0:
            raise ValueError(f"optim.eps must be above 0; got {self.eps:g}")
        if not 0 <= self.ema_decay < 1:
            raise ValueError(f"optim.ema_decay must be from 0 to below 1; got {self.ema_decay}")


@dataclass(frozen=True)
class TrainConfig:
    """One training run. Every option may stand in the file, or on the command line after it."""

    output: str = "runs/default"
    """Folder for checkpoints, metrics, samples. An earlier run in it is moved into earlier_N, not overwritten."""
    steps: int = 1000
    """Optimizer steps."""
    seed: int = 0
    """Of weights, data order, noise, times and dropped captions."""
    log_every: int = 10
    """Steps between printed lines, where there is no terminal for a progress bar."""
    save_every: int = 500
    """Steps between checkpoints; there is always one at the end."""
    keep_checkpoints: int = 2
    """How many checkpoints stay; older ones are removed once a newer one is whole."""
    num_samples: int = 2
    """Clips sampled at the end, from the captions of the first videos."""
    memory_target_gib: float = 0.0
    """Device memory that plan.offload="auto" may fill; 0 takes 90 % of the device's."""
    timeout_s: float = 0.0
    """Seconds that ranks wait for each other before those that did not come are named; 0 takes
    OPENSORA_ACCEL_TIMEOUT, or torch's own (30 minutes on CPUs, 10 on GPUs)."""
    resume: str = ""
    """Checkpoint folder to go on from; newest (`--resume` alone): the output's newest; auto: that, or a start."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    codec: CodecConfig = field(default_factory=CodecConfig)
    text: TextConfig = field(default_factory=TextConfig)
    flow: FlowConfig = field(default_factory=FlowConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    plan: Plan = field(default_factory=Plan)

    def __post_init__(self) -> None:
        for name, value in _flat(to_dict(self)).items():
            _check_finite(name, value)
        if not self.output:
            raise ValueError("output must name a folder; got an empty text")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be from 0 to below 2**63; got {self.seed}")
        _at_least("steps", self.steps, 1)
        _at_least("log_every", self.log_every, 1)
        _at_least("save_every", self.save_every, 1)
        _at_least("keep_checkpoints", self.keep_checkpoints, 1)
        _at_least("num_samples", self.num_samples, 0)
        _at_least("memory_target_gib", self.memory_target_gib, 0)
        _at_least("timeout_s", self.timeout_s, 0)
        if self.memory_target_gib and self.plan.offload != "auto":
            raise ValueError(
                f'memory_target_gib={self.memory_target_gib:g} is what plan.offload="auto" aims at, but plan.offload '
                f"is {self.plan.offload}; set it to auto, or leave memory_target_gib out"
            )


def load_config(path: str | Path) -> TrainConfig:
    """The run described by a TOML or JSON file; options that it does not name keep their defaults.

    Raises:
        FileNotFoundError: with the config files that lie beside it.
        ValueError: not TOML or JSON, an unknown option (with the nearest valid one), or a value of a wrong type.
    """
    path = Path(path)
    if not path.is_file():
        nearby = sorted(p.name for p in path.parent.glob("*.[tj][os][mo][ln]"))
        there = f"; {path.parent}/ has {', '.join(nearby)}" if nearby else ""
        raise FileNotFoundError(f"there is no config file {path}{there}")
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as {path.suffix.lstrip('.') or 'TOML'}: {error}") from error
    return config_from_dict(values, str(path))


def config_from_dict(values: Mapping[str, Any], source: str) -> TrainConfig:
    """The run with these (nested) values; `source` is named in errors."""
    return _build(TrainConfig, values, source, "")


def _build(cls: Any, values: Any, source: str, prefix: str) -> Any:
    if not isinstance(values, Mapping):
        raise ValueError(
            f"{source}: {prefix.rstrip('.') or 'the file'} must be a table of options; got {values!r}"
        )
    hints = get_type_hints(cls)
    for key in values:
        if key not in hints:
            raise ValueError(_unknown_option(key, list(hints), source, prefix))
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        if dataclasses.is_dataclass(hints[key]):
            arguments[key] = _build(hints[key], value, source, f"{prefix}{key}.")
        else:
            arguments[key] = check_type(hints[key], value, f"{source}: {prefix}{key}")
    try:
        return cls(**arguments)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def _unknown_option(key: str, known: Sequence[str], source: str, prefix: str) -> str:
    everywhere = {**{name: f"{prefix}{name}" for name in known}, **_all_options()}
    nearest = difflib.get_close_matches(key, everywhere, n=1, cutoff=0.5)
    hint = f"did you mean {everywhere[nearest[0]]!r}? " if nearest else ""
    return f"{source}: there is no option {prefix + key!r}; {hint}The options here are {', '.join(known)}"


def _all_options(cls: Any = TrainConfig, prefix: str = "") -> dict[str, str]:
    """Every option's last name and its full one: a key in the wrong table is found in the right one."""
    found: dict[str, str] = {}
    for name, hint in get_type_hints(cls).items():
        found.setdefault(name, prefix + name)
        if dataclasses.is_dataclass(hint):
            for inner, full in _all_options(hint, f"{prefix}{name}.").items():
                found.setdefault(inner, full)
    return found


def check_type(hint: Any, value: Any, where: str) -> Any:
    """The value as its field's type: whole numbers serve as fractions, lists as tuples; nothing else is bent."""
    origin, choices = get_origin(hint), get_args(hint)
    if origin is Literal:
        if value in choices:
            return value
    elif origin is tuple and isinstance(value, (list, tuple)):
        if len(choices) == 1 or choices[1] is Ellipsis:  # of any length; diffusers writes both
            return tuple(check_type(choices[0], item, where) for item in value)
        if len(value) == len(choices):
            return tuple(check_type(inner, item, where) for inner, item in zip(choices, value, strict=True))
    elif origin is dict and isinstance(value, Mapping):
        return dict(value)
    elif origin in (Union, UnionType):
        for choice in choices:
            try:
                return check_type(choice, value, where)
            except ValueError:
                continue
    elif hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    elif isinstance(hint, type) and type(value) is hint:
        return value
    raise ValueError(f"{where} must be {_describe(hint)}; got {value!r}")


def _describe(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    if hint in names:
        return names[hint]
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if get_origin(hint) is tuple:
        fixed = Ellipsis not in get_args(hint) and len(get_args(hint)) > 1
        return f"a list of {len(get_args(hint))} numbers" if fixed else "a list of numbers"
    if get_origin(hint) is dict:
        return "a table"
    if hint is type(None):
        return "left out"
    return " or ".join(_describe(choice) for choice in get_args(hint))


def to_dict(config: TrainConfig) -> dict[str, Any]:
    return dataclasses.asdict(config)


def differences(before: TrainConfig, after: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Options by full name that differ, with both values."""
    old, new = _flat(to_dict(before)), _flat(to_dict(after))
    return {name: (old.get(name), new.get(name)) for name in {**old, **new} if old.get(name) != new.get(name)}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found.update(_flat(value, f"{prefix}{key}."))
        else:
            found[prefix + key] = list(value) if isinstance(value, tuple) else value
    return found
