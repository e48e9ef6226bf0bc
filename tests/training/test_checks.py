"""What a run may ask of a family's model is checked before the model is made."""

import dataclasses
import html
import json
import logging
from types import SimpleNamespace

import pytest
import torch
from diffusers import AllegroPipeline, LattePipeline

from opensora_accel import Plan, init_parallel
from opensora_accel.observe.fakes import fake_world
from opensora_accel.training import build
from opensora_accel.training.codec import SpaceToDepth
from opensora_accel.training.config import config_from_dict
from opensora_accel.training.recipes import RECIPES, check_recipe
from opensora_accel.training.text_encoders import text_shapes

COSMOS, EASYANIMATE, H3, KANDINSKY = (
    f"{name}Transformer3DModel" for name in ("Cosmos", "EasyAnimate", "MiniMaxH3", "Kandinsky5")
)


def config(name, arguments=None, **tables):
    return config_from_dict({"model": {"class_name": name, "config": arguments or {}}, **tables}, "the test")


def built(run):
    shapes = text_shapes(run.text, RECIPES[run.model.class_name].text)
    return build.build_model(run, SpaceToDepth(4, torch.float32), shapes, torch.float32)


def test_an_option_of_another_family_is_refused():
    for name, tables, message in (
        ("WanTransformer3DModel", {"data": {"frame_rate": 24.0}}, "not told the frame rate"),
        ("MochiTransformer3DModel", {"conditions": {"i2v_head": 1.0}}, "takes no frames that are given"),
        (
            "LTXVideoTransformer3DModel",
            {"conditions": {"i2v_head": 1.0}, "image": {"width": 16}},
            "takes no states of a picture",
        ),
        (
            "WanTransformer3DModel",
            {"conditions": {"i2v_head": 1.0}, "image": {"width": 16}, "text": {"length": 16}},
            r"text\.length is 16: set it to 512",
        ),
        ("HunyuanVideo15Transformer3DModel", {"conditions": {"t2v": 0.0, "i2v_head": 1.0}}, "image.path"),
        (
            "HunyuanVideo15Transformer3DModel",
            {"conditions": {"i2v_head": 1.0}, "image": {"width": 16}},
            r"set conditions\.t2v to 0",
        ),
        (
            "CogVideoXTransformer3DModel",
            {"flow": {"weighting": "bell"}},
            "of which flow.weighting knows nothing",
        ),
        (
            "CogVideoXTransformer3DModel",
            {"flow": {"time_range": [0.0, 0.5]}, "num_samples": 0},
            "flow.time_range knows nothing",
        ),
        ("CogVideoXTransformer3DModel", {"flow": {"shift": "ltx"}}, "is of another family"),
        ("CogVideoXTransformer3DModel", {"flow": {"huber": 0.1}}, "flow.huber knows nothing"),
        (
            "WanTransformer3DModel",
            {"flow": {"min_snr": 5.0}},
            "no levels of noise, which flow.min_snr weighs",
        ),
        ("CogVideoXTransformer3DModel", {"flow": {"sample_steps": 1001}}, "is more; use fewer"),
        (H3, {"flow": {"weighting": "bell"}}, "at times of its own, of which flow.weighting knows nothing"),
    ):
        with pytest.raises(ValueError, match=message):
            built(config(name, **tables))


def test_a_shift_that_weights_were_not_trained_with_is_refused(tmp_path):
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "scheduler" / "scheduler_config.json").write_text('{"snr_shift_scale": 3.0}')
    recipe, model = RECIPES["CogVideoXTransformer3DModel"], {"path": str(tmp_path / "transformer")}
    with pytest.raises(ValueError, match=r"this run has 1; set flow.shift to 1.7321"):
        check_recipe(recipe, config_from_dict({"model": model}, "the test"))
    check_recipe(recipe, config_from_dict({"model": model, "flow": {"shift": 1.73205}}, "the test"))


