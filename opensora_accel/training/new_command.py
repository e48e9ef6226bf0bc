"""`opensora-accel new`: from the folder of a pipeline, or of an author's weights, to a configuration that trains it."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from opensora_accel.deferred import deferred_init
from opensora_accel.documents import read_json
from opensora_accel.files import check_folder_of, replacing
from opensora_accel.plan import Plan
from opensora_accel.training import configured
from opensora_accel.training.classes import make
from opensora_accel.training.codec import build_codec
from opensora_accel.training.config import AUTO_PLAN, TrainConfig, config_from_dict, load_config
from opensora_accel.training.levels import snr_shift_scale
from opensora_accel.training.recipes import RECIPES, Recipe, check_recipe, patches_of
from opensora_accel.training.sections import CodecConfig, ModelConfig
from opensora_accel.training.text_encoders import text_shapes
from opensora_accel.weights import load_weights

# A line of the file: an option, its value, and what to know of it.
_Line = tuple[str, Any, str]

# What lies in the folder of a pipeline; the second in that of one of blocks.
_INDICES = ("model_index.json", "modular_model_index.json")
# How what is published is called, and where it lies.
_PUBLISHED = {
    "wan2.1-t2v-1.3b": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    "wan2.1-t2v-14b": "Wan-AI/Wan2.1-T2V-14B-Diffusers",
    "wan2.1-i2v-14b": "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers",
    "wan2.1-vace": "Wan-AI/Wan2.1-VACE-14B-diffusers",
    "wan2.1-vace-1.3b": "Wan-AI/Wan2.1-VACE-1.3B-diffusers",
    "wan2.2-t2v": "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
    "wan2.2-i2v": "Wan-AI/Wan2.2-I2V-A14B-Diffusers",
    "wan2.2-ti2v-5b": "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
    "ltx-video": "Lightricks/LTX-Video",
    "ltx-2": "Lightricks/LTX-2",
    "mochi": "genmo/mochi-1-preview",
    "cogvideox-2b": "THUDM/CogVideoX-2b",
    "cogvideox-5b": "THUDM/CogVideoX-5b",
    "easyanimate-5.1-7b": "alibaba-pai/EasyAnimateV5.1-7b-zh-diffusers",
    "easyanimate-5.1-12b-inp": "alibaba-pai/EasyAnimateV5.1-12b-zh-InP-diffusers",
    "easyanimate-5.1-12b-control": "alibaba-pai/EasyAnimateV5.1-12b-zh-Control-diffusers",
    "cosmos-predict2-2b": "nvidia/Cosmos-Predict2-2B-Video2World",
    # Each of its kinds lies on a branch.
    "cosmos-predict2.5-2b": "nvidia/Cosmos-Predict2.5-2B --revision diffusers/base/post-trained",
    "hunyuan-video": "hunyuanvideo-community/HunyuanVideo",
    "hunyuan-video-i2v": "hunyuanvideo-community/HunyuanVideo-I2V",
    "hunyuan-video-i2v-33ch": "hunyuanvideo-community/HunyuanVideo-I2V-33ch",
    "kandinsky-5-lite": "kandinskylab/Kandinsky-5.0-T2V-Lite-sft-5s-Diffusers",
    "minimax-h3": "MiniMaxAI/MiniMax-H3",
    "skyreels-v2-df": "Skywork/SkyReels-V2-DF-14B-540P-Diffusers",
}


@dataclass(frozen=True)
class _OfAuthor:
    """What an author publishes for a class of his own, by its places in one folder."""

    source: str
    model: str
    weights: str
    texts: tuple[str, ...]
    # Where a VAE of diffusers lies that makes the same latents, in its folder vae.
    vae_source: str

    @property
    def how(self) -> str:
        """The commands that bring it."""
        into = "--local-dir FOLDER"
        return (
            f"`hf download {self.source} {into}` brings it, and its VAE `hf download {self.vae_source} --include "
            f"'vae/*' {into}`"
        )


_OF_AUTHORS = {
    "open-sora-v2": _OfAuthor(
        "hpcai-tech/Open-Sora-v2",
        "MMDiTModel",
        "Open_Sora_v2.safetensors",
        ("google/t5-v1_1-xxl", "openai/clip-vit-large-patch14"),
        "hunyuanvideo-community/HunyuanVideo",
    ),
}


def main(arguments: Sequence[str]) -> int:
    """Writes the file, and beside it the schema that editors complete and check it by; prints how to start.

    Raises:
        ValueError, OSError: what a user can mend.
    """
    given = _parser().parse_args(arguments)
    if (given.gpus is None) != (given.hardware is None):
        raise ValueError("--gpus and --hardware belong together; give both, or none")
    if given.rank < 1:
        raise ValueError(
            f"--rank is that of adapters, at least 1; --full trains all weights; got {given.rank}"
        )
    if given.gpus is not None and given.gpus < 1:
        raise ValueError(f"--gpus is a number of GPUs, at least 1; got {given.gpus}")
    output: Path = given.output
    if output.suffix != ".toml":
        raise ValueError(f"--output is a .toml file; got {output}")
    check_folder_of(output)
    if output.exists():
        raise ValueError(f"{output} exists; name another file by --output, or move it away")
    folder = _pipeline_folder(given.pipeline)
    lines = _lines(folder, given.data, 0 if given.full else given.rank, given.references)
    config = config_from_dict(_nested(lines), str(folder))
    _check(config)
    plan: Plan | None = None
    if given.gpus is not None and configured.recipe_of(config.model).home:
        raise ValueError(
            f"--gpus and --hardware ask the planner, which follows a model without a GPU, and kernels of "
            f"{config.model.class_name} may need one; leave them out, and set the degrees of [plan] in {output}"
        )
    if given.gpus is not None:
        plan = _plan(config, given.gpus, given.hardware)
        lines = [(name, plan.data, note) if name == "data.batch_size" else (name, value, note)
                 for name, value, note in lines]  # fmt: skip
    schema = output.with_suffix(".schema.json")
    text = _text(folder, lines, plan, given, schema.name)
    with replacing(schema) as temporary:
        temporary.write_text(json.dumps(schema_of_config(), indent=1) + "\n", encoding="utf-8")
    with replacing(output) as temporary:
        temporary.write_text(text, encoding="utf-8")
    load_config(output)  # what is written is what a run takes
    print(f"wrote {output}, and {schema.name} for editors; start it with")
    print(f"  torchrun --nproc-per-node {given.gpus or 8} -m opensora_accel.cli train --config {output}")
    if not Path(given.data).is_dir():
        print(f"once there is a folder {given.data} with videos and captions, or data.folder names another")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="opensora-accel new",
        description="Writes a commented configuration that trains a pipeline's model, by what lies in its folder.",
        epilog="examples:\n"
        "  opensora-accel new Wan2.2-I2V-A14B-Diffusers --data clips\n"
        "      adapters of both experts, each at its own times, from first frames\n"
        "  opensora-accel new HunyuanVideo --full --gpus 64 --hardware h100x8-ib400\n"
        "      all weights, with the plan of 64 H100\n\n"
        f"names that are looked up: {', '.join([*_PUBLISHED, *_OF_AUTHORS])}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "pipeline",
        metavar="FOLDER",
        help="of a pipeline of diffusers: it has a model_index.json, or a modular one; or of Open-Sora 2.0",
    )
    parser.add_argument(
        "--data", default="clips", metavar="FOLDER", help="with the videos and captions (clips)"
    )
    parser.add_argument(
        "--references",
        default="",
        metavar="FOLDER",
        help="with pictures of what clips show, for a model that takes them (Wan VACE, MiniMax H3)",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("train.toml"), metavar="FILE", help="what is written (train.toml)"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--rank", type=int, default=16, metavar="N", help="of the adapters that are trained (16)"
    )
    what.add_argument("--full", action="store_true", help="train all weights in place of adapters")
    parser.add_argument("--gpus", type=int, metavar="N", help="plan for so many, over all nodes")
    parser.add_argument("--hardware", metavar="NAME", help="as `opensora-accel plan` takes it: h100x8-ib400")
    return parser


def schema_of_config() -> dict[str, Any]:
    """The JSON schema of a configuration's file."""
    schema = TypeAdapter(TrainConfig).json_schema()
    plan = schema["properties"]["plan"]
    schema["properties"]["plan"] = {
        "anyOf": [{"$ref": "#/$defs/Plan"}, {"const": AUTO_PLAN}],
        "description": "Degrees and settings, or auto: the planner chooses them where the run starts.",
        "default": plan.get("default", {}),
    }
    return schema


