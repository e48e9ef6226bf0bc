"""The configuration of one training run: frozen dataclasses, read from TOML or JSON, never executed.

A bound of an option is part of its type, and pydantic checks it wherever a config is made: in Python code, and by
`config_from_dict` from a file, a saved state or the command line. Rules between several options stand in
`__post_init__`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

import tomllib
import tyro
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from opensora_accel.documents import read_text
from opensora_accel.plan import Plan
from opensora_accel.training.buckets import Bucket, parse_buckets, parse_plans
from opensora_accel.training.options import first_refused, options

JsonTable = Annotated[dict[str, Any], tyro.conf.arg(constructor=json.loads, metavar="JSON")]
NotNegative = Annotated[float, Field(ge=0)]
AboveZero = Annotated[float, Field(gt=0)]
UpToOne = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1)]
CountOrNone = Annotated[int, Field(ge=0)]
# diffusers' Wan, SkyReels-V2 and ChronoEdit take the last 512 of all tokens for the text, and the others for pictures.
_TOKENS_BESIDE_PICTURES = 512


@options
class DataConfig:
    """Which clips are trained on, and how they are cut."""

    folder: str = ""
    """Folder with the videos, and their captions in a metadata.jsonl, .csv or .json, beside each file, or in shards."""
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
    frame_rate: NotNegative = 0.0
    """Frames a second of clips, for a model that is told (LTX-Video); 0 takes the first video's, over frame_stride."""

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
    """Class of diffusers that is built from `config`, one that has a recipe; with `path`, the folder names it."""
    config: JsonTable = field(default_factory=dict)
    """Arguments of that class, as JSON (a table in the file). Channels and text width follow from the codec."""
    path: str = ""
    """Local folder of a model saved by diffusers, to go on from its weights."""
    path_2: str = ""
    """The same of the low-noise expert (transformer_2 of Wan 2.2's pipelines); see flow.boundary."""

    def __post_init__(self) -> None:
        if self.path_2 and not self.path:
            raise ValueError(
                "model.path_2 is the second expert of a pair, and model.path has the first; set both, or leave "
                "model.path_2 out"
            )
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
class ImageConfig:
    """The first frame as a CLIP image encoder sees it, which Wan 2.1's image-to-video models take beside latents."""

    path: str = ""
    """Local folder of a CLIP image encoder (image_encoder of Wan 2.1's); the model then takes its states."""
    width: Annotated[int, Field(ge=0, le=8192, multiple_of=8)] = 0
    """Embedding width of a small encoder in its place; 0 has none."""
    dtype: Literal["bf16", "fp32"] = "fp32"
    """What the encoder of `path` is loaded and computed in; the small one has the type of the run."""
    cache: bool = False
    """Encode each first frame once, and keep its states in host memory."""

    def __post_init__(self) -> None:
        if self.path and self.width:
            raise ValueError("image.width is for the small encoder; leave it out, or leave image.path out")
        if not self.path and self.dtype != "fp32":
            raise ValueError("image.dtype is for an encoder from image.path; leave it out, or set image.path")
        if not self.is_used and self.cache:
            raise ValueError(
                "image.cache is for a run with image.path or image.width; set one, or leave it out"
            )

    @property
    def is_used(self) -> bool:
        return bool(self.path or self.width)


