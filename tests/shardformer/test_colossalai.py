"""Our tables under ColossalAI. What needs it runs where it is installed: see tests/colossalai_requirements.txt."""

import importlib.util
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import opensora_accel
import shardformer
from opensora_accel import Plan, init_parallel, parallel_states
from opensora_accel.precision import LiftOperations
from shardformer.colossalai import colossalai_policy, register_groups
from shardformer.colossalai.norms import norm_replacements
from shardformer.modeling import T5LayerNorm, replace_t5_norms
from shardformer.policy.base import Policy
from shardformer.policy.t5_encoder import T5EncoderPolicy
from tests.integrations.pages import replaced
from tests.shardformer.conformance import compare, fp64_model, in_double, step
from tests.shardformer.test_t5 import encoder
from tests.tolerances import RELATIVE, relative_errors
from tests.video_models import CASES

needs_colossalai = pytest.mark.skipif(
    importlib.util.find_spec("colossalai") is None,
    reason="ColossalAI is not installed; tests/colossalai_requirements.txt says how",
)
ROOT = Path(__file__).parents[2]
EXACT = RELATIVE[torch.float64]


# Without ColossalAI

MISSING = """
import sys
import shardformer, shardformer.colossalai, shardformer.policy.t5_encoder
assert not [name for name in sys.modules if name.split(".")[0] == "colossalai"], "it was imported before it was needed"
sys.modules["colossalai"] = None
policy = shardformer.policy.t5_encoder.T5EncoderPolicy()
for use in (shardformer.colossalai.colossalai_policy, lambda: policy.set_model(None)):
    try:
        use()
    except ImportError as error:
        assert "--no-deps colossalai==0.5.0" in str(error) and "torch 2.13" in str(error), error
    else:
        raise AssertionError("no error")
"""