def _pipeline_folder(name: str) -> Path:
    """The folder.

    Raises:
        FileNotFoundError: there is none, or no pipeline in it.
    """
    folder = Path(name)
    if any((folder / each).is_file() for each in _INDICES) or _author_of(folder):
        return folder
    if name.lower() in _OF_AUTHORS and not folder.exists():
        author = _OF_AUTHORS[name.lower()]
        raise FileNotFoundError(
            f"there is no folder {name}; {author.source} is what goes by that name: "
            f"{author.how.replace('FOLDER', name)}"
        )
    if name.lower() in _PUBLISHED and not folder.exists():
        source = _PUBLISHED[name.lower()]
        raise FileNotFoundError(
            f"there is no folder {name}; {source} is what goes by that name: `hf download {source} --local-dir {name}` "
            "brings it"
        )
    what = f"has no {' or '.join(_INDICES)}" if folder.is_dir() else "is no folder"
    raise FileNotFoundError(
        f"{name} {what}; give the local folder of a pipeline of diffusers, as `hf download ID --local-dir {name}` "
        "makes it"
    )


def _author_of(folder: Path) -> _OfAuthor | None:
    """Whose weights lie there."""
    return next((each for each in _OF_AUTHORS.values() if (folder / each.weights).is_file()), None)


