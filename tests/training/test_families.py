"""Every family that has a recipe: adapters that its own pipeline loads, and runs that go on bit by bit."""

import dataclasses
import inspect
import json
import math

import av
import diffusers
import peft
import pytest
import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from opensora_accel import Plan
from opensora_accel.training import configured
from opensora_accel.training.codec import SpaceToDepth
from opensora_accel.training.recipes import RECIPES
from opensora_accel.training.sections import LoraConfig
from opensora_accel.training.text_encoders import text_shapes
from opensora_accel.training.tiny_run import write_clips
from tests.test_cli import TORCHRUN, launched
from tests.tiers import PROVE, some
from tests.training.runs import assert_one_run, tiny_config
from tests.training.test_loop import curve
from tests.training.vaes import wan_vae

CAPTION = "a gradient of colour number 0"
# A class of each, and what else is published of it; Wan's own is in all other tests.
FAMILIES = {
    f"{name}, {each.pipeline}, {number}" if number else name: each
    for name, recipe in RECIPES.items()
    if name == recipe.models[0] and name != "WanTransformer3DModel" and not recipe.home
    for number, each in enumerate((recipe, *recipe.variants))
}
# Whose weights are others where frames are given, and take them apart from the noisy clip.
FROM_FRAMES = "EasyAnimateTransformer3DModel, from frames"
FAMILIES[FROM_FRAMES] = RECIPES["EasyAnimateTransformer3DModel"]


def config_of(name, clips, output, plan=None, **changes):
    recipe = FAMILIES.get(name) or RECIPES[name]
    model = {"class_name": recipe.models[0], "config": dict(recipe.tiny)}
    changes = {"model": model, "steps": 4, **changes}
    if recipe.begins_with_a_frame:
        changes = {"conditions": {"t2v": 0.0, "i2v_head": 1.0}, "text.cache": False, **changes}
    if name == FROM_FRAMES:
        changes = {"conditions": {"t2v": 0.0, "i2v_head": 1.0, "i2v_loop": 1.0}, **changes}
    if recipe.takes_forcing:
        changes = {"flow.diffusion_forcing": "non-decreasing", **changes}
    return tiny_config(clips, output, plan, **changes)


def whole(tensor):
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach().clone()


def trained(config, saved=None):
    """Losses and weights, from the beginning or from where a run was saved."""
    from opensora_accel.training.loop import Trainer
    from opensora_accel.training.saved_state import read_record

    trainer = Trainer(config, saved, read_record(saved) if saved else None)
    losses = trainer.train()
    return losses, {name: whole(p) for name, p in trainer.state.model.named_parameters()}


@PROVE
@pytest.mark.parametrize("name", some(FAMILIES, "CogVideoXTransformer3DModel"))
def test_a_run_goes_on_bit_by_bit(ranks, clips, tmp_path, name):
    plan = Plan(ulysses=2, sharding="zero2", checkpoint="full")
    config = config_of(name, clips, tmp_path / "run", plan, save_every=2)
    losses, weights = ranks(2, trained, config)[0]
    again, found = ranks(2, trained, config, tmp_path / "run" / "checkpoints" / "step_000002")[0]
    assert again == losses[2:] and len(again) == 2
    assert all(torch.equal(found[key], weights[key]) for key in weights)


@PROVE
@pytest.mark.parametrize("name", FAMILIES)
def test_a_run_is_one_on_any_mesh(ranks, clips, tmp_path, name):
    """Losses, norms and gradients of two and of three ranks, which share a clip unevenly, are those of one."""
    one, *others = [
        ranks(plan.world_size, curve, config_of(name, clips, tmp_path / str(plan.world_size), plan), 2)[0]
        for plan in (Plan(precision="fp64", **degrees) for degrees in ({}, {"ulysses": 2}, {"ring": 3}))
    ]
    for other in others:
        assert_one_run(one, other)


