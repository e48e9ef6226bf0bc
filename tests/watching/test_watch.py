"""A run that is watched: a right one is let alone; what goes wrong is named by parameter, rank, axis, step and file."""

import logging
import re
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardformer
from opensora_accel import Plan, init_parallel, parallel_states
from opensora_accel.fsdp import set_last_microbatch
from opensora_accel.watching import LoopMistake, watch
from tests.profiler.timelines import one_second_step, share_of_step, shortened
from tests.tiers import some
from tests.video_models import CASES

PLANS = {
    "ddp": Plan(dp_replicate=2),
    "ulysses": Plan(ulysses=2, checkpoint="full", offload=1.0),
    "zero3": Plan(dp_shard=2, sharding="zero3"),
    "tp": Plan(tp=2),
    "copies of shards": Plan(dp_replicate=2, dp_shard=2, sharding="zero3"),
    "tp × ring": Plan(ring=2, tp=2),
}


# ---- between ranks


def build(plan):
    """A model whose layers a policy can cut, where the plan asks for that."""
    parallel_states.reset()
    init_parallel(plan)
    case = CASES["Wan" if plan.tp == 1 else "MMDiT"]
    model = shardformer.shard(case.make(), plan)
    wrapped = DistributedDataParallel(model) if plan.sharding == "none" and plan.tp == 1 else model
    return case, model, wrapped, torch.optim.AdamW(model.parameters(), 1e-3)


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def watched_steps(plan, wrong=None, rank=None, at=None, every=2, num_steps=5):
    """Losses of steps under a watch; in step `at`, `rank` is made wrong. With the error, where there was one."""
    case, model, wrapped, optimizer = build(plan)
    losses, hooks = [], (len(model._forward_pre_hooks), len(model._forward_hooks))
    # The samples are the same on all ranks, which the first steps would name.
    with watch(model, plan, every=every, check_steps=0) as run:
        try:
            for number in range(1, num_steps + 1):
                set_last_microbatch(model, True)
                loss = loss_of(wrapped, case.inputs())
                run.loss(loss)
                loss.backward()
                if plan.tp > 1 and plan.ring > 1:
                    # Without DDP the gradients of a ring's ranks are added up by the loop.
                    group = parallel_states.get_data_parallel_group(get_mixed_dp_pg=True)
                    for parameter in model.parameters():
                        dist.all_reduce(parameter.grad, group=group)
                if number == at and dist.get_rank() == rank:
                    wrong(model)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        except LoopMistake as error:
            return losses, str(error)
    assert (len(model._forward_pre_hooks), len(model._forward_hooks)) == hooks
    return losses, run.block_norms


def loss_of(model, inputs):
    out = model(**inputs)
    return (out if torch.is_tensor(out) else out[0]).square().mean()


def change_a_weight(model):
    with torch.no_grad():
        local(model.blocks[1].ffn.net[2].weight)[0, 0] += 1e-6


def change_a_cut_weight(model):
    with torch.no_grad():
        model.double_blocks[0].img_mlp[2].weight[0, 0] += 1e-6


def change_a_gradient(model):
    local(model.blocks[0].attn1.to_q.weight.grad)[-1] *= 1.001


def lose_a_gradient(model):
    model.proj_out.bias.grad = None


def unwatched(plan):
    case, model, wrapped, optimizer = build(plan)
    losses = []
    for _ in range(5):
        set_last_microbatch(model, True)
        loss = loss_of(wrapped, case.inputs())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", some([*PLANS], "ddp", "zero3"))
def test_right_runs_are_let_alone_and_stay_what_they_were(ranks, name):
    plan = PLANS[name]
    found = ranks(plan.world_size, watched_steps, plan)
    for losses, norms in found:
        assert len(losses) == 5, norms
        assert [*norms][-1] == "outside of the blocks" and len(norms) > 2
        assert all(norm > 0 for norm in norms.values()) and norms == found[0][1]
    if name != "tp × ring":
        assert [losses for losses, _ in found] == ranks(plan.world_size, unwatched, plan)


