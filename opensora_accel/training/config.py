"""The configuration of one training run: frozen dataclasses, read from TOML or JSON, never executed.

A bound of an option is part of its type, and pydantic checks it wherever a config is made: in Python code, and by
`config_from_dict` from a file, a saved state or the command line. Rules between several options stand in
`__post_init__`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import types
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform, get_args, get_origin, get_type_hints

import tomllib
import tyro
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from opensora_accel.plan import Plan
from opensora_accel.training.buckets import Bucket, parse_buckets

JsonTable = Annotated[dict[str, Any], tyro.conf.arg(constructor=json.loads, metavar="JSON")]
NotNegative = Annotated[float, Field(ge=0)]
AboveZero = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1)]
CountOrNone = Annotated[int, Field(ge=0)]
_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
Class = TypeVar("Class", bound=type)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def options(cls: Class) -> Class:
    """Makes a frozen dataclass whose fields pydantic checks when it is made; an error is one line of ours."""
    checked = dataclass(frozen=True, config=_STRICT)(cls)
    make = checked.__init__

    def make_or_explain(self: Any, *args: Any, **values: Any) -> None:
        try:
            make(self, *args, **values)
        except ValidationError as error:
            raise ValueError(_in_one_line(error, cls)) from error

    setattr(checked, "__init__", make_or_explain)  # noqa: B010 — mypy refuses the assignment
    return checked  # type: ignore[return-value]


@options
class DataConfig:
    """Which clips are trained on, and how they are cut."""

    folder: str = ""
    """Folder with the videos and a metadata.jsonl that names a file and its caption on each line."""
    num_frames: Count = 9
    """Frames per clip."""
    frame_stride: Count = 1
    """Take every n-th frame; 2 halves the frame rate and doubles the time that a clip covers."""
    height: Count = 48
    """Height of a clip in pixels; videos are scaled to cover height x width and cropped at the centre."""
    width: Count = 80
    """Width of a clip in pixels."""
    buckets: tuple[str, ...] = ()
    """Clips of several sizes instead, each FRAMESxHEIGHTxWIDTH, as 33x480x832; 1 frame is for images."""
    batch_size: Count = 4
    """Clips per step over all data-parallel ranks together; with buckets, of the one with the largest clips."""
    num_workers: Annotated[int, Field(ge=0, le=256)] = 0
    """Decoding processes per rank; 0 decodes in the training process."""

    def __post_init__(self) -> None:
        parse_buckets(self.buckets)
        for name, default in (("num_frames", 9), ("height", 48), ("width", 80)):
            if self.buckets and getattr(self, name) != default:
                raise ValueError(
                    f"data.buckets say how large clips are; leave data.{name} out, or leave data.buckets out"
                )

    @property
    def sizes(self) -> tuple[Bucket, ...]:
        """The sizes of clips; one, where there are no buckets."""
        return parse_buckets(self.buckets) or (
            Bucket(self.num_frames, self.height, self.width, self.batch_size),
        )


@options
class ModelConfig:
    """The transformer that is trained."""

    class_name: str = "WanTransformer3DModel"
    """Class of diffusers that is built from `config`; with `path`, the folder names it."""
    config: JsonTable = field(default_factory=dict)
    """Arguments of that class, as JSON (a table in the file). Channels and text width follow from the codec."""
    path: str = ""
    """Local folder of a model saved by diffusers, to go on from its weights."""

    def __post_init__(self) -> None:
        for name, value in self.config.items():
            # NaN passes each comparison that would refuse a number later.
            items = value if isinstance(value, (list, tuple)) else [value]
            for item in items:
                if isinstance(item, float) and not math.isfinite(item):
                    raise ValueError(f"model.config.{name} must be a finite number; got {item}")
        if self.path and self.config:
            raise ValueError(
                "model.path brings its own config; leave model.config out, or leave model.path out"
            )


@options
class CodecConfig:
    """Pixels to latents: space-to-depth, or a video VAE."""

    patch: Count = 4
    """Side of the pixel square that becomes one latent position, without a VAE."""
    path: str = ""
    """Local folder of a diffusers video VAE (AutoencoderKLWan, …)."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """What the VAE is loaded and computed in."""
    cache: bool = False
    """Encode each clip once, keep its latents in host memory, and release the VAE when all of the run are there."""

    def __post_init__(self) -> None:
        if not self.path and self.dtype != "bf16":
            raise ValueError("codec.dtype is for a VAE from codec.path; leave it out, or set codec.path")
        if not self.path and self.cache:
            raise ValueError("codec.cache is for a VAE from codec.path; leave it out, or set codec.path")
        if self.path and self.patch != 4:
            raise ValueError("codec.patch is for a run without a VAE; leave it out, or leave codec.path out")


@options
class TextConfig:
    """Captions to embeddings: a small T5 with a tokenizer trained on the captions, or a real one."""

    path: str = ""
    """Local folder with a tokenizer and a T5 or UMT5 encoder."""
    length: Annotated[int, Field(ge=1, le=4096)] = 16
    """Tokens per caption; longer ones are cut, shorter ones padded."""
    width: Annotated[int, Field(ge=8, le=8192)] = 64
    """Embedding width of the small encoder."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """What the encoder of `path` is loaded and computed in; the small one has the type of the run."""
    cache: bool = True
    """Embed all captions at the start, into a file of each machine's TMPDIR, and release the encoder."""

    def __post_init__(self) -> None:
        if not self.path and self.dtype != "bf16":
            raise ValueError("text.dtype is for an encoder from text.path; leave it out, or set text.path")
        if self.path and self.width != 64:
            raise ValueError("text.width is for the small encoder; leave it out, or leave text.path out")


