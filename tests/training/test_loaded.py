"""What a run holds after a load is held against the files: whatever is another on one rank stops all of them."""

import itertools
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from opensora_accel import Plan, init_parallel, parallel_states
from opensora_accel.observe import Whole, sums_of, unlike_file
from opensora_accel.observe.loaded import sum_of
from opensora_accel.training.adapters import _Read
from opensora_accel.training.loop import Trainer
from opensora_accel.training.saved_state import load, read_record
from opensora_accel.weights import Stored
from tests.tiers import PROVE, some
from tests.training.runs import lora_config, save_tiny_wan, tiny_config

SHARDED = Plan(dp_shard=2, sharding="FULL_SHARD")
PLANS = {
    "sharded": SHARDED,
    "whole": Plan(dp_replicate=2),
    "ring of three": Plan(ring=3, sharding="FULL_SHARD"),
}


def trained(config):
    Trainer(config).train()


@pytest.fixture(scope="module")
def written(ranks, clips, tmp_path_factory):
    output = tmp_path_factory.mktemp("written") / "run"
    ranks(2, trained, tiny_config(clips, output, SHARDED, steps=3))
    return output / "checkpoints" / "step_000003"


# ---- a saved state

NAME = "blocks.0.attn1.to_q.weight"
# By what is told: the file in which the tensor lies, and its name there.
TENSORS = {
    f"weight {NAME}": ("transformer", NAME),
    "weight proj_out.bias": ("transformer", "proj_out.bias"),
    f"average of {NAME}": ("transformer_ema", NAME),
    f"exp_avg of {NAME}": ("", f"{NAME}.exp_avg"),
    "exp_avg_sq of proj_out.bias": ("", "proj_out.bias.exp_avg_sq"),
}


def is_of(stored, folder, name):
    return stored.name == name and (stored.path.parent.name == folder or not folder)


def loaded_wrong(config, folder, told, how):
    """What every rank raises where rank 1 fills one tensor wrong."""
    stem, name = TENSORS[told]
    fill = load._fill

    def wrong(target, stored):
        fill(target, stored)
        if dist.get_rank() == 1 and is_of(stored, stem, name):
            local = target.to_local() if hasattr(target, "to_local") else target
            with torch.no_grad():
                if how == "a bit":
                    local.view(-1)[:1].view(torch.int32).bitwise_xor_(1)
                elif how == "zeros":
                    local.zero_()
                else:  # moved on by one place, as by a wrong offset
                    local.copy_(local.view(-1).roll(1).view_as(local))

    parallel_states.reset()
    with mock.patch.object(load, "_fill", wrong):
        try:
            Trainer(config, folder, read_record(folder))
        except ValueError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("name", some(PLANS, "sharded"))
@pytest.mark.parametrize("told", some(TENSORS, f"weight {NAME}", "exp_avg_sq of proj_out.bias"))
@pytest.mark.parametrize("how", some(["a bit", "zeros", "an offset"], "a bit"))
def test_a_tensor_that_is_another_is_named(ranks, clips, tmp_path, written, name, told, how):
    plan = PLANS[name]
    messages = ranks(
        plan.world_size, loaded_wrong, tiny_config(clips, tmp_path, plan, steps=3), written, told, how
    )
    assert len(set(messages)) == 1
    assert (
        f"{written} was not loaded as it lies on disk: {told} on rank 1 is not what was stored;"
        in messages[0]
    )


def number_wrong(config, folder, what):
    """What every rank raises where one number is another on rank 1."""
    parallel_states.reset()
    check = "opensora_accel.training.loop.check_loaded"
    from opensora_accel.training.loaded import check_loaded

    def after(folder, record, states, position):
        (state,) = states
        if dist.get_rank() == 1:
            if what == "the count of averaged steps":
                state.ema.num_updates = 0
            elif what == "the step":
                state.step += 1
            elif what == "the position of the data":
                position["position"] = 0
            else:
                for each in state.optimizer.state.values():
                    each["step"].fill_(0)
        check_loaded(folder, record, states, position)

    with mock.patch(check, after):
        try:
            Trainer(config, folder, read_record(folder))
        except ValueError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    "what", ["the count of averaged steps", "the step", "the position of the data", "step of "]
)
def test_a_number_that_is_another_is_named(ranks, clips, tmp_path, written, what):
    messages = ranks(2, number_wrong, tiny_config(clips, tmp_path, SHARDED, steps=3), written, what)
    assert len(set(messages)) == 1 and f"was not loaded as it lies on disk: {what}" in messages[0]
    assert "rank 1" in messages[0]


def shard_of_another(config, folder):
    """What is raised where every rank reads the rows of rank 0."""
    parallel_states.reset()
    own = load.region_of
    with mock.patch.object(
        load, "region_of", lambda shape, mesh, placements: own(shape, mesh, placements, 0)
    ):
        try:
            Trainer(config, folder, read_record(folder))
        except (ValueError, RuntimeError) as error:
            return str(error)
    return ""


def test_a_shard_that_was_read_at_another_place_is_found(ranks, clips, tmp_path, written):
    found = ranks(2, shard_of_another, tiny_config(clips, tmp_path, SHARDED, steps=3), written)
    assert all(
        "was not loaded as it lies on disk" in each and "on rank 1 is not" in each for each in found
    ), found


