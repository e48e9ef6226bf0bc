"""Mistakes that the given sizes hide, and their right twins: found at other sizes, and said which of them matter."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from opensora_accel.communications import (
    all_to_all,
    gather_forward_split_backward,
    split_forward_gather_backward,
)
from opensora_accel.verify.beside_one_device import verify
from opensora_accel.verify.causes import Cause
from opensora_accel.verify.variations import Outcome, sizes_of, try_variations
from tests.tiers import PROVE, some
from tests.verify.loops import average, finish

SEQUENCE = [{"data": 2, "sequence": 2}, {"sequence": 4}]


class Attention(nn.Module):
    """[B, S, C] → [B, S, C], with as many keys' heads as `groups`. `exchange` goes between tokens and heads."""

    def __init__(self, heads, groups, width, fault):
        super().__init__()
        if heads % groups:
            raise ValueError(f"{heads} heads share keys of {groups}")
        self.heads, self.groups, self.fault, self.group = heads, groups, fault, None
        self.q, self.k = nn.Linear(4, heads * width), nn.Linear(4, groups * width)
        self.v, self.o = nn.Linear(4, groups * width), nn.Linear(heads * width, 4)

    def forward(self, x):
        length = x.shape[1]
        if self.group is not None:
            x = self.enter(x)
        q = self.q(x).unflatten(-1, (self.heads, -1))  # [B, S / P, H, D]
        k, v = (project(x).unflatten(-1, (self.groups, -1)) for project in (self.k, self.v))
        k, v = (self.repeat(each) for each in (k, v))
        if self.group is not None:
            q, k, v = (all_to_all(each, self.group, 2, 1) for each in (q, k, v))
        if self.fault == "transposed unless it is so":
            # [B, H, S, D] are asked for, and recognised by the heads where they are.
            q, k, v = (each if each.shape[1] == q.shape[2] else each.transpose(1, 2) for each in (q, k, v))
        else:
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        x = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        if self.group is not None:
            x = all_to_all(x, self.group, 1, 2)
        x = self.o(x.flatten(2))
        return x if self.group is None else self.leave(x, length)

    def repeat(self, keys):
        times = self.heads // self.groups
        if self.fault == "heads as they lie" and self.group is not None:
            return keys.repeat(
                1, 1, times, 1
            )  # [0 1 0 1] for [0 0 1 1]: alike where there is one group, or no repeat
        return keys.repeat_interleave(times, 2)

    def enter(self, x):
        if self.fault == "left over":
            x = x[:, : x.shape[1] // dist.get_world_size(self.group) * dist.get_world_size(self.group)]
        return split_forward_gather_backward(x, self.group, 1, "down")

    def leave(self, x, length):
        x = gather_forward_split_backward(x, self.group, 1, "up")
        return nn.functional.pad(x, (0, 0, 0, length - x.shape[1]))


def build(fault, heads, groups, width):
    return Attention(heads, groups, width, fault)


def spread(model, run, batch, tokens):
    forward = model
    if not run.is_reference:
        model.group = run.mesh.get_group("sequence")
        forward = DistributedDataParallel(model)
    return finish(forward(torch.randn(batch, tokens, 4)))


def step(model, run, batch=2, tokens=12):
    return spread(model, run, batch, tokens)


def right(heads=8, groups=8, width=2):
    return build("", heads, groups, width)


def left_over(heads=8, groups=8, width=2):
    return build("left over", heads, groups, width)


def heads_as_they_lie(heads=8, groups=8, width=2):
    return build("heads as they lie", heads, groups, width)


def summed_by_count(model, run, microbatches=2, batch=2):
    """Gradients of microbatches are divided by the samples of one: right where there are as many."""
    forward = model if run.is_reference else DistributedDataParallel(model)
    for _ in range(microbatches):
        divisor = microbatches if run.is_reference else batch
        (forward(torch.randn(batch, 3, 4)).square().mean() / divisor).backward()


def summed(model, run, microbatches=2, batch=2):
    forward = model if run.is_reference else DistributedDataParallel(model)
    for _ in range(microbatches):
        (forward(torch.randn(batch, 3, 4)).square().mean() / microbatches).backward()


class Square(nn.Module):
    """[B, S, 4] → [B, S, 4]. Where the batch has as many samples as tokens, `is_mixed_up` takes one for the other."""

    def __init__(self, is_mixed_up=False, dropout=0.0, forgets_masks=False):
        super().__init__()
        self.inner, self.out, self.dropout = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(dropout)
        self.is_mixed_up, self.forgets_masks, self.is_parallel = is_mixed_up, forgets_masks, False

    def forward(self, x):
        if self.is_mixed_up and self.is_parallel and x.shape[0] == x.shape[1]:
            x = x.transpose(0, 1)

        def block(x):
            return self.dropout(torch.tanh(self.inner(x)))

        x = x.cumsum(1)
        if self.is_parallel:
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=not self.forgets_masks)
        else:
            x = block(x)
        return self.out(x)


def square():
    return Square()


def mixed_up():
    return Square(is_mixed_up=True)


def dropping():
    return Square(dropout=0.3)


def forgetful():
    return Square(dropout=0.3, forgets_masks=True)