@pytest.mark.parametrize("name", ["Allegro", "Latte", "CogVideoX"])
def test_a_shift_that_a_scheduler_does_not_know_is_refused(name, tmp_path):
    """The samples of its pipeline would be asked at other levels than those that are learned."""
    recipe, model = RECIPES[f"{name}Transformer3DModel"], {"path": str(tmp_path / "transformer")}

    def check(shift, **scheduler):
        (tmp_path / "scheduler").mkdir(exist_ok=True)
        path = tmp_path / "scheduler" / "scheduler_config.json"
        path.write_text(json.dumps(scheduler))
        check_recipe(recipe, config_from_dict({"model": model, "flow": {"shift": shift}}, "the test"))

    for scheduler in ({"_class_name": "EulerAncestralDiscreteScheduler"}, {"snr_shift_scale": 1.0}):
        check("auto", **scheduler)
        check(1.0, **scheduler)
        for shift in (1.73205, 0.5):
            message = rf"levels that nothing shifts, as .* shifts them by {shift}; leave flow\.shift out"
            with pytest.raises(ValueError, match=message):
                check(shift, **scheduler)
    # Its own classes have 3, where their configuration does not say another number.
    check(1.73205, _class_name="CogVideoXDDIMScheduler")
    with pytest.raises(ValueError, match=r"this run has 1; set flow\.shift to 1\.7321"):
        check("auto", _class_name="CogVideoXDPMScheduler")


def test_kandinsky_has_places_for_so_much():
    """Its tables of positions end there, where a GPU would end the process."""
    tiny, clip = dict(RECIPES[KANDINSKY].tiny), {"num_frames": 5, "height": 24, "width": 40}
    with fake_world(0, 1):
        init_parallel(Plan(), "cpu")
        built(config(KANDINSKY, tiny, data=clip, text={"length": 1024}))
        for arguments, data, length, message in (
            (tiny, clip, 1025, "positions for 1024 tokens of text, and there are 1025"),
            (tiny, clip | {"width": 1032}, 16, "positions for 128 patches a side, and there are 129"),
            (
                tiny | {"attention_type": "nabla"},
                clip,
                16,
                r"blocks that it chooses \(attention_type is 'nabla'",
            ),
        ):
            with pytest.raises(ValueError, match=message):
                built(config(KANDINSKY, arguments, data=data, text={"length": length}))


def test_only_a_cosmos_that_can_be_called_is_trained(monkeypatch):
    from diffusers.models.transformers import transformer_cosmos

    monkeypatch.delattr(transformer_cosmos, "transforms", raising=False)
    tiny = dict(RECIPES[COSMOS].tiny)
    with fake_world(0, 1):
        init_parallel(Plan(), "cpu")
        built(config(COSMOS, tiny))
        for arguments, message in (
            ({"concat_padding_mask": True}, "torchvision, which is not installed; install"),
            ({"extra_pos_embed_type": "learnable"}, r"\(of Cosmos, the recipes are for Predict 2 and 2\.5"),
            ({"use_crossattn_projection": False}, "text_embed_dim is 24, but the encoders give 64"),
            ({"img_context_dim_in": 16}, "Cosmos-Transfer"),
            ({"patch_size": [1, 5, 2]}, r"data\.height \(\d+\) must be a multiple of 20"),
            ({"in_channels": 48}, "in_channels is 48, but the encoders give 49"),
        ):
            with pytest.raises(ValueError, match=message):
                built(config(COSMOS, tiny | arguments))


def test_kandinskys_captions_are_cleaned_as_its_pipeline_does():
    from diffusers.pipelines.kandinsky5.pipeline_kandinsky import whitespace_clean

    reads = RECIPES[KANDINSKY].text[0].reads
    for caption in (" two\n birds ", "a&amp;amp;b", "plain"):
        # What ftfy would mend beside is not here.
        expected = whitespace_clean(html.unescape(html.unescape(caption)).strip())
        assert reads(caption) == expected


@pytest.mark.parametrize("pipeline", [AllegroPipeline, LattePipeline])
def test_captions_in_small_letters_are_the_pipelines(pipeline):
    """Without the cleaning of texts from the web, which it does where two more packages are installed."""
    (recipe,) = (each for each in RECIPES.values() if each.pipeline == pipeline.__name__)
    for caption in (" Two\n BIRDS ", "Plain", ""):
        assert [recipe.text[0].reads(caption)] == pipeline._text_preprocessing(None, caption)