def load_by_peft(model, file):
    """Into a class that knows of no adapters, as docs/training.md says it."""
    with safe_open(file, framework="pt") as opened:
        settings = json.loads(opened.metadata()["lora_adapter_metadata"])
        tensors = {name.removeprefix("transformer."): opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    settings = {name.removeprefix("transformer."): value for name, value in settings.items()}
    peft.inject_adapter_in_model(peft.LoraConfig(**settings), model)
    peft.set_peft_model_state_dict(model, tensors)


def adapted(config):
    """Velocities of the run's model, of a model that its pipeline has loaded the adapter into, and without it."""
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config)
    trainer.train()
    objective, (bucket,) = trainer.objective, config.data.sizes
    shapes, of_sound = [objective.encoders.latent_shapes[bucket]], objective.encoders.sound_latents(bucket)
    shapes += [of_sound] if of_sound else []
    rng = torch.Generator().manual_seed(1)
    noise = [torch.randn(1, *shape, generator=rng) for shape in shapes]
    timestep = torch.tensor([500.0])
    if config.flow.is_forced:
        timestep = torch.linspace(200, 900, shapes[0][1])[None]

    @torch.no_grad()
    def velocity():
        velocities = objective.predict(noise, timestep, bucket, [CAPTION])
        return torch.cat([each.flatten() for each in velocities])

    with trainer.state.ema.applied():
        of_run = velocity()
    recipe, cls = configured.recipe_of(config.model), configured.model_class(config.model)
    model = objective.model = objective.forward = cls.from_pretrained(config.model.path)
    without = velocity()
    pipeline_class = getattr(diffusers, recipe.pipeline)
    parts = [name for name in inspect.signature(pipeline_class.__init__).parameters if name != "self"]
    if issubclass(pipeline_class, diffusers.ModularPipeline):
        pipeline = diffusers.MiniMaxH3Blocks().init_pipeline()
        pipeline.update_components(transformer=model)
        pipeline.load_lora_weights(f"{config.output}/lora")
    elif hasattr(pipeline_class, "load_lora_weights"):
        given = {"transformer": model}
        if "safety_checker" in parts:
            # Cosmos's is not made without one, nor without the statistics of a VAE.
            given |= {"safety_checker": torch.nn.Identity(), "vae": wan_vae()}
        pipeline = pipeline_class(**dict.fromkeys(parts) | given)
        pipeline.load_lora_weights(f"{config.output}/lora")
    elif hasattr(model, "load_lora_adapter"):
        model.load_lora_adapter(
            f"{config.output}/lora", prefix="transformer", weight_name="pytorch_lora_weights.safetensors"
        )
    else:
        load_by_peft(model, f"{config.output}/lora/pytorch_lora_weights.safetensors")
    return of_run, velocity(), without


@pytest.mark.parametrize("name", some(FAMILIES, "CogVideoXTransformer3DModel"))
def test_a_pipeline_loads_the_adapter_and_answers_as_the_run(ranks, clips, tmp_path, name):
    fresh = config_of(name, clips, tmp_path / "run")
    torch.manual_seed(0)
    cls, texts = configured.model_class(fresh.model), text_shapes(fresh.text, FAMILIES[name].text)
    base = cls(**configured.model_arguments(fresh, SpaceToDepth(4, torch.float32), texts))
    for parameter in base.parameters():
        # Some begin at zero, and would hide an adapter behind them.
        torch.nn.init.normal_(parameter, std=0.1)
    base.save_pretrained(tmp_path / "base")
    options = {
        "lora.rank": 2,
        "lora.targets": FAMILIES[name].published.get("lora.targets", LoraConfig().targets),
    }
    options |= {"optim.lr": 0.1, "optim.warmup_steps": 0, "optim.ema_decay": 0.5}
    config = config_of(name, clips, tmp_path / "run", model={"path": str(tmp_path / "base")}, **options)
    of_run, loaded, without = ranks(1, adapted, config)[0]
    error, effect = (loaded - of_run).abs().max(), (of_run - without).abs().max()
    assert effect > 1e-3 and error < 1e-3 * effect


@PROVE
@pytest.mark.parametrize("name", ["WanTransformer3DModel", *FAMILIES])
def test_twenty_steps_from_the_command_line_on_two_ranks(tmp_path, name):
    """Of clips of two lengths; what is sampled has sound where the model makes some."""
    # Latte takes clips of one length, and pictures, whose one frame two ranks do not share.
    is_latte = name.startswith("Latte")
    (num_frames, *lengths), axis = ((5, 5, 1), "dp-replicate") if is_latte else ((12, 9, 5), "ulysses")
    clips = write_clips(tmp_path / "clips", num_frames=num_frames, with_sound=True, of_sizes=True)
    data = {"folder": str(clips), "buckets": [f"{length}x24x40" for length in lengths], "batch_size": 2}
    options = {"data": data, "steps": 20, "num_samples": 1, "flow.sample_steps": 2}
    config, file = config_of(name, clips, tmp_path / "run", **options), tmp_path / "run.json"
    file.write_text(json.dumps(dataclasses.asdict(config)))
    done, losses = launched(TORCHRUN, file, tmp_path / "run", f"--plan.{axis}", "2")
    assert done.returncode == 0, done.stderr
    assert len(losses) == 20 and all(math.isfinite(loss) for loss in losses)
    rows = [json.loads(row) for row in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(sum(row.get(f"clips/{size}", 0) for row in rows) for size in data["buckets"])
    (sample,) = (tmp_path / "run" / "samples").glob("*/*.mp4")
    with av.open(str(sample)) as container:
        assert len(container.streams.audio) == (configured.recipe_of(config.model).sound is not None)
        assert sum(1 for _ in container.decode(video=0)) in lengths