def _model_in(folder: Path) -> ModelConfig:
    """The model that lies there."""
    author = _author_of(folder)
    if author is None:
        return ModelConfig(path=str(folder / "transformer"))
    class_name = f"{RECIPES[author.model].home}:{author.model}"
    return ModelConfig(class_name=class_name, path=str(folder / author.weights))


def _lines(folder: Path, data: str, rank: int, references: str) -> list[_Line]:
    """What the file says, by what lies in the folder.

    Raises:
        ValueError, FileNotFoundError: its model has no recipe, or it has no model.
    """
    indices = [folder / each for each in _INDICES if (folder / each).is_file()]
    index = read_json(indices[0], dict[str, Any]) if indices else {}
    model, author = _model_in(folder), _author_of(folder)
    recipe = configured.recipe_of(model)
    if references and recipe.references_in_rows:
        model = ModelConfig(path=str(folder / "transformer_ref"))
    published = dict(recipe.published)
    arguments = configured.all_arguments(model)
    text_folders = author.texts if author else ("text_encoder", "text_encoder_2")
    lines: list[_Line] = [
        ("output", f"runs/{folder.resolve().name}", "saved states, metrics and samples"),
        ("steps", 2000, ""),
        ("save_every", 500, ""),
    ]
    num_frames = published["data.num_frames"]
    codec = build_codec(CodecConfig(path=str(folder / "vae")), torch.device("meta"), torch.float32)
    # Whole patches of latent frames. A VAE of another family is refused later, by what it gives the model.
    patch = patches_of(arguments)[0]
    unit = codec.latent_frames.unit * patch
    with suppress(ValueError):
        while codec.latent_frames.num_latents(num_frames) % patch:
            num_frames += codec.latent_frames.unit
    sees_pictures = recipe.pictures is not None and (folder / "image_encoder").is_dir()
    ways = [each for each in recipe.frames if each.input_channels(codec) == arguments.get("in_channels")]
    takes_frames = sees_pictures or any(
        each.place == "channels" and not each.always and not each.of_control for each in ways
    )
    # Whose weights do not say it.
    name = str(index.get("_class_name"))
    takes_frames = takes_frames or bool(recipe.frames and ("I2V" in name or "VideoToWorld" in name))
    takes_frames = takes_frames or recipe.begins_with_a_frame
    lines += [
        ("data.folder", data, "videos, with metadata.jsonl or a .txt beside each"),
        (
            "data.num_frames",
            num_frames,
            f"as what is published; fewer take less memory, in steps of {unit}",
        ),
        ("data.height", published["data.height"], ""),
        ("data.width", published["data.width"], ""),
        *(
            [("data.frame_rate", published["data.frame_rate"], "the one that it knows")]
            if "data.frame_rate" in published
            else []
        ),
        *_reference_lines(recipe, references, published),
        ("data.batch_size", 1, "clips per step, over all GPUs together: a multiple of the plan's data ranks"),
        *(
            [("model.class_name", model.class_name, "imported: its repository is on PYTHONPATH")]
            if author
            else []
        ),
        ("model.path", model.path, ""),
    ]
    boundary = index.get("boundary_ratio")
    if isinstance(boundary, float) and (folder / "transformer_2").is_dir():
        lines += [
            ("model.path_2", str(folder / "transformer_2"), "the low-noise expert"),
            ("flow.boundary", boundary, "the first expert learns the times above it, the second those below"),
        ]
    lines += [
        ("codec.path", str(folder / "vae"), ""),
        *([("codec.sound_path", str(folder / "audio_vae"), "")] if recipe.makes_sound else []),
        ("text.path", str(folder / text_folders[0]), ""),
        (
            "text.length",
            arguments.get("max_text_seq_length", published["text.length"]),
            "tokens of a caption; longer ones are cut",
        ),
    ]
    if len(recipe.text) == 2:
        lines.append(("text.path_2", str(folder / text_folders[1]), ""))
    if recipe.text[0].connectors:
        lines.append(("text.path_2", str(folder / "connectors"), "what it makes of the encoder's states"))
    if takes_frames:
        lines += [
            ("conditions.t2v", 0.0, "no clip is made from its caption alone"),
            ("conditions.i2v_head", 1.0, "the first frame of each clip is given"),
        ]
        if recipe.text[0].picture:
            lines.append(("text.cache", False, "what the encoder says of a caption depends on the frame"))
        if sees_pictures:
            lines.append(("image.path", str(folder / "image_encoder"), "what an image encoder sees of it"))
    if references and recipe.text[0].picture:
        lines.append(("text.cache", False, "what the encoder says of a caption depends on the references"))
    if any(each.follows_controls for each in ways):
        lines += [
            (
                "conditions.t2v",
                1.0,
                "half of the clips from text alone, or data.controls and data.references: see docs/training.md",
            ),
            ("conditions.i2v_head", 1.0, "and half from their first frame"),
        ]
    lines += [
        (
            name,
            value,
            "as it was trained: how often which frames of a clip are given" if name.endswith("t2v") else "",
        )
        for name, value in published.items()
        if name.startswith("conditions.")
    ]
    lines += _flow_lines(folder, index, recipe, published)
    if rank:
        lines += [
            ("lora.rank", rank, "adapters; without this table all weights are trained"),
            *(
                [("lora.targets", [*published["lora.targets"]], "ends of the names of its layers")]
                if "lora.targets" in published
                else []
            ),
            ("optim.lr", 1e-4, ""),
        ]
    else:
        lines.append(("optim.lr", 1e-5, ""))
    return [*lines, ("plan.precision", "bf16", "")]


