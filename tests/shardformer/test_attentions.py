"""Which attention takes the kernel's place, over which groups."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardformer
from opensora_accel import Plan, parallel_states
from shardformer.engine.attentions import _num_decoders
from shardformer.policy.base import JointAttention
from tests.tolerances import RELATIVE, relative_error
from tests.video_models import CASES


def two_groups():
    """A model is sharded over one pair of ranks, another one over another pair, and the first runs again."""
    first, second = (
        [dist.new_group(ranks) for ranks in pairs] for pairs in (((0, 1), (2, 3)), ((0, 2), (1, 3)))
    )
    models, inputs = [], CASES["HunyuanVideo"].inputs()
    for groups in (first, second):
        parallel_states.set_sequence_parallel_group(
            next(each for each in groups if isinstance(each, dist.ProcessGroup))
        )
        models.append(shardformer.shard(CASES["HunyuanVideo"].make(), Plan(ulysses=2)))
    model = CASES["HunyuanVideo"].make()
    with torch.no_grad():
        outs = [each(**inputs, return_dict=False)[0] for each in (*models, model)]
    return all(relative_error(out, outs[-1]) < RELATIVE[torch.float32] for out in outs[:2])


def test_a_model_attends_over_the_groups_it_was_sharded_for(ranks):
    assert all(ranks(4, two_groups))


@pytest.mark.parametrize("count", [None, 3, -1, 0.5])
def test_a_number_of_decoders_that_is_none_is_refused(count):
    model = nn.Module()
    if count is not None:
        model.num_decoders = count
    entry = JointAttention("towers.*", "last", decoders="num_decoders")
    with pytest.raises(
        ValueError, match=r"counts decoders among towers.* by Module.num_decoders, which is .* 0 to 2"
    ):
        _num_decoders(model, entry, 2)
