"""The configuration of one training run: frozen dataclasses, read from TOML or JSON, never executed.

A bound of an option is part of its type, and pydantic checks it wherever a config is made: in Python code, and by
`config_from_dict` from a file, a saved state or the command line. Rules between several options stand in
`__post_init__`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

import tomllib
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from opensora_accel.documents import read_text
from opensora_accel.plan import Plan
from opensora_accel.training.buckets import Bucket, parse_plans
from opensora_accel.training.options import first_refused, options
from opensora_accel.training.sections import (
    CodecConfig,
    ConditionsConfig,
    Count,
    CountOrNone,
    DataConfig,
    FlowConfig,
    ImageConfig,
    JsonTable,
    LoraConfig,
    ModelConfig,
    NotNegative,
    OptimConfig,
    TextConfig,
    ValidationConfig,
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
        self._check_optim()
        if self.cache_folder and not (self.codec.path or self.text.path or self.image.path):
            raise ValueError(
                "cache_folder keeps what a VAE (codec.path) and a text encoder (text.path) computed, and this run has "
                "neither; set one of them, or leave cache_folder out"
            )
        if self.data.regularisation and not self.lora.is_used:
            raise ValueError(
                "data.regularisation is for a run of adapters, which asks the model without them; set lora.rank, or "
                "leave it out"
            )
        if self.lora.base != "whole" and self.plan.tp > 1:
            raise ValueError(
                f'lora.base="{self.lora.base}" keeps layers by their rows, which plan.tp cuts otherwise; set plan.tp '
                "to 1, and put its ranks on plan.ulysses or plan.dp_shard, or leave lora.base out"
            )
        if self.flow.time_range != (0.0, 1.0) and (self.num_samples or self.sample_captions):
            raise ValueError(
                f"a model that learns the times of flow.time_range {list(self.flow.time_range)} alone samples no "
                "whole clip; set num_samples to 0 and leave sample_captions out, and sample with both experts in their "
                "pipeline"
            )
        self._check_experts()
        self._check_given_frames()
        if self.sample_every and not (self.num_samples or self.sample_captions):
            raise ValueError(
                "sample_every has nothing to sample: num_samples is 0, and there are no sample_captions; set one of "
                "them, or leave sample_every out"
            )
        if self.flow.sample_frames and not (self.num_samples or self.sample_captions):
            raise ValueError(
                "flow.sample_frames is the length of samples, and this run has none: num_samples is 0, and there are "
                "no sample_captions; set one of them, or leave flow.sample_frames and flow.overlap_history out"
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

    def _check_optim(self) -> None:
        if self.optim.state != "fp32" and self.plan.precision == "fp64":
            raise ValueError(
                f'optim.state="{self.optim.state}" steps in fp32, and plan.precision="fp64" asks for more; set one of '
                "them to fp32"
            )
        if self.optim.algorithm == "muon" and (self.plan.tp > 1 or self.plan.cpu_offload):
            raise ValueError(
                'optim.algorithm="muon" takes whole matrices, on the device that trains; set plan.tp to 1 and '
                "plan.cpu_offload to False, or optim.algorithm to adamw"
            )
        if self.optim.algorithm == "prodigy" and self.plan.tp > 1:
            raise ValueError(
                'optim.algorithm="prodigy" adds up over whole parameters, which plan.tp cuts; set plan.tp to 1, or '
                "optim.algorithm to adamw"
            )

    def _check_given_frames(self) -> None:
        if self.image.is_used and not self.conditions.give_first_frame:
            raise ValueError(
                "image encodes the first frame where that is given, and conditions give it of no clip; set "
                "conditions.i2v_head above 0, or leave image.path and image.width out"
            )
        if self.flow.addnoise_condition and not (self.conditions.are_used or self.flow.sample_frames):
            raise ValueError(
                "flow.addnoise_condition is for frames that are given, and this run gives none; set "
                "conditions.i2v_head above 0 or flow.sample_frames, or leave it out"
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
