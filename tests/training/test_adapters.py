"""LoRA in the trainer: adapters alone are trained and saved, and what is exported gives the samples of the run."""

import dataclasses
import functools
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from opensora_accel import Plan
from opensora_accel.training.adapters import add_adapters, read_adapter, saved_weights
from opensora_accel.training.flow import drop_captions
from opensora_accel.training.sections import LoraConfig
from tests.tiers import PROVE, some
from tests.training.runs import TINY_WAN, lora_config, losses, save_tiny_wan, tiny_config


@pytest.fixture
def base(tmp_path):
    return save_tiny_wan(tmp_path / "base")


def whole(tensor):
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach().clone()


def predicted(model):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(1, 48, 5, 6, 10, generator=generator), torch.randn(1, 8, 32, generator=generator)
    with torch.no_grad():
        return model(inputs[0], torch.tensor([300.0]), inputs[1], return_dict=False)[0]


def trained(config, saved=None, until=None):
    """Losses; weights that moved and that did not; the averaged model's prediction; where it was saved."""
    from opensora_accel.training.loop import Trainer
    from opensora_accel.training.saved_state import read_record

    trainer = Trainer(config, saved, read_record(saved) if saved else None)
    state = trainer.state
    before = {name: whole(p) for name, p in state.model.named_parameters()}
    losses = [trainer.step()["loss"] for _ in range((until or config.steps) - state.step)]
    moved = {name for name, p in state.model.named_parameters() if not torch.equal(whole(p), before[name])}
    with state.ema.applied():
        prediction = predicted(state.model)
    after = {name: whole(tensor) for name, tensor in saved_weights(state.model).items()}
    folder = trainer.save()
    trainer.saver.wait()
    trainer.train()  # the rest, if there is one, and the export
    return losses, moved, set(before) - moved, prediction, folder, after


PLANS = [
    Plan(),
    Plan(ulysses=2),
    Plan(dp_shard=2, ulysses=2, sharding="zero3", checkpoint="full", offload=0.5),
]


# What a layer has of each kind, and how often in two blocks of two attentions.
KINDS = {
    "lora": ({"lora_A", "lora_B"}, 2 * 2 * 4 * 2),
    "dora": ({"lora_A", "lora_B", "lora_magnitude_vector"}, 2 * 2 * 4 * 3),
    "lokr": ({"lokr_w1", "lokr_w2_a", "lokr_w2_b"}, 2 * 2 * 4 * 3),
}


@pytest.mark.parametrize("plan", some(PLANS, PLANS[1]), ids=str)
@pytest.mark.parametrize("kind", some(KINDS, "lora", "lokr"))
def test_adapters_alone_are_trained_and_what_is_exported_predicts_the_same(
    ranks, clips, base, tmp_path, plan, kind
):
    from diffusers import WanPipeline, WanTransformer3DModel

    config = lora_config(clips, base, tmp_path / "run", plan, **{"lora.kind": kind})
    losses, moved, kept, prediction, _, _ = ranks(plan.world_size, trained, config)[0]
    one = lora_config(clips, base, tmp_path / "one", **{"lora.kind": kind})
    reference = ranks(1, trained, one)[0][0]
    assert losses == pytest.approx(reference, rel=1e-4)
    parts, count = KINDS[kind]
    assert len(moved) == count and {part_of(name) for name in moved} == parts
    assert all(part_of(name) is None for name in kept)
    plain = WanTransformer3DModel.from_pretrained(base)
    untrained = predicted(plain)
    plain.load_lora_adapter(str(tmp_path / "run" / "lora"), use_safetensors=True)
    assert torch.allclose(predicted(plain), prediction, atol=1e-5)
    assert not torch.allclose(untrained, prediction, atol=1e-3)
    again, comfy = (
        WanTransformer3DModel.from_pretrained(base),
        tmp_path / "run" / "lora" / "comfyui.safetensors",
    )
    if kind == "dora":
        assert not comfy.exists()
        return
    if kind == "lokr":
        # No pipeline reads it; ComfyUI adds the Kronecker product to a weight.
        add_kronecker_products(again, load_file(comfy))
    else:
        # ComfyUI's file has Wan's own names; diffusers knows the way back.
        WanPipeline(None, None, None, None, again).load_lora_weights(comfy)
    assert torch.allclose(predicted(again), prediction, atol=1e-5)


