"""A right loop is let alone, under each wrapper; every mistake in it is named, on all ranks, within two steps."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

import shardformer
from opensora_accel import Plan, init_parallel
from opensora_accel.arguments import tensors_in
from opensora_accel.fsdp import set_last_microbatch
from opensora_accel.parallel_states import get_data_parallel_group, get_sequence_parallel_group
from opensora_accel.training.flow import generator
from opensora_accel.watching import REMEDIES, LoopMistake, watch
from shardformer import clip_grad_norm_
from shardformer.tensor_parallel import full_state_dict
from tests.models import wan
from tests.tiers import PROVE, some
from tests.video_models import CASES

ULYSSES = Plan(dp_replicate=2, ulysses=2)
RING = Plan(ring=3)
SHARDED = Plan(dp_shard=2, ulysses=2, sharding="zero3")


def clips(number, frames=5):
    draw = generator(0, "clip", number)
    return torch.randn(16, frames, 6, 10, generator=draw), torch.randn(7, 32, generator=draw)


class Loop:
    """Two steps, each of two backwards of two samples; `wrong` is what it does wrong."""

    def __init__(self, plan, wrong, dtype=torch.float32):
        self.plan, self.wrong = plan, wrong
        self.is_averaged_by_hand = wrong == "averaged by hand" or wrong.startswith("moved, averaged")
        init_parallel(plan)
        data = get_data_parallel_group()
        self.rank, self.data_rank = dist.get_rank(), 0 if data is None else data.rank()
        model = wan(dtype)
        others = list(copy.deepcopy(model).parameters()) if wrong == "optimizer of a copy" else None
        self.ema = copy.deepcopy(model)
        self.model = shardformer.shard(model, plan)
        self.wrapped = self.model
        if plan.sharding != "none":
            self.ema = shardformer.shard(self.ema, plan)
        elif wrong == "averaged over data ranks":
            self.wrapped = DistributedDataParallel(self.model, process_group=data)
        elif wrong not in ("not averaged", "added up", "clipped before the average") and (
            not self.is_averaged_by_hand
        ):
            mixed = get_data_parallel_group(get_mixed_dp_pg=True)
            self.wrapped = DistributedDataParallel(
                self.model, process_group=mixed, static_graph=wrong == "static graph"
            )
        if wrong == "weights" and self.rank == 1:
            nn.init.normal_(model.proj_out.weight)  # DDP made them equal
        for block in shardformer.blocks_of(self.model) if wrong == "compiled" else ():
            block.compile()
        for module in self.model.modules():
            if wrong == "divided by FSDP2" and isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo divides by nothing else
                module.set_gradient_divide_factor(2 * dist.get_world_size())
        self.buffers = {}
        parameters = others or list(self.model.parameters())
        parameters = parameters[:-1] if wrong == "a weight left out" else parameters
        halves = [parameters[::2], parameters[1::2]] if wrong == "two optimizers" else [parameters]
        self.optimizers = [torch.optim.AdamW(half, 1e-3) for half in halves]
        if wrong == "no rate":
            self.optimizers = [
                torch.optim.AdamW([{"params": parameters[1:]}, {"params": parameters[:1], "lr": 0.0}])
            ]
        self.warm_up = 0.0 if wrong == "warm-up from 0" else 1.0

    def run(self, num_steps=3, **options):
        ema = None if self.wrong == "no ema" else self.ema
        with watch(self.model, ema=ema, **options) as check:
            for step in range(num_steps):
                if self.wrong.startswith("all skip a step"):
                    self.backward(check, 9 + step, 0)
                    self.optimizers[0].zero_grad()
                if self.wrong == "all skip a loss":
                    self.backward(check, 9 + step, None)
                if self.wrong in ("closure", "added up in a closure"):
                    self.optimizers[0].step(lambda step=step: self.closure(check, step))
                    self.average()
                    continue
                for part in range(2):
                    self.backward(check, step, part)
                    self.move()
                self.scale()
                self.update(step)
                if step == 0 and self.wrong != "one rank skips":
                    self.sample(check)

    def move(self):
        """Gradients accumulate in buffers of the loop, and `.grad` is empty before each backward."""
        if not self.wrong.startswith("moved"):
            return
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                is_left_out = self.wrong == "moved, one left out"
                before = 0 if is_left_out else self.buffers.get(parameter, 0)
                self.buffers[parameter] = parameter.grad + before
                parameter.grad = None

    def closure(self, check, step):
        self.optimizers[0].zero_grad()
        for part in range(2):
            loss = self.backward(check, step, part)
        if self.wrong == "added up in a closure":
            self.add_up(get_sequence_parallel_group())
        return loss

    def add_up(self, group):
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=group)

    def backward(self, check, step, part):
        """`part` None: the loss is found wanting, and no backward follows."""
        is_wanting, part = part is None, part or 0
        by = self.rank if self.wrong in ("sample", "sampler by rank") else self.data_rank
        if self.wrong == "repeated samples":
            by = 0
        numbers = [100 * step + 10 * part + 4 * by + i for i in range(2)]
        is_other = self.rank % 2 == 1
        latents, texts = zip(
            *(clips(n, 3 if self.wrong == "bucket" and is_other else 5) for n in numbers), strict=True
        )
        latents, texts = torch.stack(latents), torch.stack(texts)
        if self.wrong == "caption dropout" and is_other:
            texts[0] = 0
        noise = torch.randn(latents.shape, generator=self.noise_of(step, part))
        time = torch.rand(2, generator=torch.Generator().manual_seed(numbers[0]))
        if self.wrong == "timestep":
            time = torch.rand(2, generator=torch.Generator().manual_seed(self.rank))
        if self.wrong == "repeated timestep":
            time = torch.rand(2, generator=torch.Generator().manual_seed(100 * step + part))
        if self.wrong == "one timestep":
            time = torch.ones(2)
        noisy = torch.lerp(latents, noise, time[:, None, None, None, None])
        is_last = part == 1
        if self.plan.sharding != "none":
            set_last_microbatch(self.model, is_last)
        out = self.wrapped(noisy, 1000 * time, texts, return_dict=False)[0]
        error = out - (noise - latents)
        if self.wrong == "loss of a part":
            error = error.chunk(2, dim=2)[self.rank % 2]
        loss = error.square().mean()
        if self.wrong == "detached" or (self.wrong == "detached on one rank" and self.rank == 1):
            check.loss(loss.detach(), numbers)
        else:
            check.loss(loss, numbers if self.wrong != "sampler by rank" else [self.rank])
        is_whole = self.wrong.endswith(("not divided", "divided after"))
        scale = 1 if is_whole else {"divided by ranks": 2 * 2}.get(self.wrong, 2)
        if self.wrong in ("scaler", "scaler, added up"):
            loss = loss * 4096
        if is_wanting:
            return None
        if self.wrong == "cleared before the backward" and part == 0:
            self.optimizers[0].zero_grad()
        (loss / scale).backward()
        return loss.detach()

    def noise_of(self, step, part):
        """A generator."""
        seed = {
            "noise": self.rank,
            "repeated noise": step,
            "all skip a step of one noise": 10 * part + self.data_rank,
            "noise of the step": 100 * step + self.data_rank,
            "moved, noise of the step": 100 * step + self.data_rank,
        }
        return torch.Generator().manual_seed(seed.get(self.wrong, 100 * step + 10 * part + self.data_rank))

    def scale(self):
        """What happens to gradients between backward and step."""
        for parameter, buffer in self.buffers.items():
            parameter.grad = buffer / (2 if self.wrong.endswith(", divided after") else 1)
        self.buffers.clear()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if self.wrong == "clipped before the average":
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1e-3)
        if self.wrong in ("added up", "clipped before the average") or self.is_averaged_by_hand:
            self.add_up(None)
        if "added up after the mean" in self.wrong or self.wrong == "scaler, added up":
            self.add_up(get_sequence_parallel_group())
        divisor = {"scaler": 4096, "divided twice": 2, "divided after": 2}
        divisor |= {"clipped before the average": dist.get_world_size(), "scaler, added up": 4096}
        for gradient in gradients:
            gradient /= dist.get_world_size() if self.is_averaged_by_hand else divisor.get(self.wrong, 1)
        if self.wrong in ("clipped", "averaged by hand", "added up after the mean, clipped"):
            clip_grad_norm_(self.model, 1e-3)
        if self.wrong == "clipped by value":
            torch.nn.utils.clip_grad_value_(self.model.parameters(), 1e-3)
        if self.wrong == "clipped by its shards":
            local = [gradient.to_local() for gradient in gradients]
            norm = torch.stack([each.norm() for each in local]).norm()
            for each in local:
                each.mul_(1e-3 / norm)

    def update(self, step):
        first = next(self.model.parameters())
        before = first.detach().clone()
        for optimizer in self.optimizers:
            if self.wrong == "cleared":
                optimizer.zero_grad()
            if self.wrong == "cleared to 0":
                optimizer.zero_grad(set_to_none=False)
            for group in optimizer.param_groups if step == 0 else ():
                group["lr"] *= self.warm_up
            if self.wrong != "one rank skips" or self.rank != 1:
                optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] or 1e-3 * (self.wrong != "no rate")
            if self.wrong not in ("stale gradients", "cleared before the backward"):
                optimizer.zero_grad()
        if self.wrong == "put back":
            first.data.copy_(before)
        self.average()

    def average(self):
        for mine, new in zip(self.ema.parameters(), self.model.parameters(), strict=True):
            if self.wrong != "ema" or self.rank == 0:
                mine.detach().lerp_(new.detach(), 0.1)

    @torch.no_grad()
    def sample(self, check):
        latents, texts = clips(0)
        kept = []
        with check.sampling(may_keep_bytes=1 << 20):
            self.model.eval()
            noise = torch.randn(1, *latents.shape, generator=torch.Generator().manual_seed(0))
            if self.wrong == "other random numbers" and self.rank == 0:
                torch.randn(1)
            kept.append(self.model(noise, torch.tensor([500.0]), texts[None], return_dict=False)[0])
            if self.wrong == "sampling keeps":
                kept.append(torch.zeros(1 << 20))
            if self.wrong != "eval mode":
                self.model.train()


def checked(plan, wrong, **options):
    """What is found, by name; empty for a loop that trains as one device would."""
    loop = Loop(plan, wrong)
    torch.manual_seed(loop.data_rank)
    found, text = (), ""
    try:
        loop.run(**options)
    except LoopMistake as mistake:
        found, text = mistake.names, str(mistake)
    assert not hasattr(torch.randn, "__wrapped__") and "normal_" not in vars(torch.Tensor)
    hooks = [*loop.model._forward_pre_hooks.values(), *loop.model._forward_hooks.values()]
    assert not any("FirstSteps" in str(hook) for hook in hooks)
    return found, text


MISTAKES = [
    ("weights", ULYSSES, "weights", "the weight of proj_out.weight differs over all ranks: rank 1 has the norm"),
    ("sample", ULYSSES, "sample", "ranks 0, 1 share a sample, and have another hidden_states"),
    ("sampler by rank", ULYSSES, "sample", "ranks 0, 1 share a sample"),
    ("repeated samples", ULYSSES, "repeated samples", "ranks 0, 2 drew the same 4800 numbers at test_first_steps.py"),
    ("bucket", ULYSSES, "bucket", "shape of hidden_states: (2, 16, 5, 6, 10) and (2, 16, 3, 6, 10)"),
    ("noise", ULYSSES, "noise", "hidden_states; the first draw that differs is at test_first_steps.py:"),
    ("repeated noise", ULYSSES, "repeated noise", "for samples of their own"),
    ("timestep", ULYSSES, "timestep", "hidden_states, timestep"),
    ("caption dropout", ULYSSES, "caption dropout", "have another encoder_hidden_states"),
    ("eval mode", ULYSSES, "eval mode", "in eval mode after sampling"),
    ("sampling keeps", ULYSSES, "sampling", "MiB are alive that were not before"),
    ("other random numbers", ULYSSES, "sampling", "draw other random numbers after it"),
    ("stale gradients", ULYSSES, "stale gradients", "has a gradient of the step before"),
    ("loss of a part", ULYSSES, "loss", "ranks 0, 1 share a sample, and have the losses"),
    ("detached", ULYSSES, "loss", "does not come from the model's output"),
    ("detached on one rank", ULYSSES, "loss", "does not come from the model's output"),
    ("divided by ranks", ULYSSES, "loss scale", "0.25 times the loss is backwarded in each of 2 backwards, to be 0.5"),
    ("not divided", ULYSSES, "loss scale", "1 times the loss is backwarded in each of 2 backwards, to be 0.5"),
    ("not averaged", ULYSSES, "gradients", "differs over all ranks"),
    ("averaged over data ranks", ULYSSES, "gradients", "differs over all ranks"),
    ("added up", RING, "reduction", "the gradients were scaled by 3: added up over the 3 ranks that share a sample"),
    ("divided twice", SHARDED, "reduction", "the gradients were scaled by 0.5: divided once too often by the 2 ranks"),
    ("divided by FSDP2", SHARDED, "reduction", "the gradient is 0.5 times that of the loss: divided once too often"),
    ("clipped by its shards", SHARDED, "clipping", "each by the norm of its own shards"),
    ("a weight left out", ULYSSES, "optimizer", "proj_out.bias has a gradient and no optimizer; 1 weights in all"),
    ("optimizer of a copy", SHARDED, "optimizer", "AdamW holds none of the model's parameters"),
    ("added up after the mean", ULYSSES, "reduction", "were scaled by 2: added up over the 2 ranks"),
    ("added up after the mean, clipped", ULYSSES, "reduction", "were scaled by 2: added up over the 2 ranks"),
    ("scaler, added up", ULYSSES, "reduction", "times what undoes the scaler: added up over the 2 ranks"),
    ("added up in a closure", ULYSSES, "reduction", "were scaled by 2: added up over the 2 ranks"),
    ("moved, not divided", ULYSSES, "loss scale", "1 times the loss is backwarded in each of 2 backwards, to be 0.5"),
    ("moved, added up after the mean", ULYSSES, "reduction", "were scaled by 2: added up over the 2 ranks"),
    ("moved, one left out", ULYSSES, "loss scale", "0.5 times the loss is backwarded, to be 1"),
    ("moved, noise of the step", ULYSSES, "repeated noise", "rank 0 drew the same 9600 numbers at test_first_steps.py"),
    ("one rank skips", ULYSSES, "skipped step", "ranks 0, 2, 3 step the optimizer, and rank 1 calls the model"),
    ("cleared", ULYSSES, "cleared gradients", "every gradient is gone or 0"),
    ("cleared to 0", SHARDED, "cleared gradients", "every gradient is gone or 0"),
    ("clipped before the average", ULYSSES, "clipping", "ranks 0-3 clip other gradients, of the norms "),
    ("repeated timestep", ULYSSES, "repeated timestep", "ranks 0, 2 called the model with the same timesteps"),
    ("noise of the step", ULYSSES, "repeated noise", "rank 0 drew the same 9600 numbers at test_first_steps.py"),
    ("put back", ULYSSES, "unmoved weight", "scale_shift_table has a gradient, and the same bits after 2 steps"),
    ("no rate", SHARDED, "unmoved weight", "scale_shift_table has a learning rate of 0, and others have not"),
    ("ema", ULYSSES, "ema", "the weights moved, and the EMA did not on ranks 1, 2, 3"),
]  # fmt: skip


# Of each name `make test` has one.
LONG = {
    "sampler by rank",
    "not divided",
    "divided twice",
    "divided by FSDP2",
    "other random numbers",
    "detached",
}
LONG |= {
    "averaged over data ranks",
    "a weight left out",
    "added up",
    "scaler, added up",
    "added up in a closure",
}
LONG |= {"cleared to 0", "no rate"}
LONG |= {
    "moved, not divided",
    "moved, added up after the mean",
    "moved, one left out",
    "moved, noise of the step",
}
# For every third name that a mistake is given, the first one that is named so.
FIRST = [*{name: wrong for wrong, _plan, name, _text in reversed(MISTAKES) if wrong not in LONG}.values()][
    ::3
]


@pytest.mark.parametrize(
    ("wrong", "plan", "name", "text"),
    [pytest.param(*row, marks=() if row[0] in FIRST else PROVE, id=row[0]) for row in MISTAKES],
)
def test_each_mistake_is_named_on_all_ranks(ranks, wrong, plan, name, text):
    found = ranks(plan.world_size, checked, plan, wrong)
    assert [names for names, _ in found] == [(name,)] * plan.world_size, found[0][1]
    for _, told in found:
        assert text in told and f"To do: {REMEDIES[name]}" in told, told
        assert told.startswith(("in step 1 this loop", "in step 2 this loop"))


ZERO2 = SHARDED.replace(sharding="zero2")
PLANS = [ULYSSES, RING, SHARDED, ZERO2, Plan(), Plan(dp_replicate=2)]


@pytest.mark.parametrize("plan", some(PLANS), ids=str)
@pytest.mark.parametrize("right", some(["clipped", "", "no ema"]))
def test_a_right_loop_is_let_alone(ranks, plan, right):
    assert ranks(plan.world_size, checked, plan, right) == [((), "")] * plan.world_size


RIGHT = [
    "averaged by hand",
    "cleared before the backward",
    "closure",
    "all skip a step",
    "scaler",
    "two optimizers",
]
RIGHT += ["compiled", "all skip a loss", "one timestep", "warm-up from 0"]
RIGHT += ["static graph", "clipped by value", "divided after"]
RIGHT += [
    "all skip a step of one noise",
    "moved",
    "moved, divided after",
    "moved, averaged",
    "moved, averaged, divided after",
]


@pytest.mark.parametrize("right", some(RIGHT))
def test_loops_that_go_other_ways_are_let_alone(ranks, right):
    assert ranks(4, checked, ULYSSES, right) == [((), "")] * 4


@PROVE
def test_shards_that_are_moved_are_let_alone(ranks):
    assert ranks(4, checked, SHARDED, "moved") == [((), "")] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_copy_made_in_the_loop_is_let_alone(dtype):
    """Its forwards are none of the loop's, though it has the model's hooks."""
    model, noise = nn.Linear(3, 2, dtype=dtype), torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model) as check:
        for _ in range(3):
            teacher = copy.deepcopy(model).eval()
            clip = torch.randn(4, 3, generator=noise, dtype=dtype)
            loss = (model(clip) - teacher(clip) - 1).square().mean()
            check.loss(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_loop_without_a_step_is_not_called_right(caplog):
    with watch(nn.Linear(2, 2)) as check:
        check.loss(torch.ones(()))
    assert "nothing was compared" in caplog.text and "as one device would" not in caplog.text


def steps_of(name, plan):
    """Two right steps of any model, and what is found."""
    init_parallel(plan)
    case = CASES[name]
    model = shardformer.shard(case.make(), plan)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(0)
    mixed = get_data_parallel_group(get_mixed_dp_pg=True)
    with watch(model) as check:
        for _ in range(3):
            loss = sum(out.square().mean() for out in tensors_in(model(**case.inputs())))
            check.loss(loss)
            loss.backward()
            for parameter in model.parameters():
                if parameter.grad is None:  # a rank may have no text tokens
                    parameter.grad = torch.zeros_like(parameter)
                if plan.sequence > 1:
                    dist.all_reduce(parameter.grad, group=mixed)
                    parameter.grad /= mixed.size()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        *(pytest.param(name, Plan(ulysses=2), marks=() if name == "LTX-2" else PROVE) for name in CASES),
        *(pytest.param("MMDiT", Plan(tp=2, ring=ring), marks=PROVE) for ring in (1, 2)),
    ],
    ids=str,
)
def test_a_right_loop_of_any_model_is_let_alone(ranks, name, plan):
    ranks(plan.world_size, steps_of, name, plan)


def saved():
    """What `saves` says of a whole state dict, and of wrong ones, on two ranks that hold shards."""
    plan = Plan(dp_shard=2, sharding="zero3")
    init_parallel(plan)
    model = shardformer.shard(wan(torch.float32), plan)
    whole = full_state_dict(model)
    name = "proj_out.weight"
    wrong = {
        "wrapper": {f"module.{key}": value for key, value in whole.items()},
        "shard": model.state_dict(),
        "shape": {name: whole[name][:1]},
    }
    told = {}
    with watch(model) as check:
        check.saves(whole)
        for kind, state in wrong.items():
            with pytest.raises(LoopMistake) as caught:
                check.saves(state)
            assert caught.value.names == ("saved weights",)
            told[kind] = str(caught.value)
    return told


def test_what_is_saved_has_the_models_names_and_shapes(ranks):
    for told in ranks(2, saved):
        assert "module.scale_shift_table has the name of a wrapper, module; " in told["wrapper"], told
        assert "is a DTensor, of which this rank has a shard" in told["shard"]
        assert "proj_out.weight has the shape (1, 36), and the model's is (64, 36)" in told["shape"]


def test_what_cannot_be_checked_is_refused():
    model = nn.Linear(1, 1)
    wrapper = nn.Module()
    wrapper.module = model
    with pytest.raises(ValueError, match=r"not the Module around it; pass model.module"):
        watch(wrapper)


def test_every_mistake_has_a_case():
    later = {"saved weights", "drifted weights", "drifted gradients", "drifted optimizer states"}
    later |= {"optimizer states", "device", "shard at rest", "loaded state"}
    assert {name for _, _, name, _ in MISTAKES} | later == set(REMEDIES)


def test_the_weights_are_the_same_bits_after_it():
    """The check takes steps along the gradient and back: training goes on as without it."""

    def trained(is_checked):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Tanh(), nn.Linear(5, 2))
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        with watch(model) if is_checked else contextlib.nullcontext():
            for _ in range(4):
                model(torch.randn(4, 3)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return list(model.parameters())

    assert all(torch.equal(one, other) for one, other in zip(trained(True), trained(False), strict=True))


def trained_under_zero2(is_checked):
    """Gathered weights, which zero2 keeps after a forward, are no old ones."""
    init_parallel(Plan(dp_shard=2, sharding="zero2"))
    model = shardformer.shard(wan(torch.float32), Plan(dp_shard=2, sharding="zero2"))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model) if is_checked else contextlib.nullcontext():
        for step in range(4):
            latents, text = clips(2 * step + dist.get_rank())
            out = model(latents[None], torch.full((1,), 100.0 * (step + 1)), text[None], return_dict=False)[0]
            (out - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return {name: weight.clone() for name, weight in full_state_dict(model).items()}


def test_training_of_shards_goes_on_as_without_it(ranks):
    with_it, without = (ranks(2, trained_under_zero2, is_checked)[0] for is_checked in (True, False))
    assert all(torch.equal(weight, without[name]) for name, weight in with_it.items())
