"""The verifier on plans that compress, and that have two levels: silent where they are right, and only there."""

import dataclasses
from unittest import mock

import pytest
import torch

import shardformer
from opensora_accel import Plan, init_parallel
from opensora_accel.communications import alltoall, transport
from opensora_accel.experiments import by_node
from opensora_accel.experiments.compressed import CompressedShards, RoundedSum
from opensora_accel.observe.meshes import meshes_of
from opensora_accel.verify import verify
from opensora_accel.verify.communication.promise import broken_promises
from opensora_accel.verify.communication.record_step import record_step
from tests.fsdp.steps import batch
from tests.models import wan
from tests.tiers import PROVE, some
from tests.verify.communication.recorded_steps import tiny_wan, wan_step

COMPRESSED = {
    "all": Plan(dp_shard=2, sharding="zero3", reduce_dtype="bf16", gather_dtype="int8"),
    "copies": Plan(
        dp_replicate=2, ulysses=2, sharding="HYBRID_SHARD", reduce_dtype="bf16", gather_dtype="fp8"
    ),
    "whole copies": Plan(dp_replicate=2, ulysses=2, sharding="zero3", sharding_factor=1, reduce_dtype="bf16"),
    "two levels": Plan(ulysses=4, sharding="zero3", gather_dtype="int8", two_level="on", ranks_per_node=2),
    "all-reduce by node": Plan(
        dp_replicate=4, sharding="zero3", sharding_factor=1, two_level="on", ranks_per_node=2
    ),
    "all-reduce by node, in bf16": Plan(
        dp_replicate=4, ulysses=2, sharding="zero3", reduce_dtype="bf16", two_level="on", ranks_per_node=4
    ),
}


@pytest.mark.parametrize("name", some(COMPRESSED, "whole copies", "all-reduce by node"))
@pytest.mark.parametrize("precision", some(["bf16", "fp32"]))
def test_what_they_send_is_what_they_promise(name, precision):
    plan = COMPRESSED[name].replace(precision=precision)
    assert broken_promises(record_step(wan_step, tiny_wan, plan)) == []


def gathers_as_they_are(model, run):
    """A step whose plan compresses, and that does not."""
    wan_step(model, run_with(run, gather_dtype="same"))


def run_with(run, **changes):
    """The same run with another plan on the same mesh."""
    return dataclasses.replace(run, shape=dataclasses.replace(run.shape, plan=run.plan.replace(**changes)))


def half_of_a_sum(_self, tensor, _group):
    """In place of an all-reduce between nodes: nothing."""


def test_levels_that_are_left_out_are_named():
    plan = COMPRESSED["all-reduce by node, in bf16"]
    with mock.patch.object(RoundedSum, "all_reduce_", half_of_a_sum):
        (found, *_) = broken_promises(record_step(wan_step, tiny_wan, plan))
    assert "reduced exactly once over mixed" in found.rule and "0 elements over dp_replicate" in found.actual


def test_gathers_that_are_not_compressed_are_named():
    (found,) = broken_promises(record_step(gathers_as_they_are, tiny_wan, COMPRESSED["all"]))
    assert found.rule == 'parameters are gathered in int8 (gather_dtype="int8")' and "float32" in found.actual


def test_meshes_have_what_the_plan_asks_for():
    meshes = meshes_of(Plan(dp_replicate=8, ulysses=4, sharding="HYBRID_SHARD", reduce_dtype="bf16",
                            gather_dtype="int8", two_level="auto", ranks_per_node=8))  # fmt: skip
    assert any(mesh.two_level == "on" and mesh.ulysses == 4 for mesh in meshes)
    assert all(mesh.reduce_dtype == "bf16" for mesh in meshes)
    assert any(mesh.gather_dtype == "int8" for mesh in meshes)
    assert any(mesh.overlap_ulysses for mesh in meshes_of(Plan(ulysses=2, overlap_ulysses=True)))


def step(model, run, factor=1.0):
    if not run.is_reference:
        init_parallel(run.plan)
        shardformer.shard(model, run.plan)
    inputs, target = batch(0, 0, slice(run.data_rank, None, run.data_size))
    (out,) = model(**inputs, return_dict=False)
    loss = (out - target).square().mean()
    (loss if run.is_reference else factor * loss).backward()
    return loss


def step_that_is_off(model, run):
    """By less than what rounding to bf16 leaves out."""
    return step(model, run, factor=1 + 2.0**-10)


def exchange(sent, group, piece_size=None):
    """In place of an exchange in two levels: pieces of two ranks are swapped."""
    received = _exchange(sent, group, piece_size)
    return received.flip(0) if by_node.get_nodes(group) is not None else received


_exchange = transport.exchange


def step_with_swapped_pieces(model, run):
    with mock.patch.object(alltoall, "exchange", exchange):
        return step(model, run)


def step_with_a_wrong_sum(model, run):
    """What is sent in bf16 is cut off instead of rounded: off by up to twice as much as it may be."""

    def cut_off(self, name, values):
        left_out = self._left_out.get(name)
        if left_out is not None and left_out.shape == values.shape:
            values += left_out
        # Of the 52 bits behind the point of an fp64 number the upper seven.
        cut = (values.view(torch.int64) & -(2**45)).view(torch.float64)
        self._left_out[name] = values - cut
        return torch.empty_like(cut, dtype=torch.bfloat16).copy_(cut)

    with mock.patch.object(RoundedSum, "_round", cut_off):
        return step(model, run)


def step_with_wrong_blocks(model, run):
    """Scales of two neighbouring blocks are swapped."""
    unpack = CompressedShards.unpack

    def swapped(self, messages, output):
        _exact, _blocks, scales = self._views(messages)
        scales.copy_(scales.roll(1, 1).clone())
        unpack(self, messages, output)

    with mock.patch.object(CompressedShards, "unpack", swapped):
        return step(model, run)


@PROVE
@pytest.mark.parametrize(
    "name",
    some(["all", "copies", "whole copies", "two levels", "all-reduce by node"], "all"),
)
def test_the_verifier_finds_them_right(name):
    report = verify(step, wan, [COMPRESSED[name]])
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("wrong", "name", "words"),
    [
        (step_that_is_off, "all", "1.000976|1.00098|1.001"),
        pytest.param(step_with_a_wrong_sum, "all", "a sum in bf16 may be off by", marks=PROVE),
        pytest.param(step_with_wrong_blocks, "all", "a gathered weight may be off by", marks=PROVE),
        pytest.param(step_with_swapped_pieces, "two levels", "", marks=PROVE),
    ],
)
def test_the_verifier_names_mistakes_that_rounding_would_hide(wrong, name, words):
    report = verify(wrong, wan, [COMPRESSED[name]])
    assert not report.ok and any(word in str(report) for word in words.split("|")), str(report)
