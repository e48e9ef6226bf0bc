"""Open-Sora's own models, whose classes are imported: samples and losses are those of its scripts."""

import copy
import dataclasses
import json
import sys
from types import SimpleNamespace

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from opensora_accel import Plan
from opensora_accel.training import configured, new_command
from opensora_accel.training.classes import arguments_of, import_class, make, parameters_of
from opensora_accel.training.clips import Batch, Clip
from opensora_accel.training.codec import SpaceToDepth
from opensora_accel.training.conditions import KINDS, Given
from opensora_accel.training.config import load_config
from opensora_accel.training.flow import draw_noise, draw_times, drop_captions
from opensora_accel.training.loop import Trainer
from opensora_accel.training.recipes import RECIPES
from opensora_accel.training.samples import sample_latents
from opensora_accel.training.text_encoders import text_shapes
from opensora_accel.training.tiny_run import tiny_config as tiny_proof
from opensora_accel.training.tiny_run import write_clips
from opensora_accel.verify.pool import RankError
from opensora_accel.weights import find_stored
from tests.opensora_models.mmdit import MMDiTConfig, MMDiTModel
from tests.opensora_models.randomize import randomize
from tests.test_cli import TORCHRUN, launched
from tests.tiers import PROVE, each_once, some
from tests.training import open_sora
from tests.training.open_sora import CLASSES, MMDIT, setting
from tests.training.pipelines import CAPTIONS, CPU, without_rounding
from tests.training.runs import assert_one_run, tiny_config
from tests.training.test_families import trained
from tests.training.test_loop import curve

OF_SAMPLES = ("t2v", "i2v_head", "i2v_tail", "i2v_loop", "v2v_head", "v2v_tail")


@pytest.fixture(autouse=True)
def short_ends(monkeypatch):
    """Clips go on from five frames, in place of 33."""
    monkeypatch.setitem(KINDS, "v2v_head", Given(5, 0))
    monkeypatch.setitem(KINDS, "v2v_tail", Given(0, 5))


def frames_of(made, count):
    size = count, made.bucket.num_frames, made.bucket.height, made.bucket.width, 3
    return torch.randint(256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("kind", OF_SAMPLES)
def test_a_sample_is_the_authors(kind):
    made = setting()
    frames, clips = frames_of(made, 2), [Clip("", number, made.bucket) for number in range(2)]
    noise = torch.randn(2, *made.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with without_rounding():
        condition, _ = made.objective.encoders.encode_condition([kind] * 2, frames, noise, clips, [0, 1])
        (found,) = sample_latents(made.objective, [noise], CAPTIONS, made.bucket, condition)
        (without,) = sample_latents(made.objective, [noise], CAPTIONS, made.bucket)
        told = open_sora.condition_of(made, frames, [kind] * 2, 5)
        expected = open_sora.sampled(made, noise, CAPTIONS, told)
    assert (found - noise).abs().max() > 0.1, "the model does something"
    assert ((found - without).abs().max() > 1e-3) == (kind != "t2v"), "the frames count"
    assert (found - expected).abs().max() < 1e-10
    # Frames that guide by 1 need no third answer.
    made = setting(flow={"frame_guidance": 1.0})
    calls = []
    made.model.register_forward_pre_hook(lambda *_: calls.append(1))
    with without_rounding():
        (found,) = sample_latents(made.objective, [noise], CAPTIONS, made.bucket, condition)
        assert len(calls) == 2 * open_sora.STEPS
        expected = open_sora.sampled(made, noise, CAPTIONS, told, of_frames=1.0)
    assert (found - expected).abs().max() < 1e-10


@pytest.mark.parametrize("guidance_embed", [False, True])
def test_the_loss_is_the_authors(guidance_embed):
    """Of clips of which other frames are given, and captions that T5 or CLIP is not shown."""
    config = {**setting().objective.config.model.config, "guidance_embed": guidance_embed}
    kinds = dict.fromkeys(OF_SAMPLES, 1.0)
    made = setting(model={"config": config}, conditions=kinds, flow={"caption_drop": 0.4})
    objective, positions = made.objective, range(8)
    frames, captions = frames_of(made, 8), [CAPTIONS[number % 2] for number in positions]
    clips = [Clip("", number, made.bucket) for number in positions]
    drawn = objective.encoders._draw_conditions(made.bucket, positions)
    assert set(drawn) >= {"t2v", "i2v_loop", "v2v_tail"} and len(set(drawn)) >= 5
    with without_rounding():
        # Numbers are drawn in fp64 here.
        drop = [
            drop_captions(captions, 0.4, 0, positions, purpose=each) for each in ("caption", "second caption")
        ]
        assert len({(bool(t5), bool(clip)) for t5, clip in zip(*drop, strict=True)}) == 4
        batch = objective.encoders.encode(Batch(frames, captions, [*positions], [""] * 8, clips, [None] * 8))
        found = objective.loss(batch)
        clean = open_sora.encoded(made.vae, frames)
        condition = open_sora.condition_of(made, frames, drawn, 5)
        times = draw_times(objective.config.flow, open_sora.shift_of(made), 0, positions)
        expected = open_sora.loss_of(made, clean, draw_noise(clean, 0, positions), times, *drop, condition)
        # Looked at in a validation: all at one time, with their captions.
        at = objective.loss_at(batch, 0.3)
        times = torch.full((8,), 0.3, dtype=torch.float64)
        noise = draw_noise(clean, 0, positions)
        expected_at = open_sora.loss_of(made, clean, noise, times, captions, captions, condition)
    assert abs(found - expected) < 1e-10 and abs(at - expected_at) < 1e-10


def test_text_is_the_authors():
    made = setting()
    captions = [*CAPTIONS, "", " ".join(CAPTIONS * 9)]
    expected = open_sora.states_of(made.objective.texts, captions)
    found = [text.encode(captions, CPU, torch.float64) for text in made.objective.texts]
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1].squeeze(1), expected[1])
    assert not torch.equal(found[0][0], found[0][2]) and not torch.equal(found[1][0], found[1][2])


