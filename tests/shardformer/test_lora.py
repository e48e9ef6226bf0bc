"""An adapter trained under a Plan is what diffusers' and PEFT's own loaders read into a plain model on one device."""

import json

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import shardformer
from opensora_accel import Plan, init_parallel
from opensora_accel.observe import CollectiveRecorder
from tests.models import wan, wan_inputs
from tests.tiers import each_once
from tests.tolerances import RELATIVE

EXACT = RELATIVE[torch.float64]
OPTIONS = {
    "r": 2,
    "lora_alpha": 5,
    "target_modules": ["to_q", "to_v", "net.2"],
    # What loaders cannot guess from the shapes.
    "rank_pattern": {"to_v": 3},
    "alpha_pattern": {"to_v": 7},
}


def wan_with_adapter(form, adapter="default"):
    """A tiny Wan in fp64 whose adapter has learned something; the wrapped model, and the Wan in it."""
    from peft import LoraConfig, get_peft_model

    model = wan().requires_grad_(False)
    config = LoraConfig(**OPTIONS)
    if form == "peft":
        whole = get_peft_model(model, config)
    else:
        model.add_adapter(config, adapter_name=adapter)
        whole = model
    whole.double()
    torch.manual_seed(3)
    for name, parameter in sorted(whole.named_parameters()):
        if "lora" in name:
            nn.init.normal_(parameter, std=0.3)
    return whole, model


def output(model):
    with torch.no_grad():
        return model(**wan_inputs(), return_dict=False)[0]


def loaded(form, folder):
    """A plain model with the adapter of the folder, by the library's own loader."""
    from peft import PeftModel

    model = wan()
    if form == "peft":
        return PeftModel.from_pretrained(model, str(folder)).double()
    if form == "pipeline":
        from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline

        scheduler = FlowMatchEulerDiscreteScheduler()
        pipeline = WanPipeline(None, None, None, scheduler, transformer=model)
        pipeline.load_lora_weights(str(folder))
    else:
        # Without it diffusers 0.42 looks for *.bin alone.
        model.load_lora_adapter(str(folder), use_safetensors=True)
    return model.double()


def adapter_values(model):
    return {
        name.partition("base_model.model.")[2] or name: p.full_tensor()
        if isinstance(p, DTensor)
        else p.detach()
        for name, p in model.named_parameters()
        if "lora" in name
    }


def exported(plan, form, folder):
    """How far the loaded model's output is from the sharded one's, and names of adapter weights that are not equal."""
    init_parallel(plan)
    written = "peft" if form == "peft" else "diffusers"
    whole, model = wan_with_adapter(written)
    shardformer.shard(model, plan)
    trained = output(whole)
    path = shardformer.save_lora(whole, folder)
    assert path.is_file(), "every rank finds the file"
    again = loaded(form, folder)
    before, after = adapter_values(whole), adapter_values(again)
    values = {name.replace(".default.", ".").replace(".default_0.", "."): v for name, v in after.items()}
    expected = {name.replace(".default.", "."): v for name, v in before.items()}
    assert values.keys() == expected.keys() and len(values) > 8
    different = [name for name in expected if not torch.equal(values[name], expected[name])]
    plain = output(wan())
    return float((output(again) - trained).norm() / (plain - trained).norm()), different


PLANS = [
    Plan(),
    Plan(ulysses=2),
    Plan(dp_shard=2, sharding="zero3"),
    Plan(ring=3, sharding="zero2", checkpoint="full"),
    Plan(dp_replicate=2, ulysses=2, sharding="zero3"),
]


@pytest.mark.parametrize(
    ("form", "plan"), each_once(["diffusers", "pipeline", "peft"], [PLANS[0], *PLANS[:0:-1]])
)
def test_an_exported_adapter_gives_the_output_of_the_sharded_model(ranks, plan, form, tmp_path):
    for error, different in ranks(plan.world_size, exported, plan, form, tmp_path / "lora"):
        assert error < EXACT and different == []
    files = {
        "peft": ["adapter_config.json", "adapter_model.safetensors"],
    }.get(form, ["pytorch_lora_weights.safetensors"])
    assert sorted(path.name for path in (tmp_path / "lora").iterdir()) == files


