"""diffusers' `enable_parallelism` beside FSDP2, on one mesh that has a dim "fsdp": one process's gradients."""

import logging

import pytest
import torch
from diffusers import ContextParallelConfig
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from opensora_accel.integrations import diffusers as parallel
from opensora_accel.precision import lift_casts
from tests.models import wan, wan_inputs
from tests.tiers import some
from tests.tolerances import RELATIVE, relative_errors


def fp64_wan():
    model = wan()
    lift_casts(model)
    return model


def gradients(model, samples):
    """Every parameter's, whole, of the mean loss of these samples."""
    inputs = {name: value[samples] for name, value in wan_inputs(batch=4).items()}
    (velocity,) = model(**inputs, return_dict=False)
    velocity.square().mean().backward()
    return {
        name: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        for name, p in model.named_parameters()
    }


def all_ranks(mesh):
    return mesh[mesh.mesh_dim_names]._flatten("all")


def copies_of_shards(mesh):
    """Two dims, of which the first is that of copies."""
    return mesh[tuple(name for name in mesh.mesh_dim_names if mesh[name].size() > 1)]


def blocks_first(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def over_a_mesh(shape, names, degrees, part, parallel_first):
    """Each rank along "fsdp" has two samples of its own."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model, config = fp64_wan(), ContextParallelConfig(**degrees, mesh=mesh)
    if parallel_first:
        parallel.enable_parallelism(model, config=config)
    blocks_first(model, part(mesh))
    if not parallel_first:
        parallel.enable_parallelism(model, config=config)
    place = mesh.get_local_rank("fsdp")
    return gradients(model, slice(2 * place, 2 * place + 2))


MESHES = [
    ((2, 1, 2), ("fsdp", "ring", "ulysses"), {"ulysses_degree": 2}),
    ((2, 2, 1), ("fsdp", "ring", "ulysses"), {"ring_degree": 2}),
    ((2, 1, 2), ("ring", "ulysses", "fsdp"), {"ring_degree": 2}),
    ((1, 2, 2), ("ring", "fsdp", "ulysses"), {"ulysses_degree": 2}),
]
# With what fully_shard gets, and whether it comes last.
CASES = [
    (*mesh, part, last) for mesh in MESHES for part in (all_ranks, copies_of_shards) for last in (True, False)
]


@pytest.mark.parametrize("case", some(CASES, CASES[0], CASES[11]))
def test_gradients_are_those_of_one_process(ranks, case):
    expected = gradients(fp64_wan(), slice(0, 4))
    for found in ranks(4, over_a_mesh, *case):
        errors = relative_errors(found, expected)
        assert len(errors) == len(expected) and max(errors.values()) < RELATIVE[torch.float64]


def told(part, parallel_first, by_blocks):
    """What is logged in two training steps, after one without gradients."""
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    parallel.logger.addHandler(handler)
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("fsdp", "ring", "ulysses"))
    model, config = fp64_wan(), ContextParallelConfig(ulysses_degree=2, mesh=mesh)
    if parallel_first:
        parallel.enable_parallelism(model, config=config)
    (blocks_first if by_blocks else fully_shard)(model, mesh=part(mesh))
    if not parallel_first:
        parallel.enable_parallelism(model, config=config)
    with torch.no_grad():
        model(**wan_inputs(batch=1), return_dict=False)
    for _ in range(2):
        gradients(model, slice(0, 2))
    parallel.logger.removeHandler(handler)
    return records


def only_fsdp(mesh):
    return mesh["fsdp"]


@pytest.mark.parametrize("case", some([(only_fsdp, True, False), (only_fsdp, False, True)]))
def test_a_mesh_without_the_ranks_that_share_a_sample_is_told(ranks, case):
    for rank, records in enumerate(ranks(4, told, *case)):
        (record,) = records
        assert (
            f"ranks {[rank % 2, rank % 2 + 2]}, but ranks {[rank - rank % 2, rank - rank % 2 + 1]}" in record
        )


@pytest.mark.prove
@pytest.mark.parametrize("part", [all_ranks, copies_of_shards])
def test_a_mesh_of_all_ranks_is_not_told(ranks, part):
    assert ranks(4, told, part, True, True) == [[]] * 4
