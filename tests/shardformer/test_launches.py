"""What a GPU is asked to launch by a sharded block, counted on tensors without memory."""

import collections

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import shardformer
from opensora_accel import Plan, init_parallel
from opensora_accel.observe.fakes import FakeFloats, fake_world
from tests.tiers import PROVE

ATEN = torch.ops.aten
# They launch nothing: views, memory that is not filled, and what only copies on strides that are not there.
NOTHING = {
    *(ATEN.empty.memory_format, ATEN.empty_like.default, ATEN.new_empty.default, ATEN.empty_strided.default),
    *(ATEN.detach.default, ATEN._unsafe_view.default, ATEN.new_empty_strided.default),
    *(
        ATEN.unsafe_split_with_sizes.default,
        ATEN.split_with_sizes.default,
        ATEN.split.Tensor,
        ATEN.unbind.int,
    ),
}


class Launches(TorchDispatchMode):
    """Counts the kernels of operators on floating-point tensors, by name; a collective is one."""

    def __init__(self):
        super().__init__()
        self.by_name = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and func not in NOTHING and func.namespace in ("aten", "c10d"):
            self.by_name[str(func)] += 1
        return func(*args, **(kwargs or {}))


def launches(plan, num_layers, num_tokens=64):
    """Of the second forward and backward of a small Wan."""
    from diffusers import WanTransformer3DModel

    sizes = {"num_attention_heads": 8, "attention_head_dim": 64, "ffn_dim": 512, "num_layers": num_layers}
    with fake_world(0, plan.world_size), FakeFloats():
        init_parallel(plan)
        model = WanTransformer3DModel(**sizes).bfloat16()
        shardformer.shard(model, plan)
        inputs = {
            "hidden_states": torch.empty(1, 16, num_tokens, 2, 2, dtype=torch.bfloat16),
            "timestep": torch.zeros(1),
            "encoder_hidden_states": torch.empty(1, 512, 4096, dtype=torch.bfloat16),
        }
        for _ in range(2):
            with Launches() as counted:
                (out,) = model(**inputs, return_dict=False)
                out.sum().backward()
    return counted.by_name


def of_a_block(plan):
    """What two blocks launch more than one does."""
    return launches(plan, 2) - launches(plan, 1)


@PROVE
@pytest.mark.slow
def test_ulysses_adds_nine_kernels_to_a_block():
    plain, sharded = of_a_block(Plan()), of_a_block(Plan(ulysses=4))
    added = {name: n - plain[name] for name, n in (sharded | plain).items() if sharded[name] != plain[name]}
    print(f"a block launches {plain.total()} kernels, {sharded.total()} with Ulysses: {added}")
    # Each way one collective and one copy. The gradients of q, k and v, which are three tensors, are packed besides.
    assert added.pop("c10d.alltoall_base_.default") == 4
    assert sum(added.values()) == 5