def part_of(name):
    """Which part of an adapter a parameter is; None where it is the model's."""
    found = re.search(r"\.(lora_[a-zA-Z_]+|lokr_\w+)\.default", name)
    return found and found[1]


def add_kronecker_products(model, tensors):
    """Adds a LoKr, in ComfyUI's names, to the weights of a model."""
    for name in [name for name in tensors if name.endswith("lokr_w1")]:
        theirs = name.removesuffix(".lokr_w1")
        block, attention, layer = re.fullmatch(
            r"diffusion_model\.blocks\.(\d+)\.(self|cross)_attn\.(\w)", theirs
        ).groups()
        ours = getattr(model.blocks[int(block)], {"self": "attn1", "cross": "attn2"}[attention])
        linear = ours.to_out[0] if layer == "o" else getattr(ours, f"to_{layer}")
        assert f"{theirs}.alpha" not in tensors
        low = tensors[f"{theirs}.lokr_w2_a"] @ tensors[f"{theirs}.lokr_w2_b"]
        linear.weight.data += torch.kron(tensors[name], low)


def started(config):
    """What the model computes before the first step, whole, and the scale of its adapter."""
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config)
    model = trainer.state.model
    moved = [name for name, p in model.named_parameters() if p.requires_grad]
    prediction = predicted(model)
    losses = trainer.train()
    return prediction, model.blocks[0].attn1.to_q.scaling["default"], moved, losses


@pytest.fixture(scope="module")
def exported_as(ranks, clips, tmp_path_factory):
    """Of an adapter of a kind: a base, the folder where it was trained on it, and the prediction with it."""
    from diffusers import WanTransformer3DModel

    @functools.cache
    def export(kind):
        folder = tmp_path_factory.mktemp(f"exported {kind}")
        torch.manual_seed(0)
        model = WanTransformer3DModel(**TINY_WAN, in_channels=48, out_channels=48, text_dim=32)
        model.save_pretrained(folder / "base")
        config = lora_config(clips, folder / "base", folder / "run", **{"lora.kind": kind})
        prediction = ranks(1, trained, config)[0][3]
        return folder / "base", folder / "run" / "lora", prediction

    return export


@pytest.fixture
def exported(exported_as):
    return exported_as("lora")