@options
class LoraConfig:
    """Adapters that are trained in place of the model."""

    rank: Annotated[int, Field(ge=0, le=4096)] = 0
    """Rank of the adapters; 0 has none, and trains the model itself."""
    alpha: NotNegative = 0.0
    """Adapters count alpha / rank times; 0 takes the rank."""
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = ("to_q", "to_k", "to_v", "to_out.0")
    """Ends of the names of the layers that get one."""

    def __post_init__(self) -> None:
        if not self.rank and (self.alpha or self.targets != ("to_q", "to_k", "to_v", "to_out.0")):
            raise ValueError(
                "lora.alpha and lora.targets are for a run with lora.rank; set it, or leave them out"
            )


@options
class FlowConfig:
    """Flow matching: which times are trained, and how a clip is sampled."""

    shift: AboveZero | Literal["auto", "ltx"] = "auto"
    """Time shift towards noise; auto grows with resolution and length, as Open-Sora's, ltx as LTX-Video's."""
    time_distribution: Literal["logit-normal", "uniform"] = "logit-normal"
    """Distribution of times before the shift."""
    logit_mean: float = 0.0
    """Mean of the normal distribution under logit-normal times; above 0 there is more noise."""
    logit_std: AboveZero = 1.0
    """Its standard deviation."""
    weighting: Literal["none", "bell"] = "none"
    """What a time counts in the loss: all the same, or most in the middle and nothing at the ends; 1 in the mean."""
    caption_drop: Share = 0.1
    """Share of samples trained without caption, for guidance."""
    sample_steps: Annotated[int, Field(ge=1, le=10_000)] = 30
    """Euler steps of a sampled clip."""
    guidance: float = 1.0
    """Classifier-free guidance of sampled clips; 1 is none."""

    def __post_init__(self) -> None:
        if self.time_distribution == "uniform" and (self.logit_mean, self.logit_std) != (0, 1):
            raise ValueError(
                'flow.logit_mean and flow.logit_std are for flow.time_distribution="logit-normal"; set it, or leave '
                "them out"
            )


