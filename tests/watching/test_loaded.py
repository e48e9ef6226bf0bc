"""A loop says what it saves and what it has loaded: `watch` stops all ranks where that is not the same."""

import json

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from opensora_accel import Plan, init_parallel, parallel_states
from opensora_accel.watching import LoopMistake, watch

WRONG = {
    "": "",
    "a shard": "weight on rank 1 is not what was stored",
    "lost": "bias is stored, and no rank holds it",
    "a number": "weight on ranks 0, 1 is not what was stored",
}


def loops(folder, wrong):
    """What every rank raises in a loop that saves, is cut in two, and loads."""
    parallel_states.reset()
    init_parallel(Plan(dp_shard=2, sharding="zero3"))
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    whole = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    numbers, file = None, folder / "model.safetensors"
    with watch(model, check_steps=0) as run:
        if dist.get_rank() == 0:
            # Through JSON, as a run that goes on reads it.
            numbers = json.loads(json.dumps(run.saves(whole)))
            save_file(whole, file)
        dist.barrier()
    fully_shard(model, mesh=parallel_states.get_mesh("mixed"))
    with torch.no_grad():
        if wrong and wrong != "lost" and dist.get_rank() == 1:
            model.weight.to_local()[0, 0] += 1e-6
    state = model.state_dict()
    if wrong == "lost":
        del state["bias"]
    messages = []
    with watch(model, check_steps=0) as run:
        for saved in (file, numbers, whole):
            try:
                run.loaded(state, saved)
                messages.append("")
            except LoopMistake as mistake:
                messages.append(str(mistake))
        with pytest.raises(ValueError, match=r"what was loaded cannot be compared: there is no .*nothing"):
            run.loaded(state, folder / "nothing" if dist.get_rank() == 1 else whole)
        with pytest.raises(ValueError, match="no rank knows what was stored; pass it on one of them"):
            run.loaded(state, None)
    return messages


@pytest.mark.parametrize("wrong", ["", "a shard", "lost"])
def test_what_is_loaded_is_what_was_saved(ranks, tmp_path, wrong):
    for of_file, of_numbers, of_tensors in ranks(2, loops, tmp_path, wrong):
        if not wrong:
            assert of_file == of_numbers == of_tensors == ""
            continue
        told = f"loaded state: {WRONG[wrong]}"
        assert told in of_file and told in of_tensors
        # Numbers alone do not say which shard of the two it is.
        assert f"loaded state: {WRONG['a number' if wrong == 'a shard' else wrong]}" in of_numbers
