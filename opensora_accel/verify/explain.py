"""Every cause in words: what is wrong, in one line, and what to do about it.

Most causes need a template only. Those whose words depend on their numbers have a function.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

from opensora_accel.verify import causes
from opensora_accel.verify.causes import Cause

_NUM_SHOWN = 4
_OF_KEYS = re.compile(r"(^|_)(k|v|kv|key|value)(_|$|s)")
"""Modules that make keys and values: to_k, k_proj, norm_k, key."""
_SAME_CALLS = (
    "every rank of a group must make the same calls in the same order: look for a collective that only "
    "some ranks reach, a send without its receive, or a group of the wrong ranks"
)

_TEMPLATES: dict[type[Cause], tuple[str, str]] = {
    causes.StepFails: (
        "the step fails {where}: {message} (rank {rank})",
        "the whole traceback is in the report's errors",
    ),
    causes.Hang: (
        "the step never ends {where}: a rank waits for another that does not answer",
        _SAME_CALLS,
    ),
    causes.WrongWeights: (
        "the ranks start from other weights than the single device {where}: {count}",
        "initialise by one seed on all ranks, or broadcast from rank 0 (DDP does), before the first step",
    ),
    causes.RepeatedShard: (
        "every rank holds the same shard of {count}: the model starts with one slice of its weights, repeated",
        "to_empty() and reset_parameters() draw the same numbers on every rank; draw each whole parameter from a seed "
        "of its own and keep this rank's slice, or load a checkpoint",
    ),
    causes.DifferentDraws: (
        "ranks that share a sample drew different noise (or were given different data) {where}: {listed} differ "
        "between them",
        "noise, timestep, caption drop and the sampler of the data must depend on the data rank only: seed by it "
        "(run.data_rank), not by the global rank",
    ),
    causes.WrongInput: (
        "the ranks were given other data than the single device {where}: {listed}",
        "what a sample is must depend on the data rank (run.data_rank of run.data_size) only, not on the rank, the "
        "world size or what was drawn before",
    ),
    causes.SameSamples: (
        "all data ranks were given the same samples {where}: a missing average between them could not be seen",
        "draw with torch's generator, which is seeded by the data rank before the step, or choose samples by "
        "run.data_rank; do not seed it anew",
    ),
    causes.HeldBack: (
        "missing average over {over} for {count}: FSDP2 holds back what it has added up within each replica, and gives "
        "no gradient",
        "set_requires_all_reduce(False) is for all microbatches but the last: True before that one's backward",
    ),
    causes.RightToFp32: (
        "{count} are right to fp32 only {where}, up to {error:.1e} of the largest",
        "something computes or adds up in a narrower type than fp64: where that is meant (convert_to_fp32 of "
        "diffusers), turn it off for the proof",
    ),
    causes.Consequence: (
        "the gradients of {count} differ, as they must after the above",
        "mend that first, then verify again",
    ),
    causes.ClippedByOtherNorms: (
        "ranks clip by other norms than that of the whole gradient {where}: {count} are wrong after it",
        "the norm is that of all parameters, whole, after gradients are averaged: torch.nn.utils.clip_grad_norm_ on "
        "the DTensors of FSDP2, FSDP1's own clip_grad_norm_, or an all-reduce of the squares of shards' norms",
    ),
    causes.ClippedByFactor: (
        "clipping leaves {by} times the single device's gradient of {count}",
        "the limit, or the norm, is multiplied by it",
    ),
    causes.ClippedTooEarly: (
        "ranks clip their own parts of {count}, before these are added up over {over}: each by another norm",
        "average gradients first, then clip",
    ),
    causes.StaleOptimizer: (
        "the optimizer trains tensors that are the model's no longer {where}, in place of {count}: they would stay as "
        "they are",
        "fully_shard and others give the model new parameters: build the optimizer after that",
    ),
}


@dataclass(frozen=True)
class Explanation:
    """A cause, what it is in one line, and its remedy."""

    cause: Cause
    what: str
    remedy: str

    @property
    def kind(self) -> causes.Kind:
        return self.cause.kind

    @property
    def axes(self) -> tuple[str, ...]:
        return self.cause.axes

    @property
    def factor(self) -> str:
        return self.cause.factor

    @property
    def names(self) -> tuple[str, ...]:
        return self.cause.names

    @property
    def meshes(self) -> tuple[str, ...]:
        return self.cause.meshes

    def __str__(self) -> str:
        return f"{self.what}\n  {self.remedy}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "what": self.what,
            "remedy": self.remedy,
            "axes": list(self.axes),
            "factor": self.factor,
            "parameters": list(self.names),
            "meshes": list(self.meshes),
        }


def explain(cause: Cause) -> Explanation:
    return Explanation(cause, *_words(cause))


def count_names(names: Sequence[str], total: int) -> str:
    """`all 69 parameters`, or `2 of 69 parameters (a, b)`."""
    if len(names) == total:
        return f"all {total} parameters" if total != 1 else f"the only parameter ({names[0]})"
    return f"{len(names)} of {total} parameters ({list_names(names)})"


def list_names(names: Sequence[str]) -> str:
    more = f", … {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
    return ", ".join(names[:_NUM_SHOWN]) + more


def join_words(words: Sequence[str], last: str = "and") -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def words_of(where: causes.Where) -> str:
    """`over ulysses`, `wherever ring has 3 ranks or more`, `where ring and ulysses are used together`."""
    if where.rule == "over" and where.least > 2:
        return f"wherever {where.axes[0]} has {where.least} ranks or more"
    if where.rule == "over":
        return f"over {join_words(where.axes, 'or')}"
    if where.rule == "together":
        return f"where {join_words(where.members or where.axes)} are used together"
    if where.rule == "everywhere":
        return "on every mesh"
    return f"on {join_words([str(mesh) for mesh in where.meshes])} only"


def _count(cause: Cause) -> str:
    return count_names(cause.names, cause.num_names)


@singledispatch
def _words(cause: Cause) -> tuple[str, str]:
    values = {
        **vars(cause),
        "where": words_of(cause.where),
        "count": _count(cause),
        "listed": list_names(cause.names),
        "over": join_words(cause.axes) if cause.axes else "",
    }
    what, remedy = _TEMPLATES[type(cause)]
    return what.format(**values), remedy


@_words.register
def _(cause: causes.UnlikeCollectives) -> tuple[str, str]:
    noticed = f": noticed at {cause.line}" if cause.line else ""
    return (
        f"the step fails {words_of(cause.where)}: ranks meet in collectives that are not the same, as one of them "
        f"skips or adds a call{noticed} (rank {cause.rank})",
        _SAME_CALLS,
    )


@_words.register
def _(cause: causes.MissingGradient) -> tuple[str, str]:
    what, remedy = {
        "none": ("get no gradient", "a detach, a collective without a backward, or no_grad cuts them off"),
        "some ranks only": (
            "get a gradient on some ranks only",
            "ranks without a share must still take part: add their output times zero, or use static shapes",
        ),
        "only in parallel": (
            "get a gradient that the single device does not give",
            "look for another branch",
        ),
    }[cause.side]
    return f"{_count(cause)} {what} {words_of(cause.where)}", remedy


@_words.register
def _(cause: causes.MissingSum) -> tuple[str, str]:
    along = join_words(cause.axes)
    what = f"missing {'average' if cause.is_average else 'sum'} over {along} for {_count(cause)}"
    if cause.by is not None:
        what += f", beside a scale {cause.by}"
    if 2 * len(cause.names) > cause.num_names:
        return what, (
            f"the ranks along {along} hold parts of one gradient: average gradients over the mixed group "
            "(data × sequence), not over fewer ranks"
        )
    return what, (
        f"these get parts of one gradient on the ranks along {along}: all-reduce them there, or let what they are "
        f"applied to enter through copy_forward_reduce_backward{_words_of_place(cause.place)}"
    )


@_words.register
def _(cause: causes.Scale) -> tuple[str, str]:
    what = f"scale {cause.by} on {_count(cause)}"
    remedy = _scale_remedy(cause)
    if not cause.is_everywhere:
        what = f"{what} {words_of(cause.where)}"
        remedy = "a number where the number of ranks should stand, or a collective that counts twice"
    return what, remedy + _words_of_place(cause.place)


def _scale_remedy(cause: causes.Scale) -> str:
    data, sharing = set(cause.data_powers), set(cause.sharing_powers)
    if cause.by is not None and cause.by.of_others:
        return "the own rank is not counted: P − 1 stands where P, the number of ranks, should"
    if not data and not sharing:
        return (
            "a constant, the same on every mesh: a collective or a loss that counts twice, or a divisor that is "
            "not a number of ranks"
        )
    if not data and sharing == {-1}:
        return (
            "averaged over a group whose gradients are partial: set the divisor to the data degree (FSDP2: "
            'set_gradient_divide_factor), or scale the gradient by the degree where the ranks\' shares join ("up")'
        )
    if not data and sharing == {1}:
        return (
            "counted once per rank that shares the sample: summed where whole gradients are averaged, or a gather "
            'scales "up" and its split not "down"'
        )
    if not sharing and data == {-1}:
        return "averaged over the data ranks twice: is the loss divided by their number as well?"
    if not sharing and data == {1}:
        return (
            "summed over the data ranks, not averaged: divide by their number (DDP and FSDP2 do by default)"
        )
    return "a divisor or a sum counts other ranks than those that hold parts of this gradient"


def _words_of_place(place: causes.Place | None) -> str:
    """Where in backward the error comes in, to be appended."""
    if place is None:
        return ""
    right = f"; the {place.num_right_before} nearer to it are right" if place.num_right_before else ""
    return f". Nearest to the loss: {place.nearest}{right}"


@_words.register
def _(cause: causes.StrangeScale) -> tuple[str, str]:
    shown = ", ".join(f"{factor:.4g} on {mesh}" for mesh, factor in cause.factors)
    return (
        f"a factor that goes with no number of ranks ({shown}) on {_count(cause)}",
        "look for a divisor that is no number of ranks but depends on them, and for gradients that are normalised or "
        "clipped by hand: leave that out of the step, or do it on the single device, too",
    )


@_words.register
def _(cause: causes.ScaledByShares) -> tuple[str, str]:
    shown = ", ".join(f"{factor:.4g}" for factor in cause.factors)
    what = (
        f"each rank's part of the gradient is multiplied by a factor of its own on {cause.meshes[0]} ({shown}), in "
        f"{_count(cause)}"
    )
    if cause.shares:
        what += f": its share of an uneven split, {cause.shares}"
    if cause.data_axes:
        return what, (
            f"ranks along {join_words(cause.data_axes)} hold different numbers of samples or tokens, and each divides "
            "by its own: divide by the number over all ranks (all-reduce it), times the number of ranks that the "
            "gradients are then averaged over"
        )
    return (
        what,
        "an uneven split is scaled by exactly the number of ranks (P up, 1/P down), never by a rank's share",
    )


@_words.register
def _(cause: causes.WrongValues) -> tuple[str, str]:
    what = (
        f"wrong values (no factor, no sum explains them) {words_of(cause.where)}: {_count(cause)}, "
        f"up to {cause.error:.1e} of the largest"
    )
    origin = cause.origin
    if origin is not None and origin.name is not None:
        module = origin.name or "the model itself, outside of its modules"
        module += f", before {origin.before}" if origin.before else ""
        given = {True: " (its inputs are right)", False: " (what it is given is wrong already)", None: ""}
        return what, (
            f"the forward is wrong already, first in {module}{given[origin.are_inputs_right]}: mostly it takes its "
            "rank's tokens for all, counts them (positions, masks) from 0, or parts heads that do not divide"
        )
    if not cause.first_wrong:
        return what, "look at what the forward communicates"
    modules = [name.split(".")[-2] for name in cause.first_wrong if "." in name]
    if modules and all(_OF_KEYS.search(module) for module in modules):
        comment = (
            ", the gradients of keys and values (not those of queries): where they travel round a ring, they meet the "
            "keys of another step"
        )
    else:
        comment = ": look at what is communicated there in backward"
    return what, f"they come in at {list_names(cause.first_wrong)}{comment}{_words_of_place(cause.place)}"


@_words.register
def _(cause: causes.OutsideParameters) -> tuple[str, str]:
    count = "a parameter" if len(cause.names) == 1 else f"{len(cause.names)} parameters"
    return (
        f"the loss reaches {count} outside of the model, of shape {list_names(cause.names)}: not compared",
        "build what is trained as one module in model_fn, or freeze what is not (requires_grad_(False))",
    )


@_words.register
def _(cause: causes.WrongResult) -> tuple[str, str]:
    where = words_of(cause.where)
    how = f"wrong {where}" if cause.by is None else f"off by the factor {cause.by}"
    if cause.by is not None and not cause.is_everywhere:
        how += f" {where}"
    if cause.is_input:
        what = f"the gradients of inputs ({list_names(cause.names)}) are {how}"
        return what, "what is upstream of them would be trained with it"
    what = f"what the step returns as {list_names(cause.names)} is {how}"
    return what, "the mean over all ranks should be the single device's"
