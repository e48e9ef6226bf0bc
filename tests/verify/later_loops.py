"""Loops of several steps, right and wrong: what an optimizer holds, what is loaded, what the model draws."""

from __future__ import annotations

import contextlib
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.verify.loops import Small, averaged, batch, finish, sharded, spread

STEPS = 3


def is_of_ranks(run):
    """Where a mistake is made: the single device is right."""
    return not run.is_reference


def train(model, run, forward, optimizer, after=lambda number: None, before=lambda number: None):
    """A plain loop; the loss of each step."""
    losses = []
    for number in range(STEPS):
        optimizer.zero_grad()
        losses.append(finish(forward(batch()).clone()))
        before(number)
        optimizer.step()
        after(number)
    return {"loss": losses}


# Right.


def adamw(model, run):
    return train(model, run, averaged(model, run), torch.optim.AdamW(model.parameters(), lr=0.1))


def momentum_and_schedule(model, run):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=STEPS + 1)
    return train(model, run, averaged(model, run), optimizer, lambda _: schedule.step())


def fully_sharded(model, run):
    sharded(model, run)
    return train(model, run, model, torch.optim.AdamW(model.parameters(), lr=0.1))


def sequence(model, run):
    return train(model, run, spread(model, run), torch.optim.AdamW(model.parameters(), lr=0.1))


def fsdp1(model, run):
    from torch.distributed.fsdp import FullyShardedDataParallel

    forward = model
    if not run.is_reference:
        forward = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    return train(model, run, forward, torch.optim.AdamW(forward.parameters(), lr=0.1))


def accumulate(model, run, counts=(2, 3, 1), divisors=None, last_is_synced=True):
    """So many microbatches in each step, of which the last ones are fewer."""
    forward, losses = averaged(model, run), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for count, divisor in zip(counts, divisors or counts, strict=True):
        total = 0.0
        for part in range(count):
            waits = part < count - 1 or not last_is_synced
            with forward.no_sync() if waits and not run.is_reference else contextlib.nullcontext():
                loss = forward(batch()).square().mean() / divisor
                loss.backward()
            total += loss.detach()
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return {"loss": losses}


def accumulated(model, run):
    return accumulate(model, run)


def unlike_counts(model, run):
    """Data rank 1 has a microbatch more; gradients are averaged when all are done."""
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.1), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(sum(finish(model(batch())).detach() for _ in range(1 + run.data_rank)))
        for parameter in model.parameters() if is_of_ranks(run) else ():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
            parameter.grad /= run.world_size
        optimizer.step()
    return {"loss": losses}


def accelerated(model, run):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    forward, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for _ in range(2 * STEPS):
        with accelerator.accumulate(forward):
            loss = forward(batch()).square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1e-2) if accelerator.sync_gradients else None
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss)
    return {"loss": losses}


def keeps_an_average(model, run):
    average = copy.deepcopy(model).requires_grad_(False)

    def after(_number):
        with torch.no_grad():
            for mine, new in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(new, 0.1)

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    returned = train(model, run, averaged(model, run), optimizer, after)
    return {**returned, "average": torch.stack([each.norm() for each in average.parameters()]).norm()}


def clip_by_hand(model, limit=1e-2):
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    for parameter in model.parameters():
        parameter.grad *= min(1.0, limit / float(norm))
    return norm


def clips_and_tells_the_norm(model, run):
    norms, parameters = [], list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1.0)

    def before(_number):
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, 1e-2))

    return {**train(model, run, averaged(model, run), optimizer, before=before), "norm": norms}


