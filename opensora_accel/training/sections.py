"""The tables of a run's configuration: what is trained, on which clips, encoded by what, and how.

`config.py` puts them together, and has the rules between options of several tables.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import field
from typing import Annotated, Any, Literal

import tyro
from pydantic import Field

from opensora_accel.training.buckets import Bucket, parse_buckets
from opensora_accel.training.options import options

JsonTable = Annotated[dict[str, Any], tyro.conf.arg(constructor=json.loads, metavar="JSON")]
NotNegative = Annotated[float, Field(ge=0)]
AboveZero = Annotated[float, Field(gt=0)]
UpToOne = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1)]
# An epoch is a list of its files, each as often as it comes.
_MOST_REPEATS = 1000
CountOrNone = Annotated[int, Field(ge=0)]


@options
class DataConfig:
    """Which clips are trained on, and how they are cut."""

    folder: str = ""
    """Folder with the videos, and their captions in a metadata.jsonl, .csv or .json, beside each file, or in shards."""
    folders: JsonTable = field(default_factory=dict)
    """Several such folders in place of data.folder, as JSON (a table in the file), and how often the files of each come
    where those of another come once: {"clips": 1, "close-ups": 3}."""
    regularisation: tuple[str, ...] = ()
    """Those of data.folders on whose clips adapters change nothing: there a run learns what the model answers without
    them, so that it forgets nothing of what the clips show (prior preservation)."""
    masks: str = ""
    """Folder with masks, as the files lie in theirs: of a.mp4 a picture a.png, or a video of as many frames, of its
    shape. White is learned, black is not, grey in part; a file without one is learned whole."""
    controls: str = ""
    """Folder with control clips (pose, depth, edges), as the files lie in theirs, for a model that follows them (Wan
    VACE, EasyAnimate's -Control): of a.mp4 a video of as many frames, of its shape, and of a picture a picture. A file
    without one is learned from text alone."""
    references: str = ""
    """Folder with pictures of what clips show (a person, a thing, a place), for a model that takes them (Wan VACE,
    EasyAnimate's -Control, MiniMax H3): of a.mp4 a.png, or a.0.png, a.1.png and so on, of any shape. Every file has as
    many."""
    num_references: Annotated[int, Field(ge=1, le=9)] = 1
    """How many references each file has, each of which takes a latent frame more (Wan VACE) or rows of its own
    (MiniMax H3); EasyAnimate takes one."""
    reference_side: Annotated[int, Field(ge=0, le=8192)] = 0
    """The shorter side of references in pixels, for a model that takes each in its own shape (MiniMax H3: 2048); 0 is
    for one that takes them in the size of clips, on white (Wan VACE)."""
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
    packed_tokens: Annotated[int, Field(ge=0, le=2**31)] = 0
    """Clips of any of data.buckets share rows of at most so many tokens, without padding; then data.batch_size counts
    rows. 0: each step has clips of one size."""
    num_workers: Annotated[int, Field(ge=0, le=256)] = 0
    """Decoding processes per rank; 0 decodes in the training process."""
    frame_rate: NotNegative = 0.0
    """Frames a second of clips, for a model that is told (LTX-Video, LTX-2, MiniMax H3); 0 takes the first video's,
    over frame_stride."""

    def __post_init__(self) -> None:
        self._check_rows()
        if self.num_references != 1 and not self.references:
            raise ValueError(
                f"data.num_references ({self.num_references}) says how many pictures of data.references each file has; "
                "name that folder, or leave data.num_references out"
            )
        if self.reference_side and not self.references:
            raise ValueError(
                f"data.reference_side ({self.reference_side}) says how large pictures of data.references are; name "
                "that folder, or leave data.reference_side out"
            )
        if self.folder and self.folders:
            raise ValueError("data.folders stands in place of data.folder; leave one of them out")
        for name, times in self.folders.items():
            if type(times) is not int or not 1 <= times <= _MOST_REPEATS:
                raise ValueError(
                    f"data.folders says how often the files of each come, from 1 to {_MOST_REPEATS:,}; got {times!r} "
                    f"for {name}"
                )
        absolute = [os.path.abspath(name) for name in self.folders]
        for name, path in zip(self.folders, absolute, strict=True):
            if "\0" in name or any(path.startswith(os.path.join(other, "")) for other in absolute):
                raise ValueError(f"data.folders has {name!r}, which is no folder or lies in another of them")
            if absolute.count(path) > 1:
                raise ValueError(f"data.folders has {name!r} twice; give it once, with a larger number")
        others = [name for name in self.regularisation if name not in self.folders]
        if others or (self.regularisation and len(set(self.regularisation)) == len(self.folders)):
            raise ValueError(
                f"data.regularisation has {others[0]!r}, which is none of data.folders"
                if others
                else "data.regularisation has all of data.folders, which leaves nothing to learn; leave one out"
            )
        for name, default in (("num_frames", 9), ("height", 48), ("width", 80)):
            if self.buckets and getattr(self, name) != default:
                raise ValueError(
                    f"data.buckets say how large clips are; leave data.{name} out, or leave data.buckets out"
                )

    def _check_rows(self) -> None:
        sized = [bucket for bucket in parse_buckets(self.buckets) if bucket.batch_size]
        if sized and self.packed_tokens:
            raise ValueError(
                f"data.buckets says how many clips of {sized[0]} are in a batch, and with data.packed_tokens rows say "
                f"that; write {sized[0]} alone"
            )

    @property
    def root(self) -> str:
        """The folder by which files are named: data.folder, or the one that all of data.folders lie in."""
        return os.path.commonpath(map(os.path.abspath, self.folders)) if self.folders else self.folder

    @property
    def references_of_each(self) -> int:
        """How many references each file has."""
        return self.num_references if self.references else 0

    def is_regularisation(self, file: str) -> bool:
        """Whether a file, by its path in `root`, is one of data.regularisation."""
        folders = (os.path.relpath(os.path.abspath(name), self.root) for name in self.regularisation)
        return any(file.startswith(os.path.join(folder, "")) for folder in folders)

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
    """Class of diffusers that is built from `config`, one that has a recipe; with `path`, the folder names it. Or an
    author's own, by where it is imported: opensora.models.mmdit.model:MMDiTModel."""
    config: JsonTable = field(default_factory=dict)
    """Arguments of that class, as JSON (a table in the file). Channels and text width follow from the codec."""
    path: str = ""
    """Local folder of a model saved by diffusers, to go on from its weights; of an author's class a folder or a
    .safetensors file."""
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
        # The weights of an author's class may be a file alone.
        if self.path and self.config and ":" not in self.class_name:
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
    sound_path: str = ""
    """Local folder of an audio VAE, for a model that makes sound too (LTX-2, MiniMax H3): audio_vae of its pipeline;
    LTX-2's vocoder lies beside it. Without one samples of the sound are folded, 8,000 a second."""
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
    """Local folder with a tokenizer and the family's encoder: T5, UMT5, LLaMA, Gemma or the text model of Qwen2.5-VL
    or Qwen3-VL."""
    path_2: str = ""
    """The same of the second encoder, of families that have two, as HunyuanVideo's CLIP, and ByT5 of 1.5; of LTX-2 the
    connectors, which make of the encoder's states those that clips and sound see."""
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
        if self.path_2 and not self.path:
            raise ValueError("text.path_2 is the second of two encoders; set text.path to the first")


@options
class ImageConfig:
    """The first frame as an image encoder sees it, which image-to-video models of Wan 2.1 and HunyuanVideo 1.5 take
    beside latents."""

    path: str = ""
    """Local folder of the image encoder, CLIP or SigLIP (image_encoder of the pipeline); the model takes its states."""
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

    kind: Literal["lora", "dora", "lokr"] = "lora"
    """What an adapter does to a weight: a LoRA adds a product of two low matrices, a DoRA learns the length of its rows
    beside, a LoKr adds the Kronecker product of a small matrix and a low one."""
    rank: Annotated[int, Field(ge=0, le=4096)] = 0
    """Rank of the adapters; 0 has none, and trains the model itself."""
    alpha: NotNegative = 0.0
    """Adapters count alpha / rank times; 0 takes the rank."""
    factor: Annotated[int, Field(ge=0, le=4096)] = 0
    """Of a LoKr, the size of the small matrix, for layers that it divides; 0 is as near to the root of a layer's."""
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = ("to_q", "to_k", "to_v", "to_out.0")
    """Ends of the names of the layers that get one."""
    base: Literal["whole", "int8", "nf4"] = "whole"
    """How frozen linear layers of the blocks are kept: whole (in bf16 where the run computes in it), or in codes of 8
    or 4 bits, of which each product makes the weight."""
    path: str = ""
    """Local file or folder of an adapter to go on from, as this trainer, diffusers, PEFT and ComfyUI have it; its kind,
    rank, alpha, factor and targets are its own."""
    path_2: str = ""
    """The same for the low-noise expert; see flow.boundary."""

    def __post_init__(self) -> None:
        defaults = {each.name: each.default for each in dataclasses.fields(self)}
        changed = [
            f"lora.{name}"
            for name in ("kind", "rank", "alpha", "factor", "targets")
            if getattr(self, name) != defaults[name]
        ]
        if self.path and changed:
            raise ValueError(
                "lora.path brings its own kind, rank, alpha, factor and targets; leave "
                f"{' and '.join(changed)} out, or leave lora.path out"
            )
        if self.base != defaults["base"]:
            changed.append("lora.base")
        if not self.is_used and changed:
            raise ValueError(
                f"{' and '.join(changed)} are for a run with lora.rank; set it, or leave them out"
            )
        if self.factor and self.kind != "lokr":
            raise ValueError('lora.factor is for lora.kind="lokr"; set it, or leave lora.factor out')

    @property
    def is_used(self) -> bool:
        return bool(self.rank or self.path)


@options
class FlowConfig:
    """Flow matching: which times are trained, and how a clip is sampled."""

    shift: AboveZero | Literal["auto", "ltx", "open-sora-1.2"] = "auto"
    """Time shift towards noise; auto grows with resolution and length, as Open-Sora 2.0's, open-sora-1.2 as 1.2's, ltx
    as LTX-Video's. For a model of noise levels auto is 1, and another number the root of its scheduler's
    snr_shift_scale."""
    time_distribution: Literal["logit-normal", "uniform", "stretched"] = "logit-normal"
    """Distribution of times before the shift; stretched is logit-normal, of which what lies between 0.5 and 99.9
    percent behind the shift is spread from 0 to 1, and a tenth uniform, as LTX-2's."""
    logit_mean: float = 0.0
    """Mean of the normal distribution under logit-normal times; above 0 there is more noise."""
    logit_std: AboveZero = 1.0
    """Its standard deviation."""
    time_range: tuple[UpToOne, UpToOne] = (0.0, 1.0)
    """Times that are trained, after the shift: all, or one expert's, as 0.875 to 1 for Wan 2.2's high-noise one."""
    boundary: Share = 0.0
    """Trains two experts on the same clips, each with its own optimizer: the high-noise one of model.path from this
    time to 1, the low-noise one of model.path_2 from 0 to it; Wan 2.2's T2V has 0.875, its I2V 0.9. 0 trains one."""
    diffusion_forcing: Literal["none", "independent", "non-decreasing"] = "none"
    """A time of its own for each latent frame, of a model that takes them (SkyReels-V2): independent ones, or a frame's
    is never less than that of the frame before it, as its authors train; none has one time for a clip."""
    weighting: Literal["none", "bell"] = "none"
    """What a time counts in the loss: all the same, or most in the middle and nothing at the ends; 1 in the mean."""
    min_snr: NotNegative = 0.0
    """A model of noise levels learns those with more signal than so many times the noise's less (5 is usual); 0 learns
    all alike."""
    huber: NotNegative = 0.0
    """Errors that are larger count by their size in place of its square, so that single ones pull less; 0 has squares
    alone."""
    noise_offset: NotNegative = 0.0
    """Moves the noise of each channel of a clip by so many times a number of its own, so that very dark and bright
    clips are learned too (0.1 is much); 0 moves none."""
    caption_drop: Share = 0.1
    """Share of samples trained without caption, for guidance."""
    sample_steps: Annotated[int, Field(ge=1, le=10_000)] = 30
    """Euler steps of a sampled clip; those of a model of noise levels are DDIM's."""
    guidance: float = 1.0
    """Classifier-free guidance of sampled clips; 1 is none."""
    frame_guidance: float = 1.0
    """Guidance of sampled clips by the frames that are given, beside that by the caption, of a model that learned clips
    without them too (Open-Sora 2.0 has 3); 1 is none."""
    ar_step: CountOrNone = 0
    """With diffusion forcing, steps of a sampled clip by which each causal block is behind the one before it; 0 takes
    all together."""
    causal_block_size: CountOrNone = 0
    """With diffusion forcing, latent frames of a causal block, which attends to itself and to those before it, in
    training and in samples; 0 leaves the model as it is (num_frame_per_block)."""
    addnoise_condition: Annotated[float, Field(ge=0, lt=1000)] = 0.0
    """With diffusion forcing, the time, in 0 to 1000, up to which frames that are given to a sample are noisy; 20 is
    usual."""
    sample_frames: Annotated[int, Field(ge=0, le=100_000)] = 0
    """With diffusion forcing, frames of a sampled clip that is longer than those that are learned, which is made in
    parts; 0 has as many."""
    overlap_history: CountOrNone = 0
    """Frames with which each of these parts begins, the last ones of the part before it; 17 and 37 are usual."""

    @property
    def is_forced(self) -> bool:
        """Whether each latent frame has a time of its own."""
        return self.diffusion_forcing != "none"

    def __post_init__(self) -> None:
        of_frames = "ar_step", "causal_block_size", "addnoise_condition", "sample_frames", "overlap_history"
        given = [f"flow.{name}" for name in of_frames if getattr(self, name)]
        if not self.is_forced and given:
            raise ValueError(
                f"{' and '.join(given)} are for a model whose latent frames have times of their own; set "
                "flow.diffusion_forcing, or leave them out"
            )
        if bool(self.sample_frames) != bool(self.overlap_history):
            raise ValueError(
                "flow.sample_frames and flow.overlap_history are set where samples are longer than clips; set both, as "
                "to 257 and 17, or leave both out"
            )
        if self.is_forced and (self.boundary or self.time_distribution == "stretched"):
            raise ValueError(
                "flow.boundary and stretched times are of one time for a clip; leave them out, or set "
                "flow.diffusion_forcing to none"
            )
        if self.diffusion_forcing == "non-decreasing" and self.weighting != "none":
            raise ValueError(
                "flow.weighting counts times by how often they are drawn, and non-decreasing ones are drawn more often "
                "at both ends; leave it out, or set flow.diffusion_forcing to independent"
            )
        if self.time_distribution == "uniform" and (self.logit_mean, self.logit_std) != (0, 1):
            raise ValueError(
                'flow.logit_mean and flow.logit_std are for flow.time_distribution="logit-normal"; set it, or leave '
                "them out"
            )
        if not self.time_range[0] < self.time_range[1]:
            raise ValueError(
                f"flow.time_range must be a lower and a higher time; got {list(self.time_range)}"
            )
        if self.time_distribution == "stretched" and (
            self.boundary or self.time_range != (0.0, 1.0) or self.weighting != "none"
        ):
            raise ValueError(
                'flow.time_distribution="stretched" is over all times, each of which counts the same; leave '
                "flow.time_range, flow.boundary and flow.weighting out, or choose logit-normal"
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
    learn_given: bool = True
    """Where a model takes frames in channels, its sampler makes them too, and so they are in the loss; False leaves
    latent frames out of it whose frames are all given, as Open-Sora's no_i2v_ref_loss does."""

    def __post_init__(self) -> None:
        if not any(self.weights.values()):
            raise ValueError("all weights of conditions are 0; set one above 0, as conditions.t2v = 1")
        if not self.learn_given and not self.are_used:
            raise ValueError(
                "conditions.learn_given is about frames that are given, and this run gives none; set "
                "conditions.i2v_head above 0, or leave it out"
            )

    @property
    def weights(self) -> dict[str, float]:
        """Of each kind."""
        return {name: weight for name, weight in dataclasses.asdict(self).items() if name != "learn_given"}

    @property
    def give_first_frame(self) -> bool:
        """Whether the first frame is given of some clips."""
        return any((self.i2v_head, self.i2v_loop, self.v2v_head, self.v2v_head_easy))

    @property
    def are_used(self) -> bool:
        """Whether frames are given."""
        return any(weight for name, weight in self.weights.items() if name != "t2v")


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
    """AdamW, Muon or Prodigy, its schedule and what surrounds it."""

    lr: NotNegative = 1e-3
    """Peak learning rate; prodigy, which finds the rate, multiplies what it found by it, and takes 1."""
    algorithm: Literal["adamw", "muon", "prodigy"] = "adamw"
    """How parameters step; muon makes the steps of the blocks' matrices orthogonal, with the length of AdamW's, and
    takes AdamW for all else; prodigy is Adam that finds its learning rate."""
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
        if self.algorithm == "muon" and (self.state != "fp32" or self.schedule == "free"):
            raise ValueError(
                'optim.algorithm="muon" keeps its average in fp32 and has a schedule; set optim.state to fp32 and '
                "optim.schedule to cosine or constant, or optim.algorithm to adamw"
            )
        if self.algorithm == "prodigy":
            self._check_prodigy()
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

    def _check_prodigy(self) -> None:
        if self.state != "fp32" or self.schedule == "free":
            raise ValueError(
                'optim.algorithm="prodigy" keeps what it has in fp32 and has a schedule; set optim.state to fp32 and '
                "optim.schedule to cosine or constant, or optim.algorithm to adamw"
            )
        if self.lr < 0.1:
            raise ValueError(
                f'optim.algorithm="prodigy" finds the learning rate and multiplies it by optim.lr, and {self.lr:g} '
                "is a learning rate of AdamW; set --optim.lr 1"
            )