@options
class ConditionsConfig:
    """Frames of a clip that are given, and of which the rest is learned, each so often as its weight says."""

    t2v: NotNegative = 1.0
    """Nothing is given but the caption; alone, it trains a model that takes no frames."""
    i2v_head: NotNegative = 0.0
    """The first frame."""
    i2v_tail: NotNegative = 0.0
    """The last frame."""
    i2v_loop: NotNegative = 0.0
    """The first and the last frame."""
    v2v_head: NotNegative = 0.0
    """The first 33 frames."""
    v2v_tail: NotNegative = 0.0
    """The last 33 frames."""
    v2v_head_easy: NotNegative = 0.0
    """The first 65 frames."""
    v2v_tail_easy: NotNegative = 0.0
    """The last 65 frames."""

    def __post_init__(self) -> None:
        if not any(dataclasses.astuple(self)):
            raise ValueError("all weights of conditions are 0; set one above 0, as conditions.t2v = 1")

    @property
    def are_used(self) -> bool:
        """Whether the model takes a mask and given frames."""
        return any(weight for name, weight in dataclasses.asdict(self).items() if name != "t2v")


@options
class OptimConfig:
    """AdamW, its schedule and what surrounds it."""

    lr: NotNegative = 1e-3
    """Peak learning rate."""
    betas: tuple[Share, Share] = (0.9, 0.99)
    """Adam's decay rates."""
    eps: AboveZero = 1e-8
    """Adam's epsilon."""
    state: Literal["fp32", "8bit", "4bit", "fp8"] = "fp32"
    """How Adam's moments are kept; all but fp32 need torchao (pip install 'opensora-accel[lowbit]')."""
    weight_decay: NotNegative = 0.01
    """On matrices only, not on biases and norms."""
    schedule: Literal["constant", "cosine", "free"] = "cosine"
    """After the warm-up: constant, cosine down to a tenth of a percent at the last step, or free: AdamW that averages
    its steps in place of a schedule (pip install 'opensora-accel[schedulefree]'; ema_decay is 0 then)."""
    warmup_steps: CountOrNone = 50
    """Steps of linear warm-up."""
    clip_norm: NotNegative = 1.0
    """Gradients are scaled down to this norm over all parameters; 0 does not clip."""
    skip_factor: NotNegative = 0.0
    """Skip a step whose gradient norm is more than so many times the median of the 100 before; 0 skips none of them."""
    accumulation: Annotated[int, Field(ge=1, le=100_000)] = 1
    """Global batches per optimizer step."""
    ema_decay: Share = 0.999
    """Decay of the averaged weights that sampling uses; 0 keeps none."""

    def __post_init__(self) -> None:
        if self.schedule != "free":
            return
        if self.ema_decay:
            raise ValueError(
                'optim.schedule="free" averages weights by itself, and samples with them; set optim.ema_decay to 0'
            )
        if self.state != "fp32":
            raise ValueError(
                f'optim.schedule="free" has no moments in {self.state}; set optim.state to fp32, or choose cosine'
            )
        if not self.betas[0]:
            raise ValueError(
                'optim.schedule="free" divides by the first of optim.betas; set it above 0, as 0.9'
            )


