"""Low-bit moments: the bytes they take, equal on any number of ranks, and saved so that a run goes on bit for bit."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from opensora_accel import Plan, init_parallel
from opensora_accel.experiments.low_bit import check_low_bit, saved_values
from opensora_accel.fsdp import shard_parameters
from opensora_accel.training.optim import build_optimizer, new_moment, set_learning_rate
from opensora_accel.training.sections import OptimConfig
from tests.tiers import PROVE, some
from tests.training.runs import tiny_config

# Where `make` puts it: see there. Ranks import this file too.
sys.path.append(str(Path(sys.prefix) / "lowbit"))
pytest.importorskip("torchao")

FORMS = ["8bit", "4bit", "fp8"]
# Bytes of a moment's element: the code, and a share of the block's scale.
THEORY = {"fp32": 4.0, "8bit": 1 + 4 / 256, "fp8": 1 + 4 / 256, "4bit": 0.5 + 4 / 128}
MOMENTS = ("exp_avg", "exp_avg_sq")
CPU = torch.device("cpu")


def bits(moment):
    local = moment.to_local() if isinstance(moment, DTensor) else moment
    if not hasattr(local, "codes"):
        return [local]
    return [local.codes.view(torch.uint8), local.scale]


def same_bits(one, other):
    pairs = list(zip(bits(one), bits(other), strict=True))
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("form", FORMS)
def test_saved_values_give_the_same_codes_and_scales(form):
    """Gradients over 18 orders of magnitude, blocks of one sign, of zeros, and of one value that is alone."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(64, 128))
    optimizer = build_optimizer(nn.ParameterList([weight]), OptimConfig(state=form))
    lost = 0
    for step in range(150):
        gradient = torch.randn(64, 128) * 10 ** torch.empty(64, 1).uniform_(-9, 9)
        gradient[::3] = -gradient[::3].abs()
        gradient[1::7] = 0
        gradient[2::7, 1:] = 0
        weight.grad = gradient
        optimizer.step()
        if step % 10 == 9:
            optimizer.state.clear()
            continue
        for name in MOMENTS:
            moment = optimizer.state[weight][name]
            again, plain = new_moment(optimizer, weight, name), new_moment(optimizer, weight, name)
            again.copy_(saved_values(moment))
            assert same_bits(again, moment)
            plain.copy_(moment.dequantize())
            lost += not same_bits(plain, moment)
            # At most one value of a block is not what the optimizer reads, by half a step between codes.
            read = moment.dequantize()
            changed = (saved_values(moment) != read).view(-1, 128 if form == "4bit" else 256)
            assert changed.sum(1).amax() <= 1
            assert torch.allclose(saved_values(moment), read, rtol=0.13, atol=0)
    # What the optimizer reads, quantized again, would not be the same: codes with a sign hold no −1.
    assert lost > 50 if form != "fp8" else lost == 0


@pytest.mark.parametrize("form", FORMS)
def test_bytes_are_those_of_theory(form):
    weight = nn.Parameter(torch.randn(1024, 1024))
    optimizer = build_optimizer(nn.ParameterList([weight]), OptimConfig(state=form))
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    parts = [part for name in MOMENTS for part in bits(optimizer.state[weight][name])]
    expected = 2 * THEORY[form] * weight.numel()
    assert sum(part.nbytes for part in parts) == expected
    assert weight.nbytes * 2 / expected > 3.9