def test_padding_that_a_pipeline_does_not_give_is_warned_of(tmp_path, caplog):
    recipe, model = RECIPES[EASYANIMATE], {"path": str(tmp_path / "transformer")}
    with fake_world(0, 1), caplog.at_level(logging.WARNING):
        init_parallel(Plan(), "cpu")
        check_recipe(recipe, config_from_dict({"model": model, "text": {"length": 256}}, "the test"))
        check_recipe(recipe, config(EASYANIMATE, text={"length": 128}))
        assert caplog.text == ""
        check_recipe(recipe, config_from_dict({"model": model, "text": {"length": 128}}, "the test"))
    assert "always pads to 256 tokens; text.length is 128: set it to 256" in caplog.text


def test_weights_of_another_kind_are_refused():
    tiny, data = dict(RECIPES[EASYANIMATE].tiny), {"num_frames": 5, "height": 24, "width": 40}
    with fake_world(0, 1):
        init_parallel(Plan(), "cpu")
        built(config(EASYANIMATE, tiny, data=data))
        for arguments, message in (
            (
                {"in_channels": 97},
                r"in_channels is 97, .* give 48 \(conditions, as --conditions\.i2v_head 1, take 49 of 97\) .* of 144\)",
            ),
            ({"text_embed_dim_t5": 64}, r"text_embed_dim_t5 is 64, .* one encoder, as EasyAnimate 5\.1"),
            ({"patch_size": 4}, r"data\.height \(24\) must be a multiple of 16"),
        ):
            with pytest.raises(ValueError, match=message):
                built(config(EASYANIMATE, tiny | arguments, data=data))
        masks = tiny | {"resize_inpaint_mask_directly": False}
        built(config(EASYANIMATE, masks, data=data))
        with pytest.raises(
            ValueError, match=r"resize_inpaint_mask_directly is False, .* choose weights of 5\.1"
        ):
            built(config(EASYANIMATE, masks, data=data, conditions={"i2v_head": 1.0}))
        built(config(EASYANIMATE, tiny, data=data, conditions={"i2v_head": 1.0}))
        with pytest.raises(ValueError, match=r"in_channels is 13, .* \(first frames .* are not trained"):
            built(
                config(
                    "MochiTransformer3DModel",
                    dict(RECIPES["MochiTransformer3DModel"].tiny) | {"in_channels": 13},
                    data=data,
                )
            )


def test_frozen_weights_are_counted_as_they_are_kept(monkeypatch):
    name = "WanTransformer3DModel"
    tiny = dict(RECIPES[name].tiny) | {"ffn_dim": 4096}
    tables = {"data": {"num_frames": 5, "height": 16, "width": 16}, "plan": {"precision": "bf16"}}
    adapters = {"lora": {"rank": 2}}
    with fake_world(0, 1):
        init_parallel(Plan(), "cpu")
        model, _ = built(config(name, tiny, **tables))
        num_elements = sum(each.numel() for each in [*model.parameters(), *model.buffers()])
        free = SimpleNamespace(available=3 * num_elements)
        monkeypatch.setattr("psutil.virtual_memory", lambda: free)
        built(config(name, tiny, **tables, **adapters))
        for refused in (tables, tables | adapters | {"plan": {"precision": "fp32"}}):
            with pytest.raises(ValueError, match="GiB for the ranks of this machine"):
                built(config(name, tiny, **refused))


def test_guidance_of_weights_that_have_it_within_is_warned_of(tmp_path, caplog):
    run = config_from_dict({"model": {"path": str(tmp_path / "transformer")}}, "the test")
    quiet = dataclasses.replace(run, flow=dataclasses.replace(run.flow, caption_drop=0.0))
    with fake_world(0, 1), caplog.at_level(logging.WARNING):
        init_parallel(Plan(), "cpu")
        check_recipe(RECIPES[H3], quiet)
        assert caplog.text == ""
        check_recipe(RECIPES[H3], run)
    assert "flow.caption_drop is 0.1, where 0 is meant" in caplog.text