def by_hand(model, run, batch=2, tokens=5):
    model.is_parallel = not run.is_reference
    loss = finish(model(torch.randn(batch, tokens, 4)))
    if not run.is_reference:
        average(model.parameters())
    return loss


def refusing(model, run, batch=2, tokens=12):
    """As a library says it that cannot share out what does not divide."""
    if not run.is_reference and tokens % run.shape.degree("sequence"):
        raise ValueError(f"{tokens} tokens on {run.shape.degree('sequence')} ranks")
    return spread(model, run, batch, tokens)


WRONG = {
    "tokens left over": (step, left_over, SEQUENCE, "with tokens = 1"),
    "heads as they lie": (step, heads_as_they_lie, SEQUENCE, "with heads = "),
    "divided by the samples": (summed_by_count, square, [{"data": 2}], "with microbatches = "),
    "batch taken for tokens": (by_hand, mixed_up, [{"data": 2}, {"data": 3}], "where batch = tokens"),
    "recomputed with other masks": (by_hand, forgetful, [{"data": 2}, {"data": 3}], "with dropout on"),
}
RIGHT = {
    "attention": (step, right, SEQUENCE),
    "microbatches": (summed, square, [{"data": 2}]),
    "by hand": (by_hand, square, [{"data": 2}, {"data": 3}]),
    "dropout": (by_hand, dropping, [{"data": 2}, {"data": 3}]),
}


@pytest.mark.parametrize("name", some(WRONG, "batch taken for tokens"))
def test_what_the_given_sizes_hide_is_found_and_the_sizes_are_said(ranks, name):
    step, model_fn, meshes, at = WRONG[name]
    report = verify(step, model_fn, meshes, pool=ranks)
    # All meshes are right as the step is given.
    assert all(report.all_results.is_right(mesh) for mesh in report.results)
    assert not report.ok and report.causes[0].sentence.startswith(at), report
    assert f"but not {report.causes[0].at}" in report.verdict()
    assert report.to_dict()["findings"][0]["at"] == report.causes[0].at


@pytest.mark.parametrize("name", some(RIGHT, "by hand"))
def test_a_right_step_is_right_at_all_of_them(ranks, name):
    report = verify(*RIGHT[name], pool=ranks)
    assert report.ok, report
    assert report.variations.tried and not report.variations.refused


@PROVE
def test_dropout_is_tried_where_ranks_can_draw_the_masks_of_one_device(ranks):
    assert "dropout on" in verify(*RIGHT["dropout"], pool=ranks).variations.tried
    for reference in ("turns", "whole"):
        meshes = [{"data": 2}] if reference == "whole" else [{"sequence": 2}]
        report = verify(alone, dropping, meshes, reference=reference, pool=ranks)
        assert report.ok and report.variations.reason.startswith("none tried"), report


def alone(model, run):
    """Every rank does all of it."""
    torch.manual_seed(0)
    return finish(model(torch.randn(2, 3, 4)))


@PROVE
def test_what_the_step_refuses_is_no_mistake_and_is_said(ranks):
    report = verify(refusing, right, SEQUENCE, pool=ranks)
    assert report.ok, report
    assert "ValueError: 13 tokens on" in report.variations.refused["tokens = 13"]
    assert any("the step refuses" in note and "13 tokens on" in note for note in report.notes)


def test_sizes_are_whole_numbers_that_arguments_have_by_default():
    def model_fn(heads=4, scale=1.0, causal=True, offset=0, seed=1234, *, channels=16):
        pass

    assert sizes_of(model_fn, None, summed) == {"heads": 4, "channels": 16, "microbatches": 2, "batch": 2}
    with pytest.raises(ValueError, match="heads is 4 by default in model_fn and 5 in step"):
        sizes_of(model_fn, lambda model, run, heads=5: None)


def trials(sizes, *, runs=lambda sizes: True, wrong=lambda sizes: False, degree=3):
    """What is tried of a step that one device can run where `runs`, and that is wrong where `wrong`."""
    mistake = Cause(None)

    def prove(trial, looks_closer):
        return Outcome([mistake] if wrong(trial.sizes) else [], does_run=runs(trial.sizes))

    return try_variations(sizes, prove, lambda *_: None, degree=degree, with_dropout=False)


def test_each_size_is_changed_and_every_two_are_made_alike():
    assert trials({"a": 5, "b": 7}).tried == ("a = 6", "a = 1", "a = 3", "b = 8", "b = 1", "b = 3", "a = 7")


def test_a_size_that_one_device_cannot_run_gives_way_to_the_next():
    # Frames are 4n + 1, and the degree is none of them.
    found = trials({"frames": 5}, runs=lambda sizes: sizes["frames"] % 4 == 1)
    assert found.tried == ("frames = 9", "frames = 1")


@pytest.mark.parametrize(
    ("wrong", "at"),
    [
        (lambda s: s["a"] % 2 == 1 and s["a"] != 5, "with a = 1, 3 or 7 (right with 2, 4, 5, 6 and 8)"),
        (lambda s: s["a"] == s["b"], "where a = b"),
        (lambda s: s["a"] == s["b"] == 7, "with a = b = 7"),
    ],
)
def test_which_sizes_matter_is_found_by_changing_them_apart_and_together(wrong, at):
    assert trials({"a": 5, "b": 7}, wrong=wrong).causes[0].at == at
