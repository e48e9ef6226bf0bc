"""diffusers' `enable_parallelism` on our engine: one device's gradients, and every option used or refused."""

import re
from pathlib import Path

import diffusers
import pytest
import torch
import torch.distributed as dist
from diffusers import AutoencoderKLWan, ContextParallelConfig, ParallelConfig, WanTransformer3DModel
from diffusers.models._modeling_parallel import TensorParallelConfig
from diffusers.models.modeling_utils import ModelMixin
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardformer
from opensora_accel import Plan, init_parallel, parallel_states
from opensora_accel.integrations import diffusers as parallel
from opensora_accel.observe.on_cpu import accelerator_stand_ins
from opensora_accel.precision import LiftOperations
from shardformer.tensor_parallel import full_tensor
from tests.models import wan, wan_inputs
from tests.shardformer.conformance import compare, fp64_model, in_double, step
from tests.tiers import PROVE, each_once
from tests.tolerances import RELATIVE
from tests.video_models import CASES

ROOT = Path(__file__).parents[2]
# Of diffusers' classes with a policy, those that make one picture.
IMAGE_MODELS = {"Flux", "Flux2", "QwenImage", "JoyImageEdit", "JoyImageEditPlus", "SD3", "ZImage"}

CONFIGS = {
    "ulysses 2": {"ulysses_degree": 2},
    "ring 3": {"ring_degree": 3},
    "ulysses 3, anything": {"ulysses_degree": 3, "ulysses_anything": True},
    "ring 2, anything": {"ring_degree": 2, "ring_anything": True},
    "ring 2 × ulysses 2": {"ring_degree": 2, "ulysses_degree": 2},
}
PLAIN = ("Wan", "LTX-Video", "HunyuanVideo", "CogVideoX")


def size(options):
    return options.get("ring_degree", 1) * options.get("ulysses_degree", 1)


# Gradients


def gradient_errors(name, options):
    case = CASES[name]
    inputs = in_double(case.inputs())
    with LiftOperations():
        expected = step(fp64_model(case), case, inputs)
        model = fp64_model(case)
        config = ContextParallelConfig(**options)
        if isinstance(model, ModelMixin):
            with parallel.install():
                model.enable_parallelism(config=config)
        else:
            parallel.enable_parallelism(model, config=config)
        found = step(model, case, inputs)
    return compare(found, expected)


@pytest.mark.parametrize(("name", "config"), each_once(PLAIN, CONFIGS, PLAIN[:2]))
def test_gradients_are_those_of_one_device(ranks, name, config):
    for found in ranks(size(CONFIGS[config]), gradient_errors, name, CONFIGS[config]):
        worst = max(found, key=lambda key: found[key])
        assert found[worst] < RELATIVE[torch.float64], worst


@PROVE
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", [name for name in CASES if name not in PLAIN])
def test_gradients_of_the_other_families(ranks, name, config):
    test_gradients_are_those_of_one_device(ranks, name, config)


def tensor_errors(name):
    case = CASES[name]
    inputs = in_double(case.inputs())
    with LiftOperations():
        expected = step(fp64_model(case), case, inputs)
        model = fp64_model(case)
        config = ParallelConfig(tensor_parallel_config=TensorParallelConfig(tp_degree=2))
        parallel.enable_parallelism(model, config=config)
        found = step(model, case, inputs)
    return compare({key: full_tensor(model, key, value) for key, value in found.items()}, expected)


def test_a_tensor_parallel_config_cuts_layers_where_the_policy_says_so(ranks):
    for found in ranks(4, tensor_errors, "MMDiT"):
        assert max(found.values()) < RELATIVE[torch.float64]


# Groups


def groups_of(config):
    parallel.enable_parallelism(wan(), config=config)
    names = ("data", "sequence", "ring", "ulysses", "mixed")
    return [dist.get_process_group_ranks(parallel_states.get_parallel_group(name)) for name in names]


def groups_over_the_world(options):
    return groups_of(ContextParallelConfig(**options))


def test_ranks_beyond_the_degrees_are_data_parallel(ranks):
    found = ranks(4, groups_over_the_world, {"ulysses_degree": 2})
    assert found[0] == [[0, 2], [0, 1], [0], [0, 1], [0, 1, 2, 3]]
    assert found[3] == [[1, 3], [2, 3], [3], [2, 3], [0, 1, 2, 3]]


def groups_over_a_mesh(shape, names, options):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    found = groups_of(ContextParallelConfig(**options, mesh=mesh))
    used = [parallel_states.get_parallel_group(name) for name in ("ring", "ulysses")]
    own = [mesh.get_group("ring"), mesh.get_group("ulysses")]
    # Of a group of one rank any other will do.
    assert all(mine is theirs for mine, theirs in zip(used, own, strict=True) if theirs.size() > 1)
    return found