# ---- a model's folder, and an adapter's file


def built_wrong(config, cls, name, on=1):
    """What every rank raises where a tensor of this name is read wrong on rank `on`, while the model is made."""
    parallel_states.reset()
    read, count = cls.read, [0]

    def wrong(self, dtype, region=()):
        found = read(self, dtype, region)
        if dist.get_rank() == on and self.name == name and not count[0]:
            count[0] += 1  # the file itself is whole
            found = found.clone()
            found.view(-1)[-1] += 1
        return found

    with mock.patch.object(cls, "read", wrong):
        try:
            Trainer(config)
        except ValueError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("name", some(["sharded", "whole"], "sharded"))
def test_a_weight_of_a_folder_that_is_another_is_named(ranks, clips, tmp_path, name):
    base = save_tiny_wan(tmp_path / "base")
    config = tiny_config(clips, tmp_path / "run", PLANS[name], model={"path": str(base)})
    assert ranks(2, built_wrong, config, Stored, "no such") == ["", ""]
    # DDP gives all ranks what the first one has: what another one read wrong is gone then.
    on, where = (0, "ranks 0, 1") if name == "whole" else (1, "rank 1")
    for message in ranks(2, built_wrong, config, Stored, NAME, on):
        assert (
            f"model.path {base} was not loaded as it lies on disk: {NAME} on {where} is not what was"
            in message
        )


@PROVE
def test_an_adapter_that_is_another_is_named(ranks, clips, tmp_path):
    base = save_tiny_wan(tmp_path / "base")
    ranks(2, trained, lora_config(clips, base, tmp_path / "first", SHARDED, steps=1))
    file = tmp_path / "first" / "lora" / "pytorch_lora_weights.safetensors"
    changes = {"lora.rank": 0, "lora.alpha": 0.0, "lora.path": str(file), "steps": 1}
    config = lora_config(clips, base, tmp_path / "second", SHARDED, **changes)
    assert ranks(2, built_wrong, config, Stored, "no such") == ["", ""]
    for message in ranks(2, built_wrong, config, _Read, "blocks.0.attn1.to_q"):
        assert f"lora.path {file} was not loaded as it lies on disk: blocks.0.attn1.to_q.lora_" in message
        assert "on rank 1 is not what was stored" in message
    # The layer below the adapter is one of the folder.
    for message in ranks(2, built_wrong, config, Stored, NAME):
        assert f"model.path {base} was not loaded" in message and f"{NAME} on rank 1" in message


# ---- the numbers


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (5,), (7, 6), (3, 4, 2, 5)])
def test_numbers_of_parts_add_up_to_that_of_the_whole(dtype, shape):
    whole = (torch.arange(math.prod(shape)).view(shape) * 1.5 - 2).to(dtype)
    number = sum_of(whole)
    for dim, size in enumerate(shape):
        bounds = (0, 1, size // 2, size)
        regions = [
            tuple(slice(a, b) if d == dim else slice(0, n) for d, n in enumerate(shape))
            for a, b in itertools.pairwise(bounds)
        ]
        assert sum(sum_of(whole[region], region) for region in regions) % 2**64 == number
    if shape and dtype != torch.bool:
        flat = whole.clone().view(-1)
        flat[:2] = flat[:2].flip(0)
        assert sum_of(flat.view(shape)) != number and sum_of(torch.zeros_like(whole)) == 0


def test_rows_that_changed_places_have_another_number():
    whole = torch.randn(6, 4)
    for order in ((1, 0, 2, 3, 4, 5), (1, 2, 3, 4, 5, 0), (0, 2, 1, 3, 5, 4)):
        assert sum_of(whole[list(order)]) != sum_of(whole)
    # Three that balance in any sum with equal steps between factors.
    bent = torch.zeros(6, dtype=torch.int32)
    bent[1:4] = torch.tensor([1, -2, 1], dtype=torch.int32)
    assert sum_of(bent) != 0


def differing_copies(wrong_rank):
    """Of four ranks, two copies of two shards."""
    parallel_states.reset()
    init_parallel(Plan(dp_replicate=2, dp_shard=2, sharding="zero3"))
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fully_shard(model, mesh=parallel_states.make_mesh(2, 2))
    if dist.get_rank() == wrong_rank:
        with torch.no_grad():
            model.weight.to_local()[0, 0] += 1
    of_tensors = unlike_file(model.state_dict(), {n: Whole(t) for n, t in whole.items()})
    # Of numbers alone, that one rank knows, it cannot be said which of two shards it is.
    of_numbers = unlike_file(model.state_dict(), sums_of(whole) if dist.get_rank() == 3 else None)
    lost = unlike_file({"bias": model.bias}, sums_of(whole))
    return of_tensors, of_numbers, lost


def test_the_rank_of_a_wrong_shard_is_named(ranks):
    for found in ranks(4, differing_copies, 2):
        assert found == (
            "weight on rank 2 is not what was stored",
            "weight on ranks 2, 3 is not what was stored",
            "weight is stored, and no rank holds it",
        )
    assert {each[:2] for each in ranks(4, differing_copies, None)} == {("", "")}