def as_peft(lora, folder):
    """The adapter as PEFT writes it."""
    folder.mkdir()
    tensors = load_file(lora / "pytorch_lora_weights.safetensors")
    named = {name.replace("transformer.", "base_model.model."): each for name, each in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    said = {"r": 2, "lora_alpha": 5.0, "use_dora": any("magnitude" in name for name in named)}
    if any("lokr" in name for name in named):
        said = {"r": 2, "alpha": 5.0, "decompose_factor": -1}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


def as_musubi(lora, folder):
    """The adapter as musubi-tuner writes it: names without dots, and an alpha for each layer."""
    folder.mkdir()
    named = {}
    for name, tensor in load_file(lora / "comfyui.safetensors").items():
        layer, end = re.fullmatch(r"diffusion_model\.(.+?)\.(lora_[AB]\.weight|alpha)", name).groups()
        end = end.replace("lora_A", "lora_down").replace("lora_B", "lora_up")
        named[f"lora_unet_{layer.replace('.', '_')}.{end}"] = tensor
        named.setdefault(f"lora_unet_{layer.replace('.', '_')}.alpha", torch.tensor(2.0))
    # It has those of all linear layers, and diffusers expects them.
    for block in range(2):
        for layer, (before, after) in {"ffn_0": (36, 32), "ffn_2": (32, 36)}.items():
            stem = f"lora_unet_blocks_{block}_{layer}"
            named[f"{stem}.lora_down.weight"] = torch.ones(2, before)
            named[f"{stem}.lora_up.weight"] = torch.ones(after, 2)
            named[f"{stem}.alpha"] = torch.tensor(1.0)
    save_file(named, folder / "clips.safetensors")
    return folder


FORMS = {
    "a folder": lambda lora, _: lora,
    "a file": lambda lora, _: lora / "pytorch_lora_weights.safetensors",
    "of ComfyUI": lambda lora, _: lora / "comfyui.safetensors",
    "of PEFT": as_peft,
}


# Each kind once, and all that are left in `make prove`. ComfyUI's are read back of a LoRA alone.
ONCE = {("lora", "a folder"), ("dora", "a file"), ("lokr", "of PEFT")}
FORMS_OF_KINDS = [
    pytest.param(kind, form, marks=() if (kind, form) in ONCE else PROVE)
    for kind in KINDS
    for form in FORMS
    if kind == "lora" or form != "of ComfyUI"
]


@PROVE
@pytest.mark.parametrize("plan", some([Plan(ulysses=2), Plan(), PLANS[2]]), ids=str)
@pytest.mark.parametrize(("kind", "form"), FORMS_OF_KINDS)
def test_a_run_goes_on_from_an_adapter(ranks, clips, exported_as, tmp_path, kind, form, plan):
    base, lora, expected = exported_as(kind)
    path = FORMS[form](lora, tmp_path / "adapter")
    changes = {"lora.rank": 0, "lora.alpha": 0.0, "lora.path": str(path), "steps": 2}
    config = lora_config(clips, base, tmp_path / "run", plan, **changes)
    prediction, scale, moved, losses = ranks(plan.world_size, started, config)[0]
    assert torch.allclose(prediction, expected, atol=1e-5) and len(losses) == 2
    assert len(moved) == KINDS[kind][1]
    # In ComfyUI's diffusers multiplies the matrices by it.
    assert scale == (1.0 if form == "of ComfyUI" else 2.5)
    again = load_file(tmp_path / "run" / "lora" / "pytorch_lora_weights.safetensors")
    assert again.keys() == load_file(lora / "pytorch_lora_weights.safetensors").keys()


def test_musubi_tuners_names_and_alphas_are_read(exported, tmp_path):
    from diffusers import WanPipeline

    _, lora, _ = exported
    comfy = read_adapter(str(lora / "comfyui.safetensors"), WanPipeline)
    musubi = read_adapter(str(as_musubi(lora, tmp_path / "adapter")), WanPipeline)
    assert {(each.config.rank, each.config.alpha) for each in (musubi, comfy)} == {(2, 2.0)}
    for layer, parts in comfy.parts.items():
        expected = parts["lora_B"] @ parts["lora_A"]
        found = musubi.parts[layer]["lora_B"] @ musubi.parts[layer]["lora_A"]
        assert torch.allclose(found, expected, atol=1e-6), layer
    # alpha / rank is 1/2.
    ffn = musubi.parts["blocks.0.ffn.net.0.proj"]
    assert torch.allclose(ffn["lora_B"] @ ffn["lora_A"], torch.full((32, 36), 2 * 0.5))
    assert "attn1.to_q" in musubi.config_by_ends.targets and "blocks.1.attn2.to_v" in musubi.config.targets


def test_an_adapter_draws_nothing_in_a_forward(base):
    """What is drawn could not be read where a plan is made of tensors without values."""
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel.from_pretrained(base)
    add_adapters(model, LoraConfig(kind="lokr", rank=2))
    model.train()
    before = torch.get_rng_state()
    predicted(model)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture
def with_others(clips, tmp_path):
    """Options of a run whose adapters change nothing of clips that lie in another folder."""
    others = shutil.copytree(clips, tmp_path / "others")
    folders = {str(clips): 1, str(others): 1}
    return {"data.folder": "", "data.folders": folders, "data.regularisation": [str(others)]}


def kept_as_it_is(config):
    """Losses of a batch by which of its clips are regularisation, before and after some steps, and by hand."""
    from opensora_accel.training.loop import Trainer

    trainer = Trainer(config)
    objective = trainer.objective

    def of_others(batch):
        return ["/others/" in f"/{file}" for file in batch.files]

    # Of both folders.
    batch = next(each for each in trainer.loader if 0 < sum(of_others(each)) < 4)
    encoded = objective.encoders.encode(batch)
    assert encoded.is_regularisation.tolist() == of_others(batch)
    found = []
    for _ in range(2):
        masks = [[False] * 4, *torch.eye(4).bool().tolist(), [True] * 4]
        with torch.no_grad():
            losses = [
                objective.loss(dataclasses.replace(encoded, is_regularisation=torch.tensor(mask))).item()
                for mask in masks
            ]
            losses.append(objective.loss(dataclasses.replace(encoded, is_regularisation=None)).item())
        found.append(losses)
        for _ in range(3):
            trainer.step()
    flow, model = config.flow, objective.model
    alpha = objective.time_shift(batch.bucket)
    times = objective.recipe.draw_times(flow, alpha, config.seed, batch.positions)
    (stream,) = encoded.streams(config.seed)
    captions = drop_captions(batch.captions, flow.caption_drop, config.seed, batch.positions)
    arguments = [stream.noisy(times)], times * 1000, batch.bucket, captions
    with torch.no_grad():
        (with_them,) = objective.predict(*arguments)
        model.disable_adapters()
        (without,) = objective.predict(*arguments)
        model.enable_adapters()
        after = objective.loss(dataclasses.replace(encoded, is_regularisation=torch.tensor([True] * 4)))
    return found, (with_them - without).square().mean().item(), after.item()


@PROVE
@pytest.mark.parametrize("kind", some(KINDS, "lora", "dora"))
def test_adapters_change_nothing_of_regularisation(ranks, clips, base, tmp_path, with_others, kind):
    plan = Plan(precision="fp64")
    changes = {"optim.accumulation": 2, "lora.kind": kind}
    config = lora_config(clips, base, tmp_path / "run", plan, **with_others, **changes)
    (before, after), by_hand, last = ranks(1, kept_as_it_is, config)[0]
    for none, *each, all_of_them, without in (before, after):
        assert none == without, "those that are none learn as ever"
        # What a batch has of one clip does not depend on the others.
        assert sum(loss - none for loss in each) == pytest.approx(all_of_them - none, rel=1e-9)
    # The lengths of rows that a DoRA begins with are made in fp32.
    assert before[-2] <= (1e-12 if kind == "dora" else 0.0) < after[-2], "adapters begin at nothing"
    assert last == pytest.approx(by_hand, rel=1e-9)


@pytest.mark.parametrize(
    "plan", some([Plan(dp_shard=2, ulysses=2, sharding="zero3"), Plan(ulysses=2)]), ids=str
)
@pytest.mark.parametrize("kind", some(KINDS, "dora"))
def test_regularisation_is_the_same_on_any_mesh(ranks, clips, base, tmp_path, with_others, plan, kind):
    found = []
    for number, each in enumerate((Plan(), plan)):
        each = each.replace(precision="fp64")
        config = lora_config(clips, base, tmp_path / str(number), each, **with_others, **{"lora.kind": kind})
        found.append(ranks(each.world_size, losses, config)[0])
    assert found[1] == pytest.approx(found[0], rel=1e-9)


def test_regularisation_without_adapters_is_refused(clips, tmp_path, with_others):
    with pytest.raises(ValueError, match=r"data\.regularisation is for a run of adapters"):
        tiny_config(clips, tmp_path, **with_others)
    with pytest.raises(ValueError, match=r"has 'elsewhere', which is none of data\.folders"):
        tiny_config(clips, tmp_path, **with_others | {"data.regularisation": ["elsewhere"]})
    names = list(with_others["data.folders"])
    with pytest.raises(ValueError, match="leaves nothing to learn"):
        tiny_config(clips, tmp_path, **with_others | {"data.regularisation": names})


def refused(config):
    from opensora_accel.training.loop import Trainer

    with pytest.raises((ValueError, OSError)) as caught:
        Trainer(config)
    return str(caught.value)


def change_tensors(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


FIRST = "transformer.blocks.0.attn1.to_q.lora_A.weight"
DAMAGES = {
    "nothing there": (lambda path: path.unlink(), "is no file of an adapter, and no folder with one"),
    "half a file": (lambda path: path.write_bytes(path.read_bytes()[:500]), "no whole safetensors file"),
    "one matrix of two": (
        lambda p: change_tensors(p, lambda t: t.pop(FIRST)),
        "have not all of their matrices",
    ),
    "two ranks": (
        lambda p: change_tensors(
            p, lambda t: t.update({name: torch.ones(3, t[name].size(1)) for name in [FIRST]})
        ),
        "it has the ranks [2, 3]",
    ),
    "a DoRA of kohya": (
        lambda p: change_tensors(p, lambda t: t.update({"a.dora_scale": torch.ones(1)})),
        "choose a DoRA of PEFT or diffusers",
    ),
    "a DoRA in part": (
        lambda p: change_tensors(
            p, lambda t: t.update({FIRST.replace("lora_A.weight", "lora_magnitude_vector"): torch.ones(36)})
        ),
        "no DoRA of one rank: blocks",
    ),
    "a LoKr of which nothing is said": (
        lambda p: change_tensors(
            p, lambda t: (t.clear(), t.update({f"transformer.a.lokr_w{n}": torch.ones(2, 2) for n in (1, 2)}))
        ),
        "its rank and factor are not said",
    ),
    "another model's": (
        lambda p: change_tensors(p, lambda t: t.update({FIRST: torch.ones(2, 7)})),
        "is [2, 7] in",
    ),
    "other layers": (
        lambda p: change_tensors(p, lambda t: t.update({"transformer.x.lora_C.weight": torch.ones(2, 7)})),
        "are none of its matrices",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_no_adapter_of_this_model_is_refused(ranks, clips, exported, tmp_path, damage):
    base, lora, _ = exported
    change, message = DAMAGES[damage]
    path = Path(shutil.copytree(lora, tmp_path / "adapter")) / "pytorch_lora_weights.safetensors"
    (path.parent / "comfyui.safetensors").unlink()
    change(path)
    changes = {"lora.rank": 0, "lora.alpha": 0.0, "lora.path": str(path.parent)}
    (told,) = ranks(1, refused, lora_config(clips, base, tmp_path / "run", **changes))
    assert message in told and not (tmp_path / "run").exists()


def test_an_adapter_brings_its_own_rank(clips, tmp_path):
    with pytest.raises(ValueError, match=r"lora\.path brings its own kind, rank.*leave lora\.rank out"):
        tiny_config(clips, tmp_path, **{"lora.path": "adapter", "lora.rank": 4})
    with pytest.raises(ValueError, match=r"lora\.kind and lora\.factor are for a run with lora\.rank"):
        tiny_config(clips, tmp_path, **{"lora.kind": "lokr", "lora.factor": 4})
    with pytest.raises(ValueError, match=r'lora\.factor is for lora\.kind="lokr"'):
        tiny_config(clips, tmp_path, **{"lora.rank": 4, "lora.factor": 4})
    with pytest.raises(ValueError, match=r"lora\.path_2 is the adapter of the second"):
        tiny_config(clips, tmp_path, **{"lora.path": "adapter", "lora.path_2": "other"})


@PROVE
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_saved_state_holds_the_adapters_and_goes_on_bit_for_bit(
    ranks, clips, base, tmp_path, elsewhere, kind
):
    plan, of_kind = Plan(dp_shard=2, sharding="zero3"), {"lora.kind": kind}
    whole = lora_config(clips, base, tmp_path / "whole", plan, **of_kind)
    expected, moved, *_ = ranks(2, trained, whole)[0]
    config = lora_config(clips, base, tmp_path / "halves", plan, **of_kind)
    first, _, _, _, folder, saved = ranks(2, trained, config, None, 2)[0]
    names, files = set(), list((folder / "transformer").glob("*.safetensors"))
    for path in files:
        with safe_open(path, "pt") as file:
            names |= set(file.keys())
    assert names == moved, "the frozen weights are not saved"
    if not elsewhere:
        second = ranks(2, trained, config, folder)[0][0]
        assert first + second == expected
        return
    # On another Plan, the same adapters.
    other = lora_config(clips, base, tmp_path / "other", Plan(ulysses=2), **of_kind)
    after = ranks(2, trained, other, folder, 2)[0][-1]
    assert all(torch.equal(after[name], tensor) for name, tensor in saved.items())


def test_targets_that_are_not_there_are_named(run, clips, base, tmp_path):
    import dataclasses
    import json

    config = lora_config(clips, base, tmp_path / "run", **{"lora.targets": ["to_x"]})
    (tmp_path / "run.json").write_text(json.dumps(dataclasses.asdict(config)))
    status, told = run("train", "--config", tmp_path / "run.json")
    assert status == 2 and "lora.targets ['to_x'] do not fit" in told and "to_q, to_v" in told