def norms_of(plan):
    """Norms of the blocks' gradients by a watch and by whole gradients."""
    from shardformer.tensor_parallel import full_tensor

    case, model, wrapped, _ = build(plan)
    with watch(model, plan, check_steps=0) as run:
        loss_of(wrapped, case.inputs()).backward()
        run.check()
        squares = dict.fromkeys(run.block_norms, 0.0)
        for name, parameter in model.named_parameters():
            block = next((each for each in squares if name.startswith(f"{each}.")), "outside of the blocks")
            squares[block] += full_tensor(model, name, parameter.grad).square().sum().item()
    return run.block_norms, {block: square**0.5 for block, square in squares.items()}


@pytest.mark.parametrize("name", some(["ddp", "zero3", "tp", "copies of shards"], "zero3"))
def test_norms_of_blocks_are_those_of_whole_gradients(ranks, name):
    for found, expected in ranks(PLANS[name].world_size, norms_of, PLANS[name]):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dtypes", [(torch.float64,), (torch.float64, torch.float32), (torch.bfloat16,)])
def test_norms_are_taken_of_any_dtype(dtypes):
    model = nn.Sequential(*(nn.Linear(3, 3, bias=False, dtype=dtype) for dtype in dtypes))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    with watch(model, check_steps=0) as run:
        run.check()
    assert sum(norm**2 for norm in run.block_norms.values()) == pytest.approx(4 * 9 * len(dtypes))


DIFFERENCES = {
    "a weight": ("ddp", change_a_weight, 1, "weight of blocks.1.ffn.net.2.weight differs over all ranks"),
    "a gradient": (
        "ulysses",
        change_a_gradient,
        0,
        "gradient of blocks.0.attn1.to_q.weight differs over all",
    ),
    "no gradient": (
        "ulysses",
        lose_a_gradient,
        1,
        "gradient of proj_out.bias differs over all ranks: ",
    ),
    "a shard": (
        "copies of shards",
        change_a_weight,
        2,
        "weight of blocks.1.ffn.net.2.weight differs along dp_rep",
    ),
    "a shard's gradient": (
        "copies of shards",
        change_a_gradient,
        3,
        "gradient of blocks.0.attn1.to_q.weight differs",
    ),
    "a cut weight": (
        "tp × ring",
        change_a_cut_weight,
        3,
        "weight of double_blocks.0.img_mlp.2.weight differs along data × sequence",
    ),
}


@pytest.mark.parametrize("which", some(DIFFERENCES, "a weight", "no gradient", "a shard"))
def test_what_differs_is_named_on_every_rank(ranks, which):
    name, wrong, rank, told = DIFFERENCES[which]
    plan = PLANS[name]
    found = ranks(plan.world_size, watched_steps, plan, wrong, rank, 3)
    messages = {message for _, message in found}
    assert len(messages) == 1, messages
    (message,) = messages
    assert message.startswith("in step 3 ") and f"the {told}" in message
    assert f"rank {rank} has " in message and "they were equal in step 1" in message


def test_what_differs_between_two_looks_is_found_at_the_next(ranks):
    for losses, message in ranks(2, watched_steps, PLANS["ddp"], change_a_weight, 1, 4):
        assert len(losses) == 4 and message.startswith("in step 5 ") and "equal in step 3" in message


def other_samples(_):
    """Ranks of a sequence group that draw other noise from the sixth step on, long after the first forwards."""
    plan = PLANS["ulysses"]
    case, model, wrapped, optimizer = build(plan)
    with watch(model, plan, every=3, check_steps=0):
        for number in range(1, 12):
            inputs = case.inputs()
            if number >= 6:
                torch.manual_seed(dist.get_rank())
                inputs["hidden_states"] = torch.randn_like(inputs["hidden_states"])
            try:
                wrapped(**inputs, return_dict=False)[0].square().mean().backward()
            except ValueError as error:
                return number, str(error)
            optimizer.step()
            optimizer.zero_grad()
    return None


def test_ranks_that_draw_other_noise_are_found_in_a_later_step(ranks):
    for number, message in ranks(2, other_samples, 0):
        assert number == 7 and message.startswith("in forward 7 rank 0 and rank 1 of a sequence group ")
        assert "different inputs: hidden_states" in message


# ---- what is not finite