class Signs(torch.optim.Optimizer):
    """As Lion: it steps by the sign of a gradient, also of one that is rounding errors."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.grad.sign()


class WithIdleBias(Small):
    """A bias of keys, which softmax cancels: its gradient is rounding errors."""

    def __init__(self):
        super().__init__()
        self.key = nn.Linear(8, 8)

    is_reversed = False

    def forward(self, x):
        x = self.embed(x.flip(1) if self.is_reversed else x)
        weights = (self.mlp(x) @ self.key(x).transpose(1, 2)).softmax(-1)
        out = self.out(self.norm(x + weights @ x))
        return out.flip(1) if self.is_reversed else out


def steps_by_signs(model, run):
    """Ranks add up in another order, so that their rounding errors are other ones."""
    model.is_reversed = is_of_ranks(run)
    return train(model, run, averaged(model, run), Signs(model.parameters(), 1e-2))


def two_optimizers(model, run):
    """One for each half, both of which step in every iteration."""
    halves = (
        [*model.embed.parameters(), *model.norm.parameters()],
        [*model.mlp.parameters(), *model.out.parameters()],
    )
    optimizers = [torch.optim.AdamW(half, lr=0.1) for half in halves]
    forward, losses = averaged(model, run), []
    for _ in range(STEPS):
        losses.append(finish(forward(batch())))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {"loss": losses}


def one_closure(model, run):
    forward, losses = averaged(model, run), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def closure():
        optimizer.zero_grad()
        losses.append(finish(forward(batch())))
        return losses[-1]

    for _ in range(STEPS):
        optimizer.step(closure)
    return {"loss": losses}


def thaws_a_layer(model, run, of_all=True):
    """Frozen in the first step."""
    model.embed.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for number in range(STEPS):
        if number == 1 and (of_all or not is_of_ranks(run)):
            model.embed.requires_grad_(True)
        optimizer.zero_grad()
        forward = model if run.is_reference else DistributedDataParallel(model)
        losses.append(finish(forward(batch())))
        optimizer.step()
    return {"loss": losses}


# Wrong on ranks.


def averages_the_first_step_only(model, run):
    forward, optimizer = averaged(model, run), torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(STEPS):
        optimizer.zero_grad()
        with forward.no_sync() if number and is_of_ranks(run) else contextlib.nullcontext():
            finish(forward(batch()))
        optimizer.step()


def divides_the_rest_by_a_whole(model, run):
    """The last step has one microbatch, which is divided by two."""
    return accumulate(model, run, (2, 2, 1), (2, 2, 2) if is_of_ranks(run) else None)


def never_syncs_a_single_microbatch(model, run):
    forward, optimizer = averaged(model, run), torch.optim.SGD(model.parameters(), lr=0.1)
    for count in (2, 1):
        for part in range(count):
            waits = is_of_ranks(run) and part != 1
            with forward.no_sync() if waits else contextlib.nullcontext():
                (forward(batch()).square().mean() / count).backward()
        optimizer.step()
        optimizer.zero_grad()


def schedules_once_for_each_rank(model, run):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def after(_number):
        for _ in range(run.world_size if is_of_ranks(run) else 1):
            schedule.step()

    return train(model, run, averaged(model, run), optimizer, after)


def sorts_by_the_names_of_a_wrapper(model, run):
    """`embed.` is not how a name begins that DDP has given."""
    forward = averaged(model, run)
    kept = [p for n, p in forward.named_parameters() if n.startswith("embed.")]
    rest = [p for n, p in forward.named_parameters() if not n.startswith("embed.")]
    groups = [
        {"params": rest, "weight_decay": 0.5},
        *([{"params": kept, "weight_decay": 0.0}] if kept else []),
    ]
    return train(model, run, forward, torch.optim.AdamW(groups, lr=0.1))


def builds_the_optimizer_anew(model, run):
    forward = averaged(model, run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(STEPS):
        if number == 1 and is_of_ranks(run):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer.zero_grad()
        finish(forward(batch()))
        optimizer.step()


def clears_nothing(model, run):
    forward, optimizer = averaged(model, run), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        finish(forward(batch()))
        optimizer.step()
        if not is_of_ranks(run):
            optimizer.zero_grad()


def thaws_on_one_device_only(model, run):
    return thaws_a_layer(model, run, of_all=False)


def leaves_the_norm_out(model, run):
    forward = averaged(model, run)
    given = [p for n, p in model.named_parameters() if not (is_of_ranks(run) and n.startswith("norm"))]
    return train(model, run, forward, torch.optim.SGD(given, lr=0.1))


def drifts_apart(model, run):
    """The weights of an average are put in for validation, and taken out again on rank 0 only."""
    before = {name: each.detach().clone() for name, each in model.named_parameters()}

    def after(number):
        for name, parameter in (
            model.named_parameters() if number == 1 and is_of_ranks(run) and run.rank else ()
        ):
            parameter.data.lerp_(before[name], 0.5)

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return train(model, run, averaged(model, run), optimizer, after)


def steps_less_often(model, run):
    forward, optimizer = averaged(model, run), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6 // (run.world_size if is_of_ranks(run) else 1)):
        optimizer.zero_grad()
        finish(forward(batch()))
        optimizer.step()


def is_trained_by_another_optimizer(model, run):
    make = torch.optim.Adam if is_of_ranks(run) else torch.optim.AdamW
    return train(model, run, averaged(model, run), make(model.parameters(), lr=0.1, weight_decay=0.1))


# Data.


def set_epoch(sampler, epoch):
    sampler.set_epoch(epoch)


def load(model, run, *, sampler=None, each=set_epoch, length=12, **options):
    """Two epochs of batches of two; at most two batches of each are trained on."""
    data = TensorDataset(torch.randn(length, 11, 4, generator=torch.Generator().manual_seed(9)))
    sampler = sampler or DistributedSampler(data, run.data_size, run.data_rank, seed=1)
    loader = DataLoader(data, 2, sampler=None if "shuffle" in options else sampler, **options)
    forward = spread(model, run) if run.shape.uses("sequence") else averaged(model, run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        each(sampler, epoch)
        for number, (x,) in enumerate(loader):
            if number < 2:
                optimizer.zero_grad()
                finish(forward(x))
                optimizer.step()


def loads(model, run):
    load(model, run)


def loads_what_does_not_divide(model, run):
    """Filled up at the end of an epoch."""
    load(model, run, length=13)


def loads_and_drops(model, run):
    load(model, run, length=13, drop_last=True)


def loads_with_replacement(model, run):
    sampler = torch.utils.data.RandomSampler(range(12), replacement=True, num_samples=8)
    load(model, run, sampler=sampler, each=lambda *_: None)


def loads_by_workers(model, run):
    load(model, run, num_workers=2, persistent_workers=True, prefetch_factor=4, timeout=60)


def loads_by_workers_in_one_order(model, run):
    load(model, run, each=lambda *_: None, num_workers=2, worker_init_fn=seed_worker)


def seed_worker(number):
    raise AssertionError(f"worker {number} runs")


def never_sets_the_epoch(model, run):
    load(model, run, each=lambda *_: None)


def loads_by_the_global_rank(model, run):
    size, rank = (run.data_size, run.data_rank) if run.is_reference else (run.world_size, run.rank)
    load(model, run, sampler=DistributedSampler(range(12), size, rank, seed=1))


def shuffles_by_itself(model, run):
    load(model, run, each=lambda *_: None, shuffle=True)


def deals_to_too_many(model, run):
    """Half of the samples are nobody's, on one device too."""
    load(model, run, sampler=DistributedSampler(range(12), 2 * run.data_size, run.data_rank, seed=1))


# Draws.


class Dropping(Small):
    """Drops by a function, which nobody turns off."""

    seed = None

    def forward(self, x):
        if self.seed is not None:
            torch.manual_seed(self.seed)
        return nn.functional.dropout(super().forward(x), 0.3)


def drops_alike(model, run):
    forward = spread(model, run)
    return finish(forward(batch()))


def drops_by_rank(model, run):
    model.seed = 100 + (run.rank if is_of_ranks(run) else run.data_rank)
    return drops_alike(model, run)


class DroppingWithin(Small):
    """Drops tokens of the part of the model that is spread over ranks."""

    def forward(self, x):
        enter, leave = self.region or (lambda x: x, lambda x: x)
        x = nn.functional.dropout(enter(self.embed(x)), 0.3)
        return leave(self.out(x + torch.tanh(self.mlp(self.norm(x)))))