@options
class LoraConfig:
    """Adapters that are trained in place of the model."""

    rank: Annotated[int, Field(ge=0, le=4096)] = 0
    """Rank of the adapters; 0 has none, and trains the model itself."""
    alpha: NotNegative = 0.0
    """Adapters count alpha / rank times; 0 takes the rank."""
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = ("to_q", "to_k", "to_v", "to_out.0")
    """Ends of the names of the layers that get one."""
    path: str = ""
    """Local file or folder of an adapter to go on from, as this trainer, diffusers, PEFT and ComfyUI have it; rank,
    alpha and targets are its own."""
    path_2: str = ""
    """The same for the low-noise expert; see flow.boundary."""

    def __post_init__(self) -> None:
        if self.path and (self.rank or self.alpha or self.targets != ("to_q", "to_k", "to_v", "to_out.0")):
            raise ValueError(
                "lora.path brings its own rank, alpha and targets; leave lora.rank, lora.alpha and lora.targets out, "
                "or leave lora.path out"
            )
        if not self.is_used and (self.alpha or self.targets != ("to_q", "to_k", "to_v", "to_out.0")):
            raise ValueError(
                "lora.alpha and lora.targets are for a run with lora.rank; set it, or leave them out"
            )

    @property
    def is_used(self) -> bool:
        return bool(self.rank or self.path)


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
    time_range: tuple[UpToOne, UpToOne] = (0.0, 1.0)
    """Times that are trained, after the shift: all, or one expert's, as 0.875 to 1 for Wan 2.2's high-noise one."""
    boundary: Share = 0.0
    """Trains two experts on the same clips, each with its own optimizer: the high-noise one of model.path from this
    time to 1, the low-noise one of model.path_2 from 0 to it; Wan 2.2's T2V has 0.875, its I2V 0.9. 0 trains one."""
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
        if not self.time_range[0] < self.time_range[1]:
            raise ValueError(
                f"flow.time_range must be a lower and a higher time; got {list(self.time_range)}"
            )
        if self.boundary and self.time_range != (0.0, 1.0):
            raise ValueError(
                "flow.time_range trains one expert and flow.boundary both; leave one of them out"
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
    def give_first_frame(self) -> bool:
        """Whether the first frame is given of some clips."""
        return any((self.i2v_head, self.i2v_loop, self.v2v_head, self.v2v_head_easy))

    @property
    def are_used(self) -> bool:
        """Whether the model takes a mask and given frames."""
        return any(weight for name, weight in dataclasses.asdict(self).items() if name != "t2v")


@options
class ValidationConfig:
    """The loss of clips that are held out, at fixed times and noise."""

    num_clips: CountOrNone = 0
    """Files of data.folder that are not trained, chosen by the seed, of each of which one clip is looked at; 0 holds
    out none."""
    every: Count = 500
    """Steps between two looks; there is one at the end too."""
    num_times: Annotated[int, Field(ge=1, le=100)] = 4
    """Times of a look, the middles of so many equal parts."""

    def __post_init__(self) -> None:
        if not self.num_clips and (self.every, self.num_times) != (500, 4):
            raise ValueError(
                "validation.every and validation.num_times are for a run with validation.num_clips; set it, or leave "
                "them out"
            )


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
    OPENSORA_ACCEL_TIMEOUT, or torch's own 30 minutes for what is loaded and compiled in the first step, and 10 minutes
    from then on."""
    resume: str = ""
    """Saved state to go on from, a folder; newest (`--resume` alone): the output's newest; auto: that, or a start."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    codec: CodecConfig = field(default_factory=CodecConfig)
    text: TextConfig = field(default_factory=TextConfig)
    image: ImageConfig = field(default_factory=ImageConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    flow: FlowConfig = field(default_factory=FlowConfig)
    conditions: ConditionsConfig = field(default_factory=ConditionsConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    plan: Plan = field(default_factory=Plan)
    bucket_plans: JsonTable = field(default_factory=dict)
    """Plan settings that batches of a bucket have of their own (checkpoint, offload, mlp_chunks), as JSON (a table each
    in the file): {"81x480x832": {"checkpoint": "full", "offload": "auto"}}."""

    def __post_init__(self) -> None:
        if self.optim.state != "fp32" and self.plan.precision == "fp64":
            raise ValueError(
                f'optim.state="{self.optim.state}" steps in fp32, and plan.precision="fp64" asks for more; set one of '
                "them to fp32"
            )
        if self.cache_folder and not (self.codec.path or self.text.path or self.image.path):
            raise ValueError(
                "cache_folder keeps what a VAE (codec.path) and a text encoder (text.path) computed, and this run has "
                "neither; set one of them, or leave cache_folder out"
            )
        if self.image.is_used and not self.conditions.give_first_frame:
            raise ValueError(
                "image encodes the first frame where that is given, and conditions give it of no clip; set "
                "conditions.i2v_head above 0, or leave image.path and image.width out"
            )
        if self.image.is_used and self.text.length != _TOKENS_BESIDE_PICTURES:
            raise ValueError(
                f"a model that takes pictures' states counts on {_TOKENS_BESIDE_PICTURES} tokens of text behind them; "
                f"text.length is {self.text.length}: set it to {_TOKENS_BESIDE_PICTURES}, or leave image.path and "
                "image.width out"
            )
        if self.flow.time_range != (0.0, 1.0) and (self.num_samples or self.sample_captions):
            raise ValueError(
                f"a model that learns the times of flow.time_range {list(self.flow.time_range)} alone samples no "
                "whole clip; set num_samples to 0 and leave sample_captions out, and sample with both experts in their "
                "pipeline"
            )
        self._check_experts()
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
        plans = [self.plan, *self.plans.values()]
        if self.memory_target_gib and all(plan.offload != "auto" for plan in plans):
            raise ValueError(
                f'memory_target_gib={self.memory_target_gib:g} is what plan.offload="auto" aims at, but plan.offload '
                f"is {self.plan.offload}; set it to auto, or leave memory_target_gib out"
            )

    def _check_experts(self) -> None:
        if bool(self.model.path_2) != bool(self.flow.boundary and self.model.path):
            missing = "model.path_2" if self.flow.boundary else "flow.boundary"
            raise ValueError(
                f"two experts are trained where model.path, model.path_2 and flow.boundary are set; {missing} is not: "
                "set it (0.875 for Wan 2.2's T2V, 0.9 for its I2V, and path_2 the folder transformer_2), or leave the "
                "others out and set flow.time_range, which trains one of them"
            )
        if bool(self.lora.path_2) != bool(self.lora.path and self.flow.boundary):
            raise ValueError(
                "lora.path_2 is the adapter of the second of two experts, and lora.path that of the first; with "
                "flow.boundary set both or none, and without it leave lora.path_2 out"
            )

    @property
    def experts(self) -> tuple[TrainConfig, ...]:
        """Each model's run, as if it were trained alone: this one, or the high-noise and low-noise experts'."""
        boundary = self.flow.boundary
        if not boundary:
            return (self,)
        model, lora = dataclasses.replace(self.model, path_2=""), dataclasses.replace(self.lora, path_2="")
        high, low = (
            dataclasses.replace(self.flow, boundary=0.0, time_range=times)
            for times in ((boundary, 1.0), (0.0, boundary))
        )
        # Samples take both.
        alone = dataclasses.replace(
            self, model=model, lora=lora, flow=high, num_samples=0, sample_captions=(), sample_every=0
        )
        second = dataclasses.replace(model, path=self.model.path_2)
        lora = dataclasses.replace(lora, path=self.lora.path_2)
        return alone, dataclasses.replace(alone, model=second, lora=lora, flow=low)

    def refuse_two_experts(self, what: str) -> None:
        """Raises ValueError for what follows or counts one model."""
        if self.flow.boundary:
            raise ValueError(
                f"{what} one model, and flow.boundary trains two; set flow.time_range in place of flow.boundary and "
                "model.path_2, which makes a run of one of them: its step is half of this run's, and beside it the "
                "other one's weights, moments and averages take as much memory"
            )

    @property
    def plans(self) -> dict[Bucket, Plan]:
        """The plans of the buckets that have settings of their own."""
        return parse_plans(self.bucket_plans, self.plan, self.data.sizes if self.data.buckets else ())


@dataclass(frozen=True)
class ProfileOptions:
    """What `opensora-accel profile` asks for beside the run's configuration."""

    # None: 20, or all that the run has left where those are fewer.
    num_steps: int | None
    # In the last step, also what fills the memory.
    follow_memory: bool = False
    # Bytes a second of each axis's links, as measured by `opensora-accel doctor --links` or given.
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


# The bound of a file that a person writes.
_MOST_BYTES = 1 << 20


def _read_file(path: str | Path) -> dict[str, Any]:
    path = Path(path)
    if not path.exists():
        nearby = sorted(p.name for p in path.parent.glob("*.[tj][os][mo][ln]"))
        there = f"; {path.parent}/ has {', '.join(nearby)}" if nearby else ""
        raise FileNotFoundError(f"there is no config file {path}{there}")
    text = read_text(path, most_bytes=_MOST_BYTES)
    try:
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as {path.suffix.lstrip('.') or 'TOML'}: {error}") from error
    # `config_from_dict` says what is wrong with anything but a table.
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
        raise ValueError(f"{source}: {first_refused(error, TrainConfig)}") from error


def differences(before: TrainConfig, after: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Options by full name that differ, with both values."""
    old, new = _flat(dataclasses.asdict(before)), _flat(dataclasses.asdict(after))
    return {name: (old.get(name), new.get(name)) for name in {**old, **new} if old.get(name) != new.get(name)}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = list(value) if isinstance(value, tuple) else value
    return flat