@options
class TrainConfig:
    """One training run. Every option may stand in the file, or on the command line after it."""

    output: Annotated[str, Field(min_length=1)] = "runs/default"
    """Folder for saved states, metrics, samples. An earlier run in it is moved into earlier_N, not overwritten."""
    steps: Count = 1000
    """Optimizer steps."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    """Seed of weights, data order, noise, times and dropped captions."""
    log_every: Count = 10
    """Steps between printed lines, where there is no terminal for a progress bar."""
    save_every: Count = 500
    """Steps between saved states; there is always one at the end."""
    keep_checkpoints: Count = 2
    """How many saved states stay; older ones are removed once a newer one is whole."""
    num_samples: CountOrNone = 2
    """Clips sampled at the end, from the captions of the first videos."""
    sample_captions: tuple[str, ...] = ()
    """Captions of further clips, of the size with the most tokens."""
    sample_every: CountOrNone = 0
    """Steps between sampled clips; 0 samples at the end alone."""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ("tensorboard",)
    """Where metrics and sampled clips are shown, beside metrics.jsonl and samples; wandb and trackio are installed by
    pip install 'opensora-accel[trackers]', and asked for their settings in their own ways (WANDB_MODE=offline)."""
    tracker_project: Annotated[str, Field(min_length=1, max_length=100)] = "opensora-accel"
    """The project of wandb and trackio that the run appears in, under the name of its output folder."""
    cache_folder: str = ""
    """Folder that keeps what the VAE of codec.path and the encoder of text.path computed, for later runs and for others
    beside this one; empty keeps nothing between runs."""
    memory_target_gib: NotNegative = 0.0
    """Device memory that plan.offload="auto" may fill; 0 takes 90 % of the device's."""
    watch: CountOrNone = 0
    """Steps between two looks at whether ranks that should hold the same weights, gradients and samples do; NaN and
    spikes are then traced in every step. 0 does not watch."""
    timeout_s: NotNegative = 0.0
    """Seconds that ranks wait for each other before those that did not come are named; 0 takes
    OPENSORA_ACCEL_TIMEOUT, or torch's own (30 minutes on CPUs, 10 on GPUs)."""
    resume: str = ""
    """Saved state to go on from, a folder; newest (`--resume` alone): the output's newest; auto: that, or a start."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    codec: CodecConfig = field(default_factory=CodecConfig)
    text: TextConfig = field(default_factory=TextConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    flow: FlowConfig = field(default_factory=FlowConfig)
    conditions: ConditionsConfig = field(default_factory=ConditionsConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    plan: Plan = field(default_factory=Plan)

    def __post_init__(self) -> None:
        if self.optim.state != "fp32" and self.plan.precision == "fp64":
            raise ValueError(
                f'optim.state="{self.optim.state}" steps in fp32, and plan.precision="fp64" asks for more; set one of '
                "them to fp32"
            )
        if self.cache_folder and not (self.codec.path or self.text.path):
            raise ValueError(
                "cache_folder keeps what a VAE (codec.path) and a text encoder (text.path) computed, and this run has "
                "neither; set one of them, or leave cache_folder out"
            )
        if self.sample_every and not (self.num_samples or self.sample_captions):
            raise ValueError(
                "sample_every has nothing to sample: num_samples is 0, and there are no sample_captions; set one of "
                "them, or leave sample_every out"
            )
        if self.sample_captions and not self.conditions.t2v:
            raise ValueError(
                "sample_captions have no frames to begin with, and conditions.t2v is 0: the model learns no clip from "
                "a caption alone; leave sample_captions out, or give conditions.t2v a weight"
            )
        if self.tracker_project != "opensora-accel" and not {"wandb", "trackio"} & set(self.trackers):
            raise ValueError(
                "tracker_project is for wandb and trackio, and trackers has neither; add one, or leave tracker_project "
                "out"
            )
        if len(set(self.trackers)) < len(self.trackers):
            raise ValueError(f"trackers names one twice: {', '.join(self.trackers)}; leave one out")
        if self.memory_target_gib and self.plan.offload != "auto":
            raise ValueError(
                f'memory_target_gib={self.memory_target_gib:g} is what plan.offload="auto" aims at, but plan.offload '
                f"is {self.plan.offload}; set it to auto, or leave memory_target_gib out"
            )


@dataclass(frozen=True)
class ProfileOptions:
    """What `opensora-accel profile` asks for beside the run's configuration."""

    num_steps: int
    # In the last step, also what fills the memory.
    follow_memory: bool = False
    # Of each axis, as measured by `opensora-accel doctor --links` or given.
    link_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    # Operations a second of one device, where it is not one that is known.
    peak_flops: float | None = None


# In the place of a plan: the planner chooses it when the run starts.
AUTO_PLAN = "auto"


def load_config(path: str | Path) -> TrainConfig:
    """The run described by a TOML or JSON file; options that it does not name keep their defaults.

    `plan = "auto"` is read as the default plan: see `asks_for_a_plan`.

    Raises:
        FileNotFoundError: there is no such file; the message names the config files beside it.
        ValueError: the file is not TOML or JSON, or `config_from_dict` refuses its values.
    """
    values = _read_file(path)
    if values.get("plan") == AUTO_PLAN:
        values = {name: value for name, value in values.items() if name != "plan"}
    return config_from_dict(values, str(path))


