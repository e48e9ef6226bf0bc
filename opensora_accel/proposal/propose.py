"""Tables are drafted, and each is proven on a few CPU ranks until one has the gradients of one device."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from opensora_accel.arguments import tensors_in
from opensora_accel.parallel_states import init_parallel
from opensora_accel.plan import Plan
from opensora_accel.proposal.draft import Draft, draft
from opensora_accel.verify import RankPool, Report, Run, verify
from shardformer.engine import shard
from shardformer.policy import Policy, Positions

# Two ways to attend, one of them on a number of ranks that hardly anything divides by.
MESHES = (Plan(ulysses=2), Plan(ring=3))
# What a first forward says when a model counts positions inside attention.
_COUNTED = "would count from 0 on every rank"
# What a library that carries messages, or the pool of ranks, says when ranks did not do the same.
_TRANSPORT = re.compile(r"gloo|Connection (closed|reset)|Broken pipe|no answer|exit code", re.IGNORECASE)
_MISMATCH = (
    "the ranks exchanged tensors of different sizes: something is split by this table that attention needs whole, or "
    "is not split that has a row for each token"
)
# How many functions are tried as the one that gives tokens their positions.
_MAX_POSITIONS = 3

ModelFn = Callable[[], nn.Module]
InputsFn = Callable[[], Mapping[str, Any]]


@dataclass(frozen=True)
class Attempt:
    """A table that was proven, or what was wrong with it."""

    policy: Policy
    ok: bool
    # The first thing that was wrong, in a line.
    reason: str


@dataclass(frozen=True)
class Proposal:
    """The table, whether it is proven, and what a reader should look at.

    `print` it for the table as code.
    """

    policy: Policy
    ok: bool
    attempts: tuple[Attempt, ...]
    unsure: tuple[str, ...]
    # The verifier's report of the chosen table.
    report: Report

    def __str__(self) -> str:
        return as_code(self.policy)


def propose_policy(
    model_fn: ModelFn,
    inputs_fn: InputsFn,
    *,
    pool: RankPool | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Proposal:
    """A policy for a model that has none: drafted by tracing a forward, then proven on CPU ranks.

    Both functions must be defined at the top level of a module (they go to other processes), and be small: two to
    four blocks, tens of tokens. No two sizes may be the same by chance: 35 tokens, 4 of text and 24 channels are
    told apart, 24 tokens and 24 channels are not.

    Args:
        model_fn: builds the model with the same weights on every rank.
        inputs_fn: the arguments of its forward, by name, for a batch of two or more, with more video tokens than text.
        pool: processes to run on, where the caller has some.
        on_progress: called with what is tried now.

    Raises:
        ValueError: nothing can be drafted, and why: the forward failed on these inputs, no attention was called, or
            no blocks were found.
    """
    say = on_progress or (lambda _: None)
    say("tracing a forward")
    with torch.random.fork_rng():
        model, inputs = model_fn(), inputs_fn()
        if not isinstance(model, nn.Module) or not isinstance(inputs, Mapping):
            raise ValueError(
                "a policy is proposed from a torch.nn.Module and a dict of its forward's arguments; got a "
                f"{type(model).__name__} and a {type(inputs).__name__}"
            )
        drafted = draft(model, inputs)
    attempts: list[Attempt] = []
    reports: list[Report] = []
    with ExitStack() as stack:
        if pool is None:
            pool = stack.enter_context(RankPool(max(plan.world_size for plan in MESHES)))
        for policy in _in_turn(drafted, attempts):
            say(f"proving table {len(attempts) + 1} on {' and '.join(map(_name, MESHES))}")
            report = verify(_Step(policy, inputs_fn), model_fn, MESHES, pool=pool)
            reports.append(report)
            attempts.append(Attempt(policy, report.ok, _reason(report)))
            if report.ok:
                break
    # Where none is right, the first is the likeliest, and its report says what to look at.
    chosen = len(attempts) - 1 if attempts[-1].ok else 0
    return Proposal(
        attempts[chosen].policy, attempts[chosen].ok, tuple(attempts), tuple(drafted.unsure), reports[chosen]
    )


def _in_turn(drafted: Draft, attempts: list[Attempt]) -> Iterator[Policy]:
    """The drafts, each also with a function of positions where it failed as tokens without theirs make a model fail."""
    positions: tuple[Positions, ...] = ()
    for policy in drafted.policies():
        yield replace(policy, positions=positions)
        reason = attempts[-1].reason
        # Positions that are made for the whole clip do not fit a rank's tokens; those counted from them are refused.
        if positions or not (_COUNTED in reason or reason.startswith("RuntimeError")):
            continue
        for entry in drafted.positions[:_MAX_POSITIONS]:
            yield replace(policy, positions=(entry,))
            if _COUNTED in reason and _COUNTED not in attempts[-1].reason:
                positions = (entry,)  # other drafts need it too
                break


@dataclass(frozen=True)
class _Step:
    """A training step on the given inputs, with a loss in which every output counts."""

    policy: Policy
    inputs_fn: InputsFn

    def __call__(self, model: nn.Module, run: Run) -> Tensor:
        wrapped: nn.Module = model
        if not run.is_reference:
            assert run.plan is not None
            init_parallel(run.plan)
            shard(model, run.plan, policy=self.policy)
            wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        outputs = [each for each in tensors_in(wrapped(**self.inputs_fn())) if each.is_floating_point()]
        loss = torch.stack([output.square().mean() for output in outputs]).sum()
        loss.backward()
        return loss


def _reason(report: Report) -> str:
    """The first thing that is wrong: what a rank said, or what the gradients show."""
    lines = [text.strip().splitlines()[-1] for mesh in report.results for text in mesh.errors.values()]
    if lines:
        # What a transport says of a rank that has left, or sent another size, is none of the reasons.
        return next((line for line in lines if not _TRANSPORT.search(line)), _MISMATCH)
    return "" if report.ok else report.findings[0].what


def _name(plan: Plan) -> str:
    return " × ".join(
        f"{axis} {degree}" for axis, degree in (("ring", plan.ring), ("ulysses", plan.ulysses)) if degree > 1
    )


def as_code(policy: Policy) -> str:
    """The table as Python, with what is not a default, ready to be put into a file."""
    values = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
    # By the modules that have them: the names of which the table is made.
    names = {"shardformer.policy": {"Policy"}}
    for entry in [entry for value in values.values() for entry in _entries(value)]:
        for kind in (partial, entry.func) if isinstance(entry, partial) else (entry,):
            home = "shardformer.policy" if dataclasses.is_dataclass(kind) else kind.__module__
            names.setdefault(home, set()).add(getattr(kind, "__name__", type(kind).__name__))
    lines = [f"from {home} import {', '.join(sorted(names[home]))}" for home in sorted(names)]
    if "functools" in names:
        lines.insert(1, "")  # behind Python's own
    lines += ["", "POLICY = Policy("]
    for field in dataclasses.fields(policy):
        if field.name == "models" or values[field.name] != field.default:
            lines.append(f"    {field.name}={_code(values[field.name])},")
    return "\n".join([*lines, ")"])


def _entries(value: Any) -> list[Any]:
    """Entries of a table among a field's values, and functions that an entry has."""
    items = value if isinstance(value, tuple) else (value,)
    entries = [each for each in items if dataclasses.is_dataclass(each)]
    of_entries = [getattr(each, field.name) for each in entries for field in dataclasses.fields(each)]
    return entries + [each for each in (*items, *of_entries) if callable(each)]


def _code(value: Any) -> str:
    if dataclasses.is_dataclass(value):
        given = []
        for field in dataclasses.fields(value):
            item = getattr(value, field.name)
            if field.default is dataclasses.MISSING:
                given.append(_code(item))
            elif item != field.default:
                # Arguments that have no default stand first, and need no name.
                given.append(f"{field.name}={_code(item)}")
        return f"{type(value).__name__}({', '.join(given)})"
    if isinstance(value, partial):
        given = [f"{name}={_code(item)}" for name, item in value.keywords.items()]
        return f"partial({', '.join([_code(value.func), *given])})"
    if callable(value):
        return str(value.__name__)
    if isinstance(value, tuple) and _entries(value):
        return "(\n" + "".join(f"        {_code(each)},\n" for each in value) + "    )"
    if isinstance(value, tuple):
        return f"({', '.join(map(_code, value))}{',' if len(value) == 1 else ''})"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