class Breaks(nn.Module):
    """A module in the place of another one, whose output, or its gradient, is not finite on one rank."""

    def __init__(self, inner, where, rank):
        super().__init__()
        self.inner, self.where, self.rank = inner, where, rank
        self.is_on = False

    def forward(self, *args, **kwargs):
        out = self.inner(*args, **kwargs)
        if self.is_on and dist.get_rank() == self.rank:
            if self.where == "forward":
                return out + torch.where(torch.arange(out.size(-1)) == 2, torch.inf, 0.0)
            # 0 in forward, and in backward the slope of a root at 0.
            return out + (out * 0).abs().sqrt()
        return out


def nan_told(plan, where):
    """What is logged of a step in which a module between the two layers of an MLP breaks on rank 1."""
    case, model, wrapped, _ = build(plan)
    mlp = model.blocks[1].ffn
    breaking = Breaks(nn.Identity(), where, 1)
    if where == "weight":
        with torch.no_grad():
            wrapped(**case.inputs())  # in which the weights of a sequence group's ranks are compared
            if dist.get_rank() == 1:
                local(mlp.net[2].weight).view(-1)[3] = torch.nan
    else:
        mlp.net[1] = nn.Sequential(mlp.net[1], breaking)
    breaking.is_on = True
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("opensora_accel.watching.watch").addHandler(handler)
    try:
        with watch(model, plan, check_steps=0) as run:
            set_last_microbatch(model, True)
            loss = loss_of(wrapped, case.inputs())
            run.loss(loss, samples=[f"clip_{dist.get_rank()}.mp4"])
            (loss * (torch.nan if where == "loss" else 1.0)).backward()
            before = {name: local(p.grad).clone() for name, p in model.named_parameters()}
            state = torch.get_rng_state()
            run.check()
            kept = all(
                torch.equal(before[name].view(torch.int32), local(p.grad).view(torch.int32))
                for name, p in model.named_parameters()
            )
            assert kept and torch.equal(state, torch.get_rng_state())
    finally:
        logging.getLogger("opensora_accel.watching.watch").removeHandler(handler)
    return records


NOT_FINITE = {
    "forward": r"first in blocks\.1\.ffn\.net\.1\.1, forward, on rank 1;",
    # What lies behind it there are identities.
    "backward": r"first in what follows blocks\.1\.ffn\.net\.0, backward, on rank 1;",
    "loss": r"first in the loss: the gradient of the model's output 0, on ranks 0, 1;",
    "weight": r"first in blocks\.1\.ffn\.net\.2, forward, on ranks? [01, ]+; the weight "
    r"blocks\.1\.ffn\.net\.2\.weight itself is not finite on rank 1;",
}


@pytest.mark.parametrize("name", some(["ddp", "ulysses", "zero3"], "ulysses"))
@pytest.mark.parametrize("where", NOT_FINITE)
def test_the_first_module_and_rank_are_named(ranks, name, where):
    plan = PLANS[name]
    records = ranks(plan.world_size, nan_told, plan, where)
    (message,), *others = records
    assert all(not each for each in others), "rank 0 tells of all"
    assert re.search(r"the gradient norm of step 1 is (nan|inf): ", message), message
    assert re.search(NOT_FINITE[where], message), message
    assert message.endswith("its files: clip_0.mp4, clip_1.mp4")


# ---- spikes


def test_a_spike_is_told_with_its_files_and_its_block(caplog):
    case = CASES["Wan"]
    model = case.make()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with caplog.at_level(logging.WARNING), watch(model, spike=4.0, every=10, check_steps=0) as run:
        for number in range(1, 31):
            loss = model(**case.inputs(), return_dict=False)[0].square().mean()
            run.loss(loss * (9 if number == 27 else 1), samples=[f"{number}.mp4", f"{number}.mp4"])
            loss.backward()
            if number == 25:
                model.blocks[1].attn1.to_k.weight.grad += 1000
            # Clipped ones would not show it.
            run.check()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    own = [record for record in caplog.records if record.name == "opensora_accel.watching.watch"]
    norm, loss = (record.getMessage() for record in own)
    assert "the gradient norm of step 25 is " in norm and "most of it in blocks.1: " in norm
    assert norm.endswith("when last looked at; its files: 25.mp4")
    found = re.search(r"most of it in blocks\.1: (\S+), (\S+) when last looked at", norm)
    assert found and float(found[1]) > 1000 * float(found[2]) > 0
    assert "the loss of step 27 on rank 0 is " in loss and loss.endswith("of 26 steps; its files: 27.mp4")


