"""What the other tests rely on: no gradient is zero by itself, and every way through a model is the same model."""

import pytest
import torch

from opensora_accel.checkpoint import set_grad_checkpoint
from opensora_accel.precision import lift_casts
from tests.opensora_models import mmdit, mmdit_inputs, stdit3, stdit3_inputs
from tests.opensora_models.mmdit import flash_attention
from tests.tolerances import assert_close


def step(model, inputs):
    model.zero_grad()
    out = model(**inputs)
    out.square().mean().backward()
    return out.detach(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


BUILDS = [
    (stdit3, {}, stdit3_inputs()),
    (stdit3, {}, stdit3_inputs(masked=True)),
    (mmdit, {}, mmdit_inputs()),
    (mmdit, {"fused_qkv": False, "use_liger_rope": True}, mmdit_inputs()),
    (mmdit, {"grad_ckpt_settings": (1, 0)}, mmdit_inputs()),
]
NAMES = ["STDiT3", "STDiT3 with given frames", "MMDiT", "MMDiT unfused", "MMDiT selective"]


@pytest.mark.parametrize(("build", "config", "inputs"), BUILDS, ids=NAMES)
def test_every_gradient_is_there_and_checkpointing_keeps_it(build, config, inputs):
    model = build(**config)
    lift_casts(model)
    out, grads = step(model, inputs)
    assert out.dtype == torch.float64 and 0.1 < out.std() < 10
    assert min(grad.abs().max().item() for grad in grads.values()) > 1e-6
    set_grad_checkpoint(model)
    again, recomputed = step(model, inputs)
    assert torch.equal(out, again)
    assert all(torch.equal(grads[name], recomputed[name]) for name in grads)


def test_the_flash_seam_is_the_same_attention():
    model = mmdit()
    out, grads = step(model, mmdit_inputs())
    with flash_attention():
        flashed, flash_grads = step(model, mmdit_inputs())
    assert not torch.equal(out, flashed), "the seam was not taken"
    assert_close(flashed.float(), out.float())
    for name, grad in grads.items():
        assert_close(flash_grads[name].float(), grad.float(), name)


def test_given_frames_do_not_depend_on_the_timestep():
    """The first sample's frames 0 and 1 are given: modulated by timestep 0, whatever the other frames' is."""
    model = stdit3(layers=1)
    block, inputs = model.spatial_blocks[0], stdit3_inputs(masked=True)
    y, lengths = model.encode_text(inputs["y"], inputs["mask"])
    x, t0 = torch.randn(2, 5 * 25, 36).double(), torch.randn(2, 6 * 36).double()
    outs = [block(x, y, t, lengths, inputs["x_mask"], t0, 5, 25) for t in (t0 + 1, t0 + 2)]
    same = (outs[0] == outs[1]).unflatten(1, (5, 25)).all((2, 3))
    assert torch.equal(same, ~inputs["x_mask"])