def asks_for_a_plan(path: str | Path) -> bool:
    """Whether the file says plan = "auto".

    Raises:
        FileNotFoundError, ValueError: as `load_config`.
    """
    return bool(_read_file(path).get("plan") == AUTO_PLAN)


def _read_file(path: str | Path) -> dict[str, Any]:
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
    # `config_from_dict` tells what else than a table is wrong with.
    return values if isinstance(values, dict) else {"": values}


def config_from_dict(values: Mapping[str, Any], source: str) -> TrainConfig:
    """The run with these (nested) values; a whole number serves as a fraction, and nothing else is converted.

    Args:
        source: where the values come from, for the message.

    Raises:
        ValueError: an unknown option (the message has the nearest valid one), or a value of a wrong type or size.
    """
    try:
        # As JSON, where a list may stand for a tuple also under strict checks.
        return TypeAdapter(TrainConfig).validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        raise ValueError(f"{source}: {_in_one_line(error, TrainConfig)}") from error


def check_argument(hint: Any, value: Any, name: str) -> Any:
    """The value of a model's argument as the type that its class asks for.

    Raises:
        ValueError: the value has another type.
    """
    # Types of a model's constructor are what its authors wrote, which is not always what they meant.
    if get_origin(hint) is tuple and len(get_args(hint)) == 1:
        # diffusers writes tuple[int] for a tuple of any length.
        hint = types.GenericAlias(tuple, (get_args(hint)[0], ...))
    try:
        return TypeAdapter(hint, config=_STRICT).validate_json(json.dumps(value))
    except ValidationError as error:
        rule = " or ".join(_rule(each["msg"]) for each in error.errors())
        raise ValueError(f"{name} {rule}; got {value!r}") from error


def _in_one_line(error: ValidationError, cls: Any) -> str:
    """The first option of `cls` that pydantic refuses, the rule and the value."""
    names = set(option_names(cls))
    named = []
    for each in error.errors():
        # Its path through nested tables, as far as it names options.
        name = ""
        for part in map(str, each["loc"]):
            full = f"{name}.{part}".lstrip(".")
            # The others are names that pydantic gives the alternatives of a type.
            if full in names or part.isdigit() or each["type"] == "unexpected_keyword_argument":
                name = full
        named.append((name, each))
    # The first is enough to go on with, and a line has no room for all.
    name, first = named[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    if first["type"] == "unexpected_keyword_argument":
        table, _, key = name.rpartition(".")
        every = option_names(cls)
        here = [full for full in every if full.rpartition(".")[0] == table]
        # A key in the wrong table is found in the right one; one of this table goes before the others of its name.
        nearest_of = {full.rpartition(".")[2]: full for full in [*every, *here]}
        nearest = difflib.get_close_matches(key, nearest_of, n=1, cutoff=0.5)
        hint = f"did you mean {nearest_of[nearest[0]]!r}? " if nearest else ""
        choice = ", ".join(full.rpartition(".")[2] for full in here)
        return f"there is no option {name!r}; {hint}The options here are {choice}"
    rule = " or ".join(_rule(each["msg"]) for other, each in named if other == name)
    return f"{name or 'the file'} {rule}; got {first['input']!r}"


def _rule(message: str) -> str:
    return (
        message[0].lower() + message[1:]
        if "should" not in message
        else message.replace("Input should", "must")
    )


def option_names(cls: Any = TrainConfig, prefix: str = "") -> list[str]:
    """The full name of every option, and of every table of options."""
    names = []
    for name, hint in get_type_hints(cls).items():
        names.append(prefix + name)
        if dataclasses.is_dataclass(hint):
            names += option_names(hint, f"{prefix}{name}.")
    return names


def differences(before: TrainConfig, after: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Options by full name that differ, with both values."""
    old, new = _flat(dataclasses.asdict(before)), _flat(dataclasses.asdict(after))
    return {name: (old.get(name), new.get(name)) for name in {**old, **new} if old.get(name) != new.get(name)}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found.update(_flat(value, f"{prefix}{key}."))
        else:
            found[prefix + key] = list(value) if isinstance(value, tuple) else value
    return found