@pytest.mark.slow
def test_it_is_imported_on_use_only_and_its_absence_says_what_to_install():
    done = subprocess.run([sys.executable, "-c", MISSING], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_the_error_names_what_the_requirements_file_has():
    from shardformer.colossalai import policy

    lines = (ROOT / "tests/colossalai_requirements.txt").read_text().splitlines()
    source = Path(policy.__file__).read_text()
    pins = [line for line in lines if "==" in line and not line.startswith("#")]
    assert len(pins) == 6 and all(pin in source for pin in pins)


def test_norms_are_named_by_the_class_of_their_parent():
    model = encoder("t5")
    found = norm_replacements(model, T5EncoderPolicy())
    assert {parent.__name__: names for parent, names in found.items()} == {
        "T5LayerSelfAttention": {"layer_norm": T5LayerNorm},
        "T5LayerFF": {"layer_norm": T5LayerNorm},
        "T5Stack": {"final_layer_norm": T5LayerNorm},
    }
    shardformer.shard(model, Plan())
    assert norm_replacements(model, T5EncoderPolicy()) == {}, "nothing is left to replace"


def test_a_norm_that_a_class_cannot_name_alone_is_refused():
    class Pair(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.norm = norm

    model = nn.Sequential(Pair(nn.RMSNorm(4)), Pair(nn.LayerNorm(4)))
    table = Policy(("Sequential",), replacements=(replace_t5_norms,))
    with pytest.raises(ValueError, match=r"replaces 'norm' in every Pair, but 1\.norm is a LayerNorm"):
        norm_replacements(model, table)


def test_a_table_has_no_other_methods_than_those_asked_for():
    with pytest.raises(AttributeError, match="'T5EncoderPolicy' object has no attribute 'tie_weights'"):
        T5EncoderPolicy().tie_weights  # noqa: B018
    assert T5EncoderPolicy() == T5EncoderPolicy()


# Open-Sora's own use


@needs_colossalai
@pytest.mark.parametrize("kind", ["t5", "umt5"])
def test_open_soras_code_for_t5_runs_with_another_import(kind, caplog):
    from colossalai.shardformer import ShardConfig, ShardFormer

    ids = torch.randint(0, 128, (2, 9), generator=torch.Generator().manual_seed(1))
    policy = T5EncoderPolicy()
    for _ in range(2):  # one policy for two models
        model = encoder(kind)
        expected = model(input_ids=ids).last_hidden_state
        before = dict(model.named_parameters())
        # As in Open-Sora's text encoder:
        shard_config = ShardConfig(
            tensor_parallel_process_group=None,
            pipeline_stage_manager=None,
            enable_tensor_parallelism=False,
            enable_fused_normalization=False,
            enable_flash_attention=False,
            enable_jit_fused=True,
            enable_sequence_parallelism=False,
        )
        shard_former = ShardFormer(shard_config=shard_config)
        optim_model, _ = shard_former.optimize(model, policy=policy)
        assert optim_model is model and sum(type(m) is T5LayerNorm for m in model.modules()) == 5
        assert all(before[name] is parameter for name, parameter in model.named_parameters())
        assert torch.equal(model(input_ids=ids).last_hidden_state, expected)
    assert "enable_jit_fused=True fuses nothing" in caplog.text


# Sequence parallelism

PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/colossalai.md").read_text(encoding="utf-8"), re.S)
BOOSTED = replaced(PROGRAMS[1], ("colossalai.launch_from_torch()\n", ""))  # a test's ranks are there already


def sharded_by_shardformer(name, plan, own_plan):
    """Errors against one device in fp64, and whether every number is that of `shardformer.shard`."""
    from colossalai.shardformer import ShardConfig, ShardFormer

    init_parallel(plan)
    case = CASES[name]
    inputs = in_double(case.inputs())
    with LiftOperations():
        expected = step(fp64_model(case), case, inputs)
        ours = step(shardformer.shard(fp64_model(case), plan), case, inputs)
        config = ShardConfig(
            enable_tensor_parallelism=False,
            enable_sequence_parallelism=True,
            sequence_parallelism_mode="ring_attn" if plan.ring > 1 else "all_to_all",
            sequence_parallel_process_group=parallel_states.get_sequence_parallel_group(),
        )
        policy = colossalai_policy(plan=plan if own_plan else None)
        model, _ = ShardFormer(config).optimize(fp64_model(case), policy=policy)
        found = step(model, case, inputs)
    same = all(torch.equal(found[key], value) for key, value in ours.items())
    return compare(found, expected), same


@needs_colossalai
@pytest.mark.parametrize(
    ("plan", "own_plan"),
    [
        (Plan(ulysses=2), False),
        (Plan(ring=2), False),
        (Plan(ulysses=2, checkpoint="full", offload=1.0), True),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["Wan", "HunyuanVideo", "MMDiT"])
def test_gradients_under_shardformer_are_those_of_one_device(ranks, name, plan, own_plan):
    for found, same in ranks(2, sharded_by_shardformer, name, plan, own_plan):
        assert max(found.values()) < EXACT
        assert same


def updates(name, plan, boosted):
    """What three steps of two samples change in every parameter, on this rank: by the page's loop, or on one device."""
    case = CASES[name]
    inputs = in_double(case.inputs())
    model = fp64_model(case)
    with torch.no_grad():
        targets = model(**inputs, return_dict=False)[0]
    # Samples that differ, though the case has two.
    dataset = [
        ({key: value[number % 2] for key, value in inputs.items()}, targets[number % 2] * (2 + number))
        for number in range(6)
    ]
    parameters = dict(model.named_parameters())
    before = {key: parameter.detach().clone() for key, parameter in parameters.items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if boosted:
        scope = {"model": model, "optimizer": optimizer, "dataset": dataset, "PLAN": plan}
        loop = replaced(
            BOOSTED,
            ("colossalai_policy()", "colossalai_policy(plan=PLAN)"),
            ("batch_size=1, shuffle=True", f"batch_size={2 // plan.data}, shuffle=False"),
        )
        exec(compile(loop, "docs/colossalai.md", "exec"), scope)
    else:
        for inputs, target in torch.utils.data.DataLoader(dataset, batch_size=2):
            (model(**inputs, return_dict=False)[0] - target).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return {key: parameter.detach() - before[key] for key, parameter in parameters.items()}


def booster_errors(name, plan):
    with LiftOperations():
        expected, found = updates(name, plan, boosted=False), updates(name, plan, boosted=True)
    errors = relative_errors(found, expected)
    groups = [
        parallel_states.get_parallel_group(name).size() for name in ("data", "sequence", "mixed", "tensor")
    ]
    return errors, groups


@needs_colossalai
@pytest.mark.parametrize(
    "plan",
    [Plan(ulysses=2), Plan(ulysses=2, checkpoint="full"), Plan(dp_replicate=2, ulysses=2)],
    ids=str,
)
@pytest.mark.parametrize("name", ["Wan", "HunyuanVideo"])
def test_training_with_the_hybrid_plugin_is_that_of_one_device(ranks, name, plan):
    for errors, groups in ranks(plan.world_size, booster_errors, name, plan):
        assert max(errors.values()) < EXACT
        assert groups == [plan.data, plan.sequence, plan.mixed, 1]


# Refusals


def refusals():
    """What each wrong request says, on one rank of two."""
    from colossalai.booster.plugin import HybridParallelPlugin
    from colossalai.shardformer import ShardConfig, ShardFormer

    def said(policy=None, **options):
        config = {"enable_tensor_parallelism": False, **options}
        model = CASES["Wan"].make()
        before = [type(module) for module in model.modules()]
        try:
            ShardFormer(ShardConfig(**config)).optimize(model, policy=policy or colossalai_policy())
        except ValueError as error:
            assert [type(module) for module in model.modules()] == before
            return str(error)
        return "nothing"

    sequence = {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all"}
    found = {
        "no group": said(**sequence),
        "tensor": said(enable_tensor_parallelism=True),
        "plan": said(colossalai_policy(plan=Plan(ulysses=2))),
        "sharding": said(colossalai_policy(plan=Plan(dp_shard=2, sharding="zero3"))),
        "fp8": said(fp8_communication=True),
        "checkpoint": said(gradient_checkpoint_config=object()),
    }
    plugin = HybridParallelPlugin(
        tp_size=2,
        pp_size=1,
        precision="fp32",
        enable_sequence_parallelism=True,
        sequence_parallelism_mode="split_gather",
    )
    try:
        register_groups(plugin)
    except ValueError as error:
        found["mode"] = str(error)
    return found


@needs_colossalai
def test_what_cannot_be_done_is_refused_before_the_model_changes(ranks):
    for found in ranks(2, refusals):
        assert (
            "ranks [0, 1], but none is registered; call shardformer.colossalai.register_groups"
            in found["no group"]
        )
        assert "tensor parallelism over 2 ranks" in found["tensor"] and "use tp_size=1" in found["tensor"]
        assert "the plan has 2 sequence ranks and the ShardConfig 1" in found["plan"]
        assert 'use sharding="none"' in found["sharding"]
        assert "leave it False" in found["fp8"]
        assert 'plan=Plan(checkpoint="full")' in found["checkpoint"]
        assert 'use "all_to_all" (Ulysses) or "ring_attn"' in found["mode"]


# Launchers

LAUNCHED = """
import colossalai, os, sys, torch
colossalai.launch_from_torch()
import opensora_accel
import shardformer
from opensora_accel import Plan, init_parallel
from tests.video_models import CASES

plan = Plan(ulysses=2)
init_parallel(plan)
case = CASES["Wan"]
model = torch.nn.parallel.DistributedDataParallel(shardformer.shard(case.make(), plan))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(3):
    loss = model(**case.inputs(), return_dict=False)[0].square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if torch.distributed.get_rank() == 0:
        print("loss", loss.item().hex(), flush=True)
torch.distributed.destroy_process_group()
"""
PLACE = ["--nproc_per_node", "2", "--master_addr", "127.0.0.1"]
LAUNCHERS = {"torchrun": ["torchrun"], "colossalai": ["colossalai", "run"]}


@needs_colossalai
def test_colossalai_run_and_torchrun_give_identical_losses(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(LAUNCHED)
    # `colossalai run` starts `torchrun` by name: that of this environment.
    here = Path(sys.executable).parent
    environment = {"PATH": f"{here}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    losses = {}
    for name, (program, *arguments) in LAUNCHERS.items():
        command = [here / program, *arguments, *PLACE, "--master_port", str(free_port()), script]
        done = subprocess.run(
            list(map(str, command)),
            capture_output=True,
            text=True,
            timeout=240,
            cwd=ROOT,
            env=os.environ | environment,
        )
        losses[name] = [line for line in done.stdout.splitlines() if line.startswith("loss")]
        assert done.returncode == 0 and len(losses[name]) == 3, done.stdout + done.stderr
    assert losses["torchrun"] == losses["colossalai"]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def zero_with_sequence_ranks():
    """Open-Sora's plugin, made as its training script does, and its groups in our registry."""
    opensora_accel.install_as("opensora.acceleration")
    from opensora.acceleration.plugin import ZeroSeqParallelPlugin

    plugin = ZeroSeqParallelPlugin(sp_size=2, stage=2, precision="fp32", max_norm=1.0)
    register_groups(plugin)
    loader = plugin.prepare_dataloader(list(range(8)), batch_size=2, shuffle=True)
    same = [torch.stack(list(loader)).tolist()]
    dist.all_gather_object(everyone := [None] * 4, same)
    with pytest.raises(ValueError, match="sp_size must divide the 4 ranks; got 3"):
        ZeroSeqParallelPlugin(sp_size=3)
    groups = (parallel_states.get_sequence_parallel_group(), parallel_states.get_data_parallel_group())
    mixed = parallel_states.get_data_parallel_group(get_mixed_dp_pg=True)
    return [dist.get_process_group_ranks(group) for group in (*groups, mixed)], everyone


@needs_colossalai
def test_open_soras_plugin_has_groups_and_batches_of_sequence_ranks(ranks):
    """ZeRO itself does not run on a CPU."""
    for rank, ((sequence, data, mixed), batches) in enumerate(ranks(4, zero_with_sequence_ranks)):
        assert sequence == [rank // 2 * 2, rank // 2 * 2 + 1] and data == [rank % 2, rank % 2 + 2]
        assert mixed == [0, 1, 2, 3]
        assert batches[0] == batches[1] and batches[2] == batches[3] and batches[0] != batches[2]
