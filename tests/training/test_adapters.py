"""LoRA in the trainer: adapters alone are trained and saved, and what is exported gives the samples of the run."""

import pytest
import torch
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from opensora_accel import Plan
from opensora_accel.training.adapters import saved_weights
from tests.tiers import some
from tests.training.runs import TINY_WAN, tiny_config


@pytest.fixture
def base(tmp_path):
    """A folder with a Wan for latents of 48 channels, as the codec gives them, and embeddings of 32."""
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    model = WanTransformer3DModel(**TINY_WAN, in_channels=48, out_channels=48, text_dim=32)
    model.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def lora_config(clips, base, output, plan=None, **changes):
    options = {"lora.rank": 2, "lora.alpha": 5.0, "optim.lr": 1e-2, "steps": 4, **changes}
    config = tiny_config(clips, output, plan, model={"path": str(base)}, **options)
    assert config.model.path
    return config


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


@pytest.mark.parametrize("plan", some(PLANS, PLANS[1]), ids=str)
def test_adapters_alone_are_trained_and_what_is_exported_predicts_the_same(
    ranks, clips, base, tmp_path, plan
):
    from diffusers import WanPipeline, WanTransformer3DModel

    config = lora_config(clips, base, tmp_path / "run", plan)
    losses, moved, kept, prediction, _, _ = ranks(plan.world_size, trained, config)[0]
    reference = ranks(1, trained, lora_config(clips, base, tmp_path / "one"))[0][0]
    assert losses == pytest.approx(reference, rel=1e-4)
    assert len(moved) == 2 * 2 * 8 and all("lora_" in name for name in moved)
    assert not any("lora_" in name for name in kept)
    plain = WanTransformer3DModel.from_pretrained(base)
    untrained = predicted(plain)
    plain.load_lora_adapter(str(tmp_path / "run" / "lora"), use_safetensors=True)
    assert torch.allclose(predicted(plain), prediction, atol=1e-5)
    assert not torch.allclose(untrained, prediction, atol=1e-3)
    # ComfyUI's file has Wan's own names; diffusers knows the way back.
    WanPipeline(
        None, None, None, None, again := WanTransformer3DModel.from_pretrained(base)
    ).load_lora_weights(tmp_path / "run" / "lora" / "comfyui.safetensors")
    assert torch.allclose(predicted(again), prediction, atol=1e-5)


def test_a_saved_state_holds_the_adapters_and_goes_on_bit_for_bit(ranks, clips, base, tmp_path):
    plan = Plan(dp_shard=2, sharding="zero3")
    expected, moved, *_ = ranks(2, trained, lora_config(clips, base, tmp_path / "whole", plan))[0]
    config = lora_config(clips, base, tmp_path / "halves", plan)
    first, _, _, _, folder, saved = ranks(2, trained, config, None, 2)[0]
    names, files = set(), list((folder / "transformer").glob("*.safetensors"))
    for path in files:
        with safe_open(path, "pt") as file:
            names |= set(file.keys())
    assert names == moved, "the frozen weights are not saved"
    second = ranks(2, trained, config, folder)[0][0]
    assert first + second == expected
    # On another Plan, the same adapters.
    other = lora_config(clips, base, tmp_path / "other", Plan(ulysses=2))
    after = ranks(2, trained, other, folder, 2)[0][-1]
    assert all(torch.equal(after[name], tensor) for name, tensor in saved.items())


def test_targets_that_are_not_there_are_named(run, clips, base, tmp_path):
    import dataclasses
    import json

    config = lora_config(clips, base, tmp_path / "run", **{"lora.targets": ["to_x"]})
    (tmp_path / "run.json").write_text(json.dumps(dataclasses.asdict(config)))
    status, told = run("train", "--config", tmp_path / "run.json")
    assert status == 2 and "lora.targets ['to_x'] do not fit" in told and "to_q, to_v" in told