def test_the_file_holds_what_diffusers_own_export_holds(tmp_path):
    """One device: names, values and the description are those of the libraries' own files."""
    from diffusers import WanPipeline
    from peft.utils import get_peft_model_state_dict
    from safetensors import safe_open

    _, model = wan_with_adapter("diffusers", "style")
    ours = shardformer.save_lora(model, tmp_path / "ours", adapter="style")
    WanPipeline.save_lora_weights(
        str(tmp_path / "theirs"),
        transformer_lora_layers=get_peft_model_state_dict(model, adapter_name="style"),
        transformer_lora_adapter_metadata=model.peft_config["style"].to_dict(),
    )
    with safe_open(ours, "pt") as mine, safe_open(tmp_path / "theirs" / ours.name, "pt") as theirs:
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine.get_tensor(name), theirs.get_tensor(name)) for name in mine.keys())  # noqa: SIM118
        described, expected = (json.loads(f.metadata()["lora_adapter_metadata"]) for f in (mine, theirs))
    assert {k: sorted(v) if isinstance(v, list) else v for k, v in described.items()} == {
        k: sorted(v) if isinstance(v, list) else v for k, v in expected.items()
    }


def test_peft_files_are_those_of_peft(tmp_path):
    whole, _ = wan_with_adapter("peft")
    shardformer.save_lora(whole, tmp_path / "ours")
    whole.save_pretrained(tmp_path / "theirs")
    described, expected = (
        json.loads((tmp_path / folder / "adapter_config.json").read_text()) for folder in ("ours", "theirs")
    )
    described["target_modules"], expected["target_modules"] = (
        sorted(each["target_modules"]) for each in (described, expected)
    )
    assert described == expected
    ours, theirs = (
        (tmp_path / folder / "adapter_model.safetensors").read_bytes() for folder in ("ours", "theirs")
    )
    assert ours == theirs


def gathered_bytes(folder):
    """Bytes that the calls of an export send from this rank, and those of the adapter's tensors.

    After them ranks hear whether the file could be written.
    """
    plan = Plan(dp_shard=2, sharding="zero3")
    init_parallel(plan)
    _, model = wan_with_adapter("diffusers")
    sizes = [p.nbytes for name, p in model.named_parameters() if "lora" in name]
    shardformer.shard(model, plan)
    with CollectiveRecorder() as recorder:
        shardformer.save_lora(model, folder)
    *sent, _, _ = [call.sent_bytes for call in recorder.calls if call.kind == "all-gather"]
    return sent, sizes


def test_the_adapter_alone_travels_one_tensor_at_a_time(ranks, tmp_path):
    for sent, sizes in ranks(2, gathered_bytes, tmp_path):
        assert len(sent) == len(sizes) and sum(sizes) / 2 <= sum(sent) <= sum(sizes)
        assert max(sent) <= max(sizes)


def test_no_adapter_is_said_with_the_remedy(tmp_path):
    with pytest.raises(
        ValueError, match=r"WanTransformer3DModel has no adapter 'default' \(it has none\); add one"
    ):
        shardformer.save_lora(wan(), tmp_path)
    _, model = wan_with_adapter("diffusers", "style")
    with pytest.raises(ValueError, match=r"has no adapter 'default' \(it has style\)"):
        shardformer.save_lora(model, tmp_path)
    assert list(tmp_path.iterdir()) == []


def unwritable(folder):
    init_parallel(Plan(ulysses=2))
    _, model = wan_with_adapter("diffusers")
    try:
        shardformer.save_lora(model, folder)
    except OSError as error:
        return str(error)


def test_a_folder_that_cannot_be_written_to_is_said_on_all_ranks(ranks, tmp_path):
    (tmp_path / "file").write_text("")
    for told in ranks(2, unwritable, tmp_path / "file"):
        assert "could not be written" in told and "name a folder that can be written to" in told