OF_1_2 = {"name": "STDiT3", "flow": {"shift": "open-sora-1.2", "caption_drop": 0.4}}


@pytest.mark.parametrize("kind", [*OF_SAMPLES, "an image"])
def test_a_sample_of_1_2_is_the_authors(kind):
    made = setting((1 if kind == "an image" else 7, 32, 48), **OF_1_2)
    frames, clips = frames_of(made, 2), [Clip("", number, made.bucket) for number in range(2)]
    noise = torch.randn(2, *made.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    condition, x_mask, given = None, None, None
    with without_rounding():
        if kind not in ("t2v", "an image"):
            condition, _ = made.objective.encoders.encode_condition([kind] * 2, frames, noise, clips, [0, 1])
            x_mask = torch.ones(2, made.shape[1], dtype=torch.bool)
            count = 5 if kind.startswith("v2v") else 1
            x_mask[:, :count] &= kind.endswith("tail")
            x_mask[:, -count:] &= kind.endswith("head")
            # Of a VAE of pictures each frame has its own latents.
            given = torch.stack([open_sora.encoded(made.vae, frames[:, t]) for t in range(7)], dim=2)
        (found,) = sample_latents(made.objective, [noise], CAPTIONS, made.bucket, condition)
        expected = open_sora.sampled_1_2(made, noise, CAPTIONS, x_mask, given)
        (other,) = sample_latents(made.objective, [noise], CAPTIONS[::-1], made.bucket, condition)
    assert (found - noise).abs().max() > 0.1 and (found - other).abs().max() > 1e-6
    assert (found - expected).abs().max() < 1e-10


def test_the_loss_of_1_2_is_the_authors():
    made = setting((7, 32, 48), conditions=dict.fromkeys(OF_SAMPLES, 1.0), **OF_1_2)
    objective, positions = made.objective, range(8)
    frames, captions = frames_of(made, 8), [CAPTIONS[number % 2] for number in positions]
    clips = [Clip("", number, made.bucket) for number in positions]
    with without_rounding():
        batch = objective.encoders.encode(Batch(frames, captions, [*positions], [""] * 8, clips, [None] * 8))
        found = objective.loss(batch)
        dropped = torch.tensor([not each for each in drop_captions(captions, 0.4, 0, positions)])
        alpha = (32 * 48 / 512**2 * 7) ** 0.5
        times, noise = (
            draw_times(objective.config.flow, alpha, 0, positions),
            draw_noise(batch.clean, 0, positions),
        )
        x_mask = ~batch.condition.given
        expected = open_sora.loss_of_1_2(made, batch.clean, noise, times, captions, dropped, x_mask)
    assert 0 < dropped.sum() < 8 and len({*map(tuple, x_mask.tolist())}) >= 4
    assert abs(found - expected) < 1e-10


KINDS_OF_RUNS = {"conditions.i2v_head": 2, "conditions.i2v_tail": 1, "conditions.i2v_loop": 1}


NAMES = ["MMDiTModel", "STDiT3"]


def run_config(clips, output, plan=None, name="MMDiTModel", **changes):
    """A tiny run, of clips of five frames of which frames are given."""
    model = {"class_name": CLASSES[name], "config": dict(RECIPES[name].tiny)}
    return tiny_config(clips, output, plan, **{"model": model, "steps": 4, **KINDS_OF_RUNS, **changes})


def test_a_proof_takes_frames_in_an_argument_of_their_own(tmp_path):
    """So the channels of its input are those of the noisy clip, in patches of 2 × 2."""
    small = tiny_proof(run_config(tmp_path, tmp_path), tmp_path)
    assert small.conditions.are_used
    texts = text_shapes(small.text, configured.texts_of(small))
    arguments = configured.model_arguments(small, SpaceToDepth(4, torch.float32), texts)
    assert arguments["in_channels"] == 48 * 2 * 2


def author(arguments, name):
    """The author's class, made as the author makes it."""
    cls = import_class(CLASSES[name])
    return cls(cls.config_class(**arguments))


@PROVE
@pytest.mark.parametrize(
    ("name", "degrees"),
    each_once(NAMES, [{"ulysses": 3}, {"ring": 2}, {"dp_shard": 2, "sharding": "zero3"}]),
    ids=str,
)
def test_a_run_is_one_on_any_mesh(ranks, clips, tmp_path, name, degrees):
    found = []
    for number, plan in enumerate((Plan(precision="fp64"), Plan(precision="fp64", **degrees))):
        config = run_config(clips, tmp_path / str(number), plan, name, **{"flow.caption_drop": 0.5})
        found.append(ranks(plan.world_size, curve, config, 3)[0])
    assert_one_run(*found)


@PROVE
@pytest.mark.parametrize("name", some(NAMES, *NAMES))
def test_a_run_goes_on_bit_by_bit_and_its_weights_are_the_authors(ranks, clips, tmp_path, name):
    plan = Plan(ulysses=2, sharding="zero2", checkpoint="full")
    config = run_config(clips, tmp_path / "run", plan, name, save_every=2)
    losses, weights = ranks(2, trained, config)[0]
    states = tmp_path / "run" / "checkpoints"
    again, found = ranks(2, trained, config, states / "step_000002")[0]
    assert again == losses[2:] and len(again) == 2
    assert all(torch.equal(found[key], weights[key]) for key in weights)
    # By their names in the author's class, in whatever files.
    stored = find_stored(states / "step_000004" / "transformer")
    arguments = json.loads((states / "step_000004" / "transformer" / "config.json").read_text())
    assert arguments.pop("_class_name") == name
    assert stored.keys() == author(arguments, name).state_dict().keys() >= weights.keys()
    assert all(torch.equal(stored[key].read(torch.float32), weights[key]) for key in weights)
    # A new run begins with them: the folder has its config.json, and one file alone has none.
    save_file(
        {name: each.read(torch.float32) for name, each in stored.items()}, tmp_path / "weights.safetensors"
    )
    paths = [states / "step_000004" / "transformer", tmp_path / "weights.safetensors"]
    curves = []
    for path in paths:
        model = {"class_name": CLASSES[name], "path": str(path)}
        if path.is_file():
            model["config"] = dict(RECIPES[name].tiny)
        curves.append(ranks(1, losses_of, run_config(clips, tmp_path / "new", model=model))[0])
    assert curves[0] == curves[1] and abs(curves[0][0] - losses[-1]) < 0.5


def adapted(config):
    """What a run answers, what the author's class does with its adapter as PEFT loads it, and without."""
    trainer = Trainer(config)
    trainer.train()
    objective, (bucket,) = trainer.objective, config.data.sizes
    noise = torch.randn(
        1, *objective.encoders.latent_shapes[bucket], generator=torch.Generator().manual_seed(1)
    )

    @torch.no_grad()
    def velocity():
        return objective.predict([noise], torch.tensor([500.0]), bucket, ["a gradient of colour number 0"])[0]

    with trainer.state.ema.applied():
        of_run = velocity()
    base = author(arguments_of(trainer.state.model), objective.recipe.models[0])
    base.load_state_dict(load_file(config.model.path))
    objective.model = objective.forward = base
    without = velocity()
    loaded = peft.PeftModel.from_pretrained(base, f"{config.output}/lora")
    objective.model, objective.forward = base, loaded
    return of_run, velocity(), without


@pytest.mark.parametrize("name", some(NAMES, *NAMES))
def test_an_adapter_is_loaded_by_peft_and_by_another_run(ranks, clips, tmp_path, name):
    config, recipe = run_config(clips, tmp_path / "run", name=name), RECIPES[name]
    texts = text_shapes(config.text, recipe.text)
    arguments = configured.model_arguments(config, SpaceToDepth(4, torch.float32), texts)
    base = randomize(author(arguments, name))
    save_file(base.state_dict(), tmp_path / "base.safetensors")
    path = str(tmp_path / "base.safetensors")
    model = {"class_name": CLASSES[name], "path": path, "config": config.model.config}
    options = {"optim.lr": 0.1, "optim.warmup_steps": 0, "optim.ema_decay": 0.5, "model": model}
    of_adapter = {"lora.rank": 2, "lora.targets": recipe.published["lora.targets"]}
    config = run_config(clips, tmp_path / "run", **options, **of_adapter)
    of_run, loaded, without = ranks(1, adapted, config)[0]
    error, effect = (loaded - of_run).abs().max(), (of_run - without).abs().max()
    assert effect > 1e-3 and error < 1e-3 * effect
    # Another run goes on from it.
    going_on = run_config(clips, tmp_path / "on", **options, **{"lora.path": str(tmp_path / "run" / "lora")})
    first, then = (ranks(1, losses_of, each)[0] for each in (config, going_on))
    assert then[0] < first[0]


def losses_of(config):
    trainer = Trainer(config)
    return [trainer.step()["loss"] for _ in range(2)]


class Described(transformers.PreTrainedConfig):
    """As STDiT3Config is."""

    model_type = "described"

    def __init__(self, width=2, sizes=(1, 2), **more):
        self.width, self.sizes = width, sizes
        super().__init__(**more)


class DescribedModel(transformers.PreTrainedModel):
    config_class = Described

    def __init__(self, config):
        super().__init__(config)
        self.layer = torch.nn.Linear(config.width, config.width)


def test_a_class_of_transformers_says_what_it_was_made_with():
    assert [*parameters_of(DescribedModel)] == ["width", "sizes"]
    model = make(DescribedModel, {"width": 3})
    assert model.layer.in_features == 3 and arguments_of(model) == {"width": 3, "sizes": (1, 2)}


def test_captions_are_left_out_by_the_run_whatever_lies_beside_weights(clips, tmp_path):
    """As published: the model itself would leave a tenth out, other ones on each rank."""
    published = {**RECIPES["STDiT3"].tiny, "class_dropout_prob": 0.1, "caption_channels": 32}
    (tmp_path / "config.json").write_text(json.dumps({**published, "model_type": "STDiT3"}))
    model = {"class_name": CLASSES["STDiT3"], "path": str(tmp_path)}
    config = run_config(clips, tmp_path / "run", model=model)
    texts = text_shapes(config.text, RECIPES["STDiT3"].text)
    arguments = configured.model_arguments(config, SpaceToDepth(4, torch.float32), texts)
    assert arguments == {**published, "class_dropout_prob": 0.0, "enable_sequence_parallelism": False}


WRONG = [
    (
        {"model.class_name": "opensora.nowhere:MMDiTModel"},
        r"cannot be imported \(ModuleNotFoundError: .*PYTHONPATH",
    ),
    (
        {"model.class_name": "tests.opensora_models.mmdit.build:MMDiTModels"},
        "'MMDiTModels' cannot be trained here",
    ),
    (
        {"model.class_name": "tests.opensora_models.stdit3:STDiT3Block"},
        "'STDiT3Block' cannot be trained here",
    ),
    ({"model.class_name": "MMDiTModel"}, r"as opensora\.models\.mmdit\.model:MMDiTModel, with the folder"),
    (
        {"model.class_name": "diffusers:WanTransformer3DModel"},
        "is taken from diffusers; set model.class_name to",
    ),
    (
        {"model.class_name": "tests.training.open_sora:MMDiTModel"},
        r"is no class of a model that takes a conf",
    ),
    ({"model.config": {"depths": 1}}, r"MMDiTModel has no argument 'depths'; did you mean 'depth'\?"),
    ({"model.config": {"depth": "one"}}, r"model\.config\.depth must be a valid integer"),
    (
        {"model.config": {"from_pretrained": "weights"}},
        r"from_pretrained is weights, .* \(weights are those of model\.path\)",
    ),
    ({"model.config": {"axes_dim": [4, 4, 6]}}, r"MMDiTModel cannot be made with this model\.config"),
    (
        {"model.config": {"cond_embed": False}},
        "MMDiTModel takes no frames that are given; leave all of conditions",
    ),
    ({"model.path": "nowhere.safetensors"}, r"there is no nowhere\.safetensors; give the folder"),
    (
        {"model.class_name": "tests.opensora_models.stdit3.v13:STDiT3", "model.config": None},
        "that of Open-Sora 1.3",
    ),
    (
        {"flow.frame_guidance": 3.0, **dict.fromkeys(KINDS_OF_RUNS, 0)},
        r"flow\.frame_guidance is for samples that",
    ),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_what_cannot_be_trained_is_refused(ranks, clips, tmp_path, changes, message):
    model = {"class_name": MMDIT, "config": dict(RECIPES["MMDiTModel"].tiny)}
    others = {}
    for name, value in changes.items():
        table, _, key = name.partition(".")
        if table != "model":
            others[name] = value
        else:
            # None leaves all out.
            model[key] = value or {}
            if key == "config" and value:
                model[key] = {**RECIPES["MMDiTModel"].tiny, **value}
    with pytest.raises((RankError, ValueError), match=message):
        ranks(1, losses_of, run_config(clips, tmp_path / "run", model=model, **others))


def test_weights_that_do_not_fit_are_refused(ranks, clips, tmp_path):
    config = run_config(clips, tmp_path / "run")
    texts = text_shapes(config.text, RECIPES["MMDiTModel"].text)
    arguments = configured.model_arguments(config, SpaceToDepth(4, torch.float32), texts)
    state = MMDiTModel(MMDiTConfig(**arguments)).state_dict()
    (tmp_path / "weights").mkdir()
    file = tmp_path / "weights" / "Open_Sora_v2.safetensors"
    del state["img_in.bias"]
    save_file(state, file)
    model = {"class_name": MMDIT, "path": str(file), "config": dict(config.model.config)}
    with pytest.raises(
        RankError, match=r"are not those of this MMDiTModel: missing \['img_in\.bias'\], unknown \[\]"
    ):
        ranks(1, losses_of, run_config(clips, tmp_path / "run", model=model))
    save_file({**state, "img_in.bias": torch.zeros(7)}, file)
    with pytest.raises(
        RankError, match=r"img_in\.bias is \[7\] in .* and \[36\] in this MMDiTModel; build the"
    ):
        ranks(1, losses_of, run_config(clips, tmp_path / "run", model=model))
    (tmp_path / "weights" / "config.json").write_text(json.dumps(arguments))
    model["path"] = str(file.parent)
    with pytest.raises(
        RankError, match=r"weights has a config\.json; leave model\.config out, or give the file"
    ):
        ranks(1, losses_of, run_config(clips, tmp_path / "run", model=model))


@pytest.fixture
def published(tmp_path, monkeypatch):
    """A folder as `hf download` makes it, of tiny parts, and a repository whose class is the stand-in."""
    recipe, folder = RECIPES["MMDiTModel"], tmp_path / "open-sora-v2"
    tiny = {**recipe.fresh, **recipe.tiny}
    monkeypatch.setitem(RECIPES, "MMDiTModel", dataclasses.replace(recipe, fresh=tiny))
    monkeypatch.setitem(sys.modules, recipe.home, SimpleNamespace(MMDiTModel=MMDiTModel))
    made = setting()
    made.vae.float().save_pretrained(folder / "vae")
    for text, name in zip(
        made.objective.texts, ("google/t5-v1_1-xxl", "openai/clip-vit-large-patch14"), strict=True
    ):
        copy.deepcopy(text.model).float().save_pretrained(folder / name)
        text.tokenizer.save_pretrained(folder / name)
    arguments = {**arguments_of(made.model), **tiny}
    save_file(
        randomize(MMDiTModel(MMDiTConfig(**arguments))).state_dict(), folder / "Open_Sora_v2.safetensors"
    )
    return folder


@PROVE
def test_new_writes_what_open_sora_was_trained_with(ranks, tmp_path, published):
    output = tmp_path / "train.toml"
    assert new_command.main([str(published), "--output", str(output)]) == 0
    config, text = load_config(output), output.read_text()
    assert config.model.class_name == "opensora.models.mmdit.model:MMDiTModel"
    assert config.model.path == str(published / "Open_Sora_v2.safetensors") and not config.model.config
    assert (config.data.num_frames, config.data.height, config.data.width) == (129, 576, 1024)
    given = config.conditions
    assert (given.t2v, given.i2v_head, given.i2v_loop, given.i2v_tail) == (1, 5, 1, 1)
    flow = config.flow
    assert (flow.shift, flow.caption_drop, flow.guidance, flow.frame_guidance) == (
        "auto",
        0.31622777,
        7.5,
        3.0,
    )
    assert config.text.length == 512 and config.text.path_2.endswith("openai/clip-vit-large-patch14")
    assert "repository is on PYTHONPATH" in text and "\n[plan]" in text and 'plan = "auto"' not in text
    with pytest.raises(ValueError, match="ask the planner, which follows a model without a GPU"):
        more = ["--gpus", "8", "--hardware", "h100x8"]
        new_command.main([str(published), "--output", str(tmp_path / "planned.toml"), *more])
    # What was written trains: here with the class where it lies, in clips of five frames.
    tiny, folder = dict(RECIPES["MMDiTModel"].fresh), write_clips(tmp_path / "clips")
    lines = [json.dumps({"file": f"{n}.mp4", "caption": CAPTIONS[n % 2]}) for n in range(5)]
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    config = dataclasses.replace(
        config,
        steps=2,
        output=str(tmp_path / "run"),
        num_samples=1,
        data=dataclasses.replace(config.data, folder=str(folder), num_frames=5, height=32, width=48),
        model=dataclasses.replace(config.model, class_name=MMDIT, config=tiny),
        flow=dataclasses.replace(flow, sample_steps=2),
    )
    (losses,) = ranks(1, all_losses, config)
    assert len(losses) == 2 and all(0 < loss < 10 for loss in losses)
    # Weights of other sizes than what lies beside them gives.
    state = load_file(config.model.path)
    save_file({**state, "txt_in.weight": torch.zeros(36, 7)}, config.model.path)
    with pytest.raises(
        ValueError, match=r"txt_in\.weight is \[36, 7\] in .* and \[36, 32\] in this MMDiTModel"
    ):
        new_command.main([str(published), "--output", str(tmp_path / "other.toml")])


def test_new_says_how_open_sora_comes_to_be_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = r"hpcai-tech/Open-Sora-v2 --local-dir open-sora-v2` brings it, and its VAE `hf download hunyuanvideo-comm"
    with pytest.raises(FileNotFoundError, match=told):
        new_command.main(["open-sora-v2"])
    (tmp_path / "open-sora-v2").mkdir()
    save_file({"a": torch.zeros(1)}, tmp_path / "open-sora-v2" / "Open_Sora_v2.safetensors")
    with pytest.raises(ValueError, match=r"'opensora\.models\.mmdit\.model:MMDiTModel' cannot be imported"):
        new_command.main(["open-sora-v2"])


def all_losses(config):
    return Trainer(config).train()


@PROVE
def test_a_run_from_the_command_line_on_two_ranks(ranks, clips, tmp_path):
    """With samples that frames guide; the losses are those of one rank."""
    options = {"steps": 2, "num_samples": 1, "flow.frame_guidance": 3.0, "flow.sample_steps": 2}
    config = run_config(clips, tmp_path / "one", **options)
    (losses,) = ranks(1, all_losses, config)
    file = tmp_path / "run.json"
    file.write_text(json.dumps(dataclasses.asdict(config)))
    done, found = launched(TORCHRUN, file, tmp_path / "two", "--plan.ulysses", "2")
    assert done.returncode == 0 and "MMDiTModel" in done.stdout, done.stderr
    assert found == pytest.approx(losses, rel=1e-4)
    assert (tmp_path / "two" / "samples" / "step_000002" / "strip.png").is_file()