def test_wrong_arguments_are_refused():
    model = nn.Linear(2, 2)
    wrongs = (
        {"every": 0},
        {"check_steps": -1},
        {"spike": 1.0},
        {"spike": float("nan")},
        {"plan": Plan(ulysses=2)},
    )
    for wrong in wrongs:
        with pytest.raises(
            ValueError, match=r"every must|check_steps must|spike must|the plan is for 2 ranks"
        ):
            watch(model, **wrong)


@pytest.mark.parametrize("check_steps", [0, 2])
def test_what_is_not_finite_is_traced_in_any_step(caplog, check_steps):
    """In a loop that does not say where a step ends, and skips the steps that are not finite."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Identity(), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with caplog.at_level(logging.WARNING), watch(model, check_steps=check_steps) as run:
        for number in range(1, 8):
            loss = model(torch.randn(4, 3) * (torch.inf if number in (3, 4, 6) else 1)).square().mean()
            run.loss(loss, samples=[f"{number}.mp4"])
            loss.backward()
            run.check()
            if number not in (3, 4, 6):
                optimizer.step()
            optimizer.zero_grad()
    messages = [record.getMessage() for record in caplog.records if "gradient norm" in record.getMessage()]
    for message, number in zip(messages, (3, 4, 6), strict=True):
        assert f"of step {number} is nan: first in tensor 0 that the model was called with" in message
        assert message.endswith(f"its files: {number}.mp4")


def test_a_clip_hides_no_spike_where_the_loop_gives_no_loss():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with watch(model, every=1, check_steps=0) as run:
        for number in range(1, 5):
            model(torch.ones(4, 3)).mul(1000).sum().backward()
            run.check()
            assert run.last_look == number and run.block_norms["outside of the blocks"] > 1000
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def test_the_last_step_is_looked_at_too(caplog):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with caplog.at_level(logging.WARNING), watch(model, check_steps=0) as run:
        for number in range(1, 31):
            loss = model(torch.ones(4, 3)).square().mean() + 1
            run.loss(loss * (1000 if number == 30 else 1), samples=[f"{number}.mp4"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    (message,) = [record.getMessage() for record in caplog.records]
    assert "the loss of step 30 on rank 0" in message and message.endswith("its files: 30.mp4")


def test_no_hook_is_left_by_an_error_at_the_start():
    model = nn.Linear(2, 2)
    hooks, normal = len(model._forward_pre_hooks), torch.randn
    with (
        mock.patch("opensora_accel.watching.first_steps.first_difference", side_effect=RuntimeError("gone")),
        pytest.raises(RuntimeError, match="gone"),
        watch(model),
    ):
        pass
    assert len(model._forward_pre_hooks) == hooks and torch.randn is normal


def test_no_input_outlives_its_step():
    import gc
    import weakref

    model, kept = nn.Linear(2, 2), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model):
        for _ in range(3):
            x = torch.randn(1, 2)
            kept.append(weakref.ref(x))
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            del x
            gc.collect()
            assert kept[-1]() is None


def costs():
    """Processor times of steps that look over the ranks, of others that are watched, and of those that are not."""
    init_parallel(Plan(dp_replicate=2))
    model, inputs = one_second_step()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(inputs, run=None):
        begin = time.process_time()
        if run is not None:
            run.loss(1.0)
        model(**inputs, return_dict=False)[0].square().mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        if run is not None:
            run.check(norm)
        optimizer.step()
        optimizer.zero_grad()
        if run is not None:
            run.step()
        return time.process_time() - begin

    def turns(inputs, number):
        for _ in range(number):
            with watch(model, every=100, check_steps=0) as run:
                look, watched = step(inputs, run), step(inputs, run)  # the first step looks over the ranks
            yield look, watched, step(inputs)

    step(inputs)
    return list(turns(shortened(inputs), 40)), list(turns(inputs, 9))


@pytest.mark.alone
def test_what_a_watch_costs(ranks):
    short, long = ranks(2, costs)[0]
    look, watched = (
        share_of_step([(turn[place], turn[2]) for turn in short], [(turn[place], turn[2]) for turn in long])
        for place in (0, 1)
    )
    assert watched + look / 100 < 0.01  # of a hundred steps one looks