class Tower(nn.Module):
    """Of its weights those with rows for 4 ranks in whole blocks are quantized everywhere; a norm and a bias never."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256)) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)[..., :64]
        return x


def stepped(plan, form):
    """Weights after five steps with given gradients, and after a step whose gradients were not finite."""
    torch.manual_seed(0)
    model = Tower()
    if plan.sharding != "none":
        init_parallel(plan)
        shard_parameters(model, plan, list(model.blocks))
    optimizer = build_optimizer(model, OptimConfig(state=form, weight_decay=0.3))
    for step in range(5):
        set_learning_rate(optimizer, 1e-2 / (step + 1))
        for number, parameter in enumerate(model.parameters()):
            torch.manual_seed(100 * step + number)
            gradient = torch.randn(parameter.shape)
            if isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        optimizer.step()
    quantized = [len(bits(optimizer.state[p]["exp_avg"])) == 2 for p in model.parameters()]
    weights = {
        name: p.full_tensor().detach() if isinstance(p, DTensor) else p.detach()
        for name, p in model.named_parameters()
    }
    return weights, quantized


SHARDED = [
    Plan(dp_shard=2, sharding="zero3"),
    Plan(dp_shard=4, sharding="zero2"),
    Plan(dp_shard=4, sharding="zero3", sharding_factor=2),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("plan", some(SHARDED, SHARDED[0]), ids=str)
def test_sharded_parameters_step_like_whole_ones(ranks, form, plan):
    whole, quantized = stepped(Plan(), form)
    assert quantized == [True, False, False, False] * 2
    for sharded, also in ranks(plan.world_size, stepped, plan, form):
        assert also == quantized
        for name, weight in whole.items():
            assert torch.equal(sharded[name], weight), name
    # What is not quantized steps as torch's own AdamW does, by its own group's weight decay.
    reference, _ = stepped(Plan(), "fp32")
    for name, weight in whole.items():
        close = torch.allclose(weight, reference[name], rtol=1e-5, atol=1e-6)
        assert close == (".0.weight" not in name), name


LARGE = {"model.config": {
    "num_attention_heads": 4, "attention_head_dim": 32, "num_layers": 2, "ffn_dim": 256, "freq_dim": 32,
    "rope_max_seq_len": 32,
}}  # fmt: skip


def trained(config, saved=None, num_steps=2):
    """Losses, and moments as they are saved, after so many steps; `saved` is a folder to go on from."""
    from opensora_accel.training.loop import Trainer
    from opensora_accel.training.saved_state import read_record

    trainer = Trainer(config, saved, read_record(saved) if saved else None)
    state = trainer.state
    losses = [trainer.step()["loss"] for _ in range(num_steps)]
    moments = {}
    for name, p in state.model.named_parameters():
        moments[name] = saved_values(state.optimizer.state[p]["exp_avg"])
        if isinstance(p, DTensor):
            shard = DTensor.from_local(
                moments[name], p.device_mesh, p.placements, shape=p.shape, stride=p.stride()
            )
            moments[name] = shard.full_tensor()
    num_quantized = sum(len(bits(state.optimizer.state[p]["exp_avg"])) == 2 for p in state.model.parameters())
    folder = trainer.save()
    trainer.saver.wait()
    return losses, moments, num_quantized, folder


ONE, TWO = Plan(), Plan(dp_shard=2, sharding="zero3")


@pytest.mark.parametrize("plan", some([ONE, TWO], TWO), ids=str)
@pytest.mark.parametrize("form", some(FORMS, "8bit"))
@pytest.mark.prove
def test_a_run_goes_on_bit_for_bit(ranks, clips, tmp_path, form, plan):
    config = tiny_config(clips, tmp_path / "a", plan, **LARGE, **{"optim.state": form})
    whole, expected, num_quantized, _ = ranks(plan.world_size, trained, config, None, 4)[0]
    assert num_quantized > 10
    halves = tiny_config(clips, tmp_path / "b", plan, **LARGE, **{"optim.state": form})
    first, _, _, folder = ranks(plan.world_size, trained, halves)[0]
    second, moments, _, _ = ranks(plan.world_size, trained, halves, folder)[0]
    assert first + second == whole
    assert all(torch.equal(moments[name], expected[name]) for name in expected)


@PROVE
def test_moments_load_into_any_form_and_any_number_of_ranks(ranks, clips, tmp_path):
    def config(name, plan, form):
        return tiny_config(clips, tmp_path / name, plan, **LARGE, **{"optim.state": form})

    _, saved, num_quantized, folder = ranks(2, trained, config("a", TWO, "8bit"))[0]
    assert num_quantized > 10
    for number, (plan, form) in enumerate([(ONE, "fp32"), (TWO, "4bit"), (ONE, "8bit")]):
        _, found, _, folder = ranks(plan.world_size, trained, config(str(number), plan, form), folder, 0)[0]
        for name, moment in saved.items():
            # A step between codes at most: half of it for most values, and all of it for one that gets the scale.
            atol = {"fp32": 0, "8bit": 0.02, "4bit": 0.23}[form] * float(moment.abs().max())
            assert torch.allclose(found[name], moment, rtol=0, atol=atol + 1e-30), name
        saved = found


@pytest.mark.prove
def test_learning_goes_like_with_moments_in_fp32(ranks, clips, tmp_path):
    curves = {}
    for form in ("fp32", *FORMS):
        config = tiny_config(clips, tmp_path / str(form), **LARGE, **{"optim.state": form, "steps": 60})
        curves[form] = ranks(1, trained, config, None, 60)[0][0]
    reference = sum(curves.pop("fp32")[-10:]) / 10
    for form, losses in curves.items():
        print(f"{form}: {sum(losses[:10]) / 10:.4f} → {sum(losses[-10:]) / 10:.4f}, fp32 {reference:.4f}")
        assert sum(losses[-10:]) / 10 == pytest.approx(reference, rel=0.05)


def refused(break_it):
    import torchao.optim

    module, step = sys.modules["torchao.optim"], torchao.optim.AdamWFp8.step
    try:
        if break_it == "missing":
            sys.modules["torchao.optim"] = None
        else:

            def fail(*_):
                raise RuntimeError("type fp8e4nv not supported in this architecture\nmore")

            torchao.optim.AdamWFp8.step = fail
        check_low_bit(OptimConfig(state="fp8"), CPU)
    except ValueError as error:
        return str(error)
    finally:
        sys.modules["torchao.optim"], torchao.optim.AdamWFp8.step = module, step


@pytest.mark.parametrize(
    ("break_it", "told"),
    [
        (
            "missing",
            "needs torchao (import of torchao.optim halted; None in sys.modules); pip install 'opensora-acc",
        ),
        (
            "device",
            "(RuntimeError: type fp8e4nv not supported in this architecture); set --optim.state fp32 or --opt",
        ),
    ],
)
def test_what_does_not_work_here_is_said_at_the_start(ranks, break_it, told):
    assert all(told in error for error in ranks(2, refused, break_it))