def _reference_lines(recipe: Recipe, references: str, published: Mapping[str, Any]) -> Iterator[_Line]:
    """References, where there are some."""
    if not references:
        return
    yield "data.references", references, "of a.mp4 a.png; with data.num_references 2 a.0.png and a.1.png"
    if recipe.references_in_rows:
        side = published["data.reference_side"]
        yield "data.reference_side", side, "as its pipeline has it; less takes fewer tokens"


def _flow_lines(
    folder: Path, index: Mapping[str, Any], recipe: Recipe, published: Mapping[str, Any]
) -> Iterator[_Line]:
    """Times, as the pipeline and its scheduler have them."""
    path = folder / "scheduler" / "scheduler_config.json"
    scheduler = read_json(path, dict[str, Any]) if path.is_file() else {}
    shift: Any = published.get("flow.shift")
    why = "its scheduler's" if shift is None else "as it was trained, or is sampled"
    if recipe.levels is not None:
        scale = snr_shift_scale(scheduler)
        shift = round(scale**0.5, 5) if scale != 1.0 else None
    elif shift is None:
        shift = scheduler.get("flow_shift", scheduler.get("shift"))
    if shift is not None:
        yield "flow.shift", shift if isinstance(shift, str) else float(shift), why
    if "flow.time_distribution" in published:
        yield "flow.time_distribution", published["flow.time_distribution"], ""
    if recipe.takes_forcing and "DiffusionForcing" in str(index.get("_class_name")):
        yield "flow.diffusion_forcing", "non-decreasing", "a time for each latent frame, as it was trained"
    drop = published.get("flow.caption_drop")
    if drop is not None:
        yield (
            "flow.caption_drop",
            drop,
            "as it was trained" if drop else "it is never asked without a caption",
        )
    for name, of in (("flow.guidance", "their captions"), ("flow.frame_guidance", "frames that are given")):
        if name in published:
            yield name, published[name], f"of sampled clips, by {of}"