def test_the_groups_of_a_mesh_are_used(ranks):
    found = ranks(4, groups_over_a_mesh, (2, 1, 2), ("ring", "ulysses", "fsdp"), {"ring_degree": 2})
    assert found[1] == [[0, 1], [1, 3], [1, 3], [1], [0, 1, 2, 3]]
    found = ranks(4, groups_over_a_mesh, (2, 1, 2), ("dp", "ring", "ulysses"), {"ulysses_degree": 2})
    assert found[1] == [[1, 3], [0, 1], [1], [0, 1], [0, 1, 2, 3]]
    options = {"ring_degree": 2, "ulysses_degree": 2}
    found = ranks(4, groups_over_a_mesh, (2, 1, 2), ("ring", "x", "ulysses"), options)
    assert found[1] == [[1], [0, 1, 2, 3], [1, 3], [0, 1], [0, 1, 2, 3]]


def mesh_errors(shape, names, options, slices):
    """Each data rank has a sample of its own, which the reference has in one batch."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    case = CASES["Wan"]
    inputs = in_double(case.inputs())
    with LiftOperations():
        expected = step(fp64_model(case), case, inputs)
        model = fp64_model(case)
        used = mesh["ring", "ulysses"] if slices else mesh
        parallel.enable_parallelism(model, config=ContextParallelConfig(**options, mesh=used))
        found = step(model, case, inputs)
    return compare(found, expected)


@pytest.mark.parametrize("slices", [False, True])
def test_gradients_over_a_mesh_whose_outer_dim_is_the_ring(ranks, slices):
    names, options = ("ring", "ulysses", "fsdp"), {"ring_degree": 2}
    for found in ranks(4, mesh_errors, (2, 1, 2), names, options, slices):
        assert max(found.values()) < RELATIVE[torch.float64]


def groups_that_are_there(plan, options):
    init_parallel(plan)
    mesh, before = parallel_states.get_mesh(), parallel_states.get_parallel_group("sequence")
    one, another = wan(), wan(heads=2)
    parallel.enable_parallelism(one, config=ContextParallelConfig(**options, mesh=mesh["ring", "ulysses"]))
    parallel.enable_parallelism(another, config=ContextParallelConfig(**options))
    assert parallel_states.get_parallel_group("sequence") is before
    with pytest.raises(
        ValueError, match=r"ring 1 × ulysses 4 × tp 1 over ranks \[0, 1, 2, 3\], but this process"
    ):
        parallel.enable_parallelism(wan(), config=ContextParallelConfig(ulysses_degree=4))


def test_groups_that_are_there_are_used(ranks):
    plan = Plan(dp_shard=2, ulysses=2, sharding="zero3")
    ranks(4, groups_that_are_there, plan, {"ulysses_degree": 2})


def groups_of_setters():
    parallel_states.set_sequence_parallel_group(dist.group.WORLD)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ring", "ulysses"))
    with pytest.raises(ValueError, match="leave the mesh out"):
        parallel.enable_parallelism(wan(), config=ContextParallelConfig(ulysses_degree=2, mesh=mesh))
    model, inputs = wan(), wan_inputs()
    expected = model(**inputs).sample
    parallel.enable_parallelism(model, config=ContextParallelConfig(ulysses_degree=2))
    assert torch.allclose(model(**inputs).sample, expected, atol=1e-6)


def test_groups_of_another_library_are_used(ranks):
    ranks(2, groups_of_setters)


# What cannot be


def refusals():
    model = wan()
    names = ("ring", "ulysses")

    def refused(match, config, error=ValueError, **options):
        with pytest.raises(error, match=match):
            parallel.enable_parallelism(model, config=config, **options)
        assert model._parallel_config is None and not hasattr(model, "_shardformer")

    def context(**options):
        return ContextParallelConfig(**{"ring_degree": 2} | options)

    def mesh(shape, names=names):
        return init_device_mesh("cpu", shape, mesh_dim_names=names)

    refused("takes a ContextParallelConfig.*got a Plan", Plan(ring=2))
    refused("names no parallelism", ParallelConfig())
    refused("cp_plan says where diffusers splits", context(), cp_plan=WanTransformer3DModel._cp_plan)
    refused("always merged in fp32", context(convert_to_fp32=False))
    other = context()
    other.rotate_method = "alltoall"
    refused("rotate_method='alltoall' is not known here", other)
    refused("the 4 ranks that are running cannot be parted into groups of 3", context(ring_degree=3))
    refused(r"needs 'ring' and 'ulysses', in this order", context(mesh=mesh((2, 2), ("ulysses", "ring"))))
    refused(r"has the dims \('ring', 'x'\)", context(mesh=mesh((2, 2), ("ring", "x"))))
    refused("2 ranks along 'tp', which hold different", context(mesh=mesh((2, 1, 2), (*names, "tp"))))
    refused("ring_degree=2 and ulysses_degree=1, but its mesh has ring=4", context(mesh=mesh((4, 1))))
    refused("leaves out ranks 2, 3", context(mesh=mesh((2, 1))))
    backwards = DeviceMesh("cpu", [[[1], [0]], [[3], [2]]], mesh_dim_names=("dp", *names))
    refused(r"ranks have to rise along ring.*got \[1, 0\]", context(mesh=backwards))
    refused("policy of WanTransformer3DModel says nothing of tensor", TensorParallelConfig(tp_degree=2))
    parallel.enable_parallelism(model, config=context(ring_degree=1, ulysses_degree=2, convert_to_fp32=False))
    with pytest.raises(RuntimeError, match="Parallelism is already applied to this WanTransformer3DModel"):
        parallel.enable_parallelism(model, config=context())


def test_what_cannot_be_is_refused_and_leaves_the_model_as_it_was(ranks):
    ranks(4, refusals)


def test_without_ranks_the_error_is_diffusers_own(parallel_registry):
    with pytest.raises(RuntimeError, match=r"torch.distributed must be available and initialized"):
        parallel.enable_parallelism(wan(), config=ContextParallelConfig(ulysses_degree=2))


# The method


def method_comes_and_goes():
    original = ModelMixin.enable_parallelism
    config = ContextParallelConfig(ulysses_degree=2)
    with pytest.raises(ValueError, match="call install"):
        parallel.uninstall()
    parallel.install()
    assert ModelMixin.enable_parallelism is not original
    with parallel.install():  # it was there before, and stays
        model, inputs = wan(), wan_inputs()
        expected = model(**inputs).sample
        model.enable_parallelism(config=config)
    assert ModelMixin.enable_parallelism is not original
    assert torch.allclose(model(**inputs).sample, expected, atol=1e-6)
    with pytest.raises(RuntimeError, match="already applied"):
        model.enable_parallelism(config=config)
    # A class without a policy keeps diffusers' method, with its errors.
    with accelerator_stand_ins(), pytest.raises(ValueError, match="`cp_plan` must be provided"):
        AutoencoderKLWan(base_dim=8, num_res_blocks=1).enable_parallelism(config=config)
    parallel.uninstall()
    assert ModelMixin.enable_parallelism is original
    # It sees that the model is parallel, though not by itself.
    with pytest.raises(RuntimeError, match="already applied"):
        model.enable_parallelism(config=config)
    parallel.disable_parallelism(model)
    assert torch.equal(model(**inputs).sample, expected)
    with pytest.raises(ValueError, match="enable_parallelism was not called with this WanTransformer3DModel"):
        parallel.disable_parallelism(model)
    parallel.enable_parallelism(model, config=config)


def test_the_method_comes_and_goes(ranks):
    ranks(2, method_comes_and_goes)


def loaded(folder):
    model, inputs = wan(torch.float32), wan_inputs(torch.float32)
    expected = model.eval()(**inputs).sample
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    with parallel.install():
        config = ParallelConfig(context_parallel_config=ContextParallelConfig(ring_degree=2))
        found = WanTransformer3DModel.from_pretrained(folder, parallel_config=config)
    assert hasattr(found, "_shardformer")
    assert torch.allclose(found(**inputs).sample, expected, atol=1e-5)
    with pytest.raises(RuntimeError, match="has been through enable_parallelism"):
        parallel.enable_parallelism(found, config=config)


def test_from_pretrained_takes_the_config(ranks, tmp_path):
    ranks(2, loaded, str(tmp_path))


def test_the_pages_count_the_classes():
    classes = [name for name in shardformer.policy.model_names() if hasattr(diffusers, name)]
    images = {name for name in classes if re.split("Transformer", name)[0] in IMAGE_MODELS}
    assert len(images) == len(IMAGE_MODELS)
    videos, with_plan = len(classes) - len(images), 6
    page = (ROOT / "docs/integrations/diffusers.md").read_text(encoding="utf-8")
    assert (
        f"all [{videos} video classes" in page and f"none for the other {videos - with_plan} classes" in page
    )
    readme, measured = (
        (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/measured.md")
    )
    assert f"in {len(CASES)} variants of {videos} diffusers transformers" in readme
    assert f"[{videos} of them, each" in readme and f"| {videos} video transformers of diffusers" in measured
    assert f", in {len(CASES)} variants: " in measured
    assert f"right loops, of all {len(CASES)} variants" in measured