def _check(config: TrainConfig) -> None:
    """Checks that encoders and model belong together; none of their weights is read.

    Raises:
        ValueError, FileNotFoundError: what a run of it would say.
    """
    from opensora_accel.training.planned import planned_sizes

    recipe = configured.recipe_of(config.model)
    for alone in config.experts:
        check_recipe(recipe, alone)
    codec = build_codec(config.codec, torch.device("meta"), torch.float32)
    texts = text_shapes(config.text, configured.texts_of(config))
    if not configured.brings_config(config.model):
        # Its arguments follow from what lies beside it, and whether they are those of the weights, these say.
        with deferred_init():
            model = make(
                configured.model_class(config.model), configured.model_arguments(config, codec, texts)
            )
        load_weights(model, config.model.path)
    arguments = configured.all_arguments(config.model)
    derived = (
        configured.derived_arguments(config, codec, texts) if configured.brings_config(config.model) else {}
    )
    for name, needed in derived.items():
        if not configured.is_same(arguments[name], needed):
            raise ValueError(
                f"{config.model.path} has {name} {arguments[name]}, and what lies beside it gives {needed}: they are "
                "parts of different pipelines, or of a kind that is not trained here"
            )
    planned_sizes(config)


def _plan(config: TrainConfig, num_gpus: int, hardware: str) -> Plan:
    """The planner's, whose data ranks have a clip each.

    Raises:
        ValueError: no plan fits, or there are two experts, of which it would count one.
    """
    from opensora_accel.planner import choose
    from opensora_accel.training.planned import job_of

    return choose(dataclasses.replace(job_of(config), global_batch=None), num_gpus, hardware)


def _nested(lines: Sequence[_Line]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value, _ in lines:
        *tables, key = name.split(".")
        place = values
        for table in tables:
            place = place.setdefault(table, {})
        place[key] = value
    return values


def _text(
    folder: Path, lines: Sequence[_Line], plan: Plan | None, given: argparse.Namespace, schema: str
) -> str:
    """The file as TOML, a table after the other."""
    made = [
        f"#:schema ./{schema}",
        f"# Trains {folder.resolve().name}. Every option: opensora-accel train --help",
        *_table(lines, ""),
    ]
    names = [name for name, _, _ in lines]
    uncounted = "the planner counts one model" if "flow.boundary" in names else ""
    if "model.class_name" in names:
        uncounted = "the planner knows no kernels of its author"
    if plan is None and not uncounted:
        made.append('plan = "auto"         # chosen for the GPUs that the run finds, where it starts')
    tables = dict.fromkeys(name.partition(".")[0] for name, _, _ in lines if "." in name)
    tables.pop("plan", None)
    for table in tables:
        made += ["", f"[{table}]", *_table(lines, table)]
    if plan is None and uncounted:
        made += [
            "",
            f"[plan]                # {uncounted}; degrees for your GPUs, as ulysses = 8",
            'precision = "bf16"',
        ]
    if plan is not None:
        made += ["", f"[plan]                # for {given.gpus} × {given.hardware}, by `opensora-accel plan`"]
        usual = Plan()
        made += [
            f"{each.name} = {json.dumps(getattr(plan, each.name))}"
            for each in dataclasses.fields(plan)
            if getattr(plan, each.name) != getattr(usual, each.name)
        ]
    return "\n".join(made) + "\n"


def _table(lines: Sequence[_Line], table: str) -> Iterator[str]:
    for name, value, note in lines:
        own, _, key = name.rpartition(".")
        if own == table:
            # Numbers, texts and lists are written as JSON has them.
            line = f"{key} = {json.dumps(value, ensure_ascii=False)}"
            yield f"{line:<22}# {note}" if note else line
