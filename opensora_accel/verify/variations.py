"""The step at other sizes, and with its dropouts: those that it is proven with may be the ones that hide a mistake.

A split that drops what is left over is right for 12 tokens on 2, 3 and 4 ranks, and wrong for 13. Keys that are
transposed "unless they are so already" are wrong only where there are as many tokens as heads. Which sizes there are is
what the arguments of a step file are by default:

    def model_fn(heads=4, channels=16): ...
    def step(model, run, tokens=12): ...

From these follow the trials, each beside one device at the same sizes:

    tokens = 13                  another number: the first that one device runs with, of 1, 2, 4 and 8 more
    tokens = 1                   nothing to share out
    tokens = 4                   as many as the largest degree
    tokens = heads, heads = 4    every two alike

One that one device cannot run (channels = 17 of 4 heads) is none. Of one that is wrong, those sizes that it takes are
looked for: with tokens = heads = 4, is it wrong with 4 tokens of 5 heads as well, and with 5 of 5?

Dropouts are 0 in a proof, because a split sequence cannot draw the masks of a whole one. Where ranks differ in their
samples alone they can, and there the step runs once more with them.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from opensora_accel.verify.causes import Cause, join_words

Sizes = Mapping[str, int]

# By how much a size is changed; the step may ask for a multiple of 8, or for 4n + 1.
_STEPS = (1, 2, 4, 8)
# A proof's model is tiny, and two sizes are made alike.
_LARGEST = 512


def sizes_of(*functions: Callable[..., Any] | None) -> dict[str, int]:
    """The arguments of these that are a whole number by default, from 1 to 512: what is larger is a seed, say.

    Raises:
        ValueError: one of them is another number by default in another function.
    """
    sizes: dict[str, int] = {}
    for function in functions:
        for name, size in _whole_numbers(function).items():
            if sizes.setdefault(name, size) != size:
                raise ValueError(
                    f"{name} is {sizes[name]} by default in model_fn and {size} in step; sizes of one name are one size"
                )
    return sizes


def _whole_numbers(function: Callable[..., Any] | None) -> dict[str, int]:
    try:
        parameters = {} if function is None else inspect.signature(function).parameters
    except ValueError:  # of something built in
        return {}
    defaults = {name: each.default for name, each in parameters.items()}
    # True is an int to Python, and no size.
    return {
        name: each
        for name, each in defaults.items()
        if isinstance(each, int) and not isinstance(each, bool) and 0 < each <= _LARGEST
    }


@dataclass(frozen=True)
class AtSizes:
    """A function that is called with other sizes; it can be sent where the function itself can."""

    function: Callable[..., Any]
    sizes: Sizes

    def __call__(self, *arguments: Any) -> Any:
        own = _whole_numbers(self.function)
        return self.function(*arguments, **{name: size for name, size in self.sizes.items() if name in own})


@dataclass(frozen=True)
class Outcome:
    """Of the step at some sizes: what is wrong, or why it cannot be said."""

    causes: Sequence[Cause] = ()
    does_run: bool = True  # on one device
    refusal: str = ""  # of a mesh: what a rank says, `on ulysses=2: ValueError: 5 heads on 2 ranks`


@dataclass(frozen=True)
class Variations:
    """What was tried beside the step as given.

    Attributes:
        tried: words of the trials that came to an end: `tokens = 13`, `dropout on`.
        refused: words of those that a mesh refuses, with what it says.
        causes: what is wrong in the first wrong trial.
        also_wrong: words of the other wrong ones.
        reason: why nothing was tried.
    """

    tried: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    causes: tuple[Cause, ...] = ()
    also_wrong: tuple[str, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return self.reason
        wrong = len(self.also_wrong) + bool(self.causes)
        count = f"{wrong} of {len(self.tried)} wrong" if wrong else f"{len(self.tried)} right"
        refused = f"; {len(self.refused)} that the step refuses" if self.refused else ""
        values: dict[str, list[str]] = {}
        for words in self.tried:
            name, _, value = words.partition(" = ")
            values.setdefault(name, []).append(value)
        listed = (f"{name} {', '.join(filter(None, each))}".strip() for name, each in values.items())
        return f"{count} ({'; '.join(listed)}){refused}" if self.tried else f"none{refused}"

    @property
    def notes(self) -> list[str]:
        first = [f"{words} {why}" for words, why in itertools.islice(self.refused.items(), 3)]
        notes = [f"the step refuses {len(self.refused)} other sizes: {'; '.join(first)}"] if first else []
        if self.also_wrong:
            notes.append(
                f"wrong as well: {', '.join(self.also_wrong)}; they are tried again once the first is right"
            )
        return notes


@dataclass(frozen=True)
class Trial:
    """The step with some sizes changed, or with its dropouts on."""

    changed: Mapping[str, int] = field(default_factory=dict)
    given: Sizes = field(default_factory=dict)
    has_dropout: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        return {**self.given, **self.changed}

    def __str__(self) -> str:
        if self.has_dropout:
            return "dropout on"
        return ", ".join(f"{name} = {size}" for name, size in self.changed.items())


Prove = Callable[[Trial, bool], Outcome]


def try_variations(
    sizes: Sizes, prove: Prove, say: Callable[[str, int, int], None], *, degree: int, with_dropout: bool
) -> Variations:
    """Changes the sizes in turns, and turns dropouts on.

    Args:
        prove: the step on one device and on all meshes; told whether to look closer at what is wrong.
        say: is told the words of each trial, how many are done, and how many there are.
        degree: the largest of all axes.
        with_dropout: whether there are dropouts, and meshes that can draw the masks of one device.
    """
    if not sizes and not with_dropout:
        return Variations(
            reason="none tried: no argument of step or model_fn is a whole number by default (tokens=11)"
        )
    known: dict[tuple[int, ...], Outcome] = {}

    def outcome(**changed: int) -> Outcome:
        trial = Trial(changed, sizes)
        key = tuple(trial.sizes.values())
        if key not in known:
            known[key] = prove(trial, False)
        return known[key]

    trials, found = list(_trials(sizes, degree)), list[tuple[Trial, Outcome]]()
    for number, candidates in enumerate(trials):
        say(str(Trial(candidates[0])), number, len(trials))
        changed = next((each for each in candidates if outcome(**each).does_run), None)
        if changed is not None and changed not in (trial.changed for trial, _ in found):
            found.append((Trial(changed, sizes), outcome(**changed)))
    if with_dropout:
        trial = Trial(has_dropout=True)
        say(str(trial), len(trials), len(trials))
        found.append((trial, prove(trial, False)))
    wrong, causes = [trial for trial, each in found if each.causes], tuple[Cause, ...]()
    for trial in wrong[:1]:
        say(f"which sizes matter of {trial}", len(trials), len(trials))
        at = f"with {trial}" if trial.has_dropout else _what_it_takes(trial, outcome)
        causes = tuple(replace(cause, at=at) for cause in prove(trial, True).causes)
    refused = {str(trial): each.refusal for trial, each in found if each.refusal}
    tried = tuple(str(trial) for trial, _ in found if str(trial) not in refused)
    return Variations(tried, refused, causes, tuple(map(str, wrong[1:])))


def _trials(sizes: Sizes, degree: int) -> Iterator[list[dict[str, int]]]:
    """Each is a list of changes, of which the first counts that one device can run."""
    seen = [dict(sizes)]

    def new(*changes: dict[str, int]) -> Iterator[list[dict[str, int]]]:
        fresh = [each for each in changes if {**sizes, **each} not in seen]
        # A second candidate is none of its own.
        seen.extend({**sizes, **each} for each in fresh[:1])
        if fresh:
            yield fresh

    for name, size in sizes.items():
        yield from new(*({name: size + step} for step in _STEPS))
        yield from new({name: 1})
        yield from new({name: degree})
    for one, other in itertools.combinations(sizes, 2):
        yield from new({one: sizes[other]}, {other: sizes[one]})


def _what_it_takes(trial: Trial, outcome: Callable[..., Outcome]) -> str:
    """Of a wrong trial, the sizes that matter: `where tokens = heads`, `with tokens = 13 or 15 (right with 12)`."""
    ((name, size),), sizes = trial.changed.items(), trial.given
    for other in (other for other, same in sizes.items() if same == size and other != name):
        apart = _first_run(outcome, [{name: size, other: size + step} for step in _STEPS])
        if apart is None or apart.causes:
            continue
        # The other size matters as well. Alike at another number?
        alike = _first_run(outcome, [{name: size + step, other: size + step} for step in _STEPS])
        if alike is not None and alike.causes:
            return f"where {name} = {other}"
        return f"with {name} = {other} = {size}"
    near = sorted({1, 2, 3, size, *range(max(1, sizes[name] - 1), sizes[name] + 4)})
    found = {number: outcome(**{name: number}) for number in near}
    known = {number: each for number, each in found.items() if each.does_run and not each.refusal}
    wrong = [str(number) for number, each in known.items() if each.causes]
    right = [str(number) for number, each in known.items() if not each.causes]
    return f"with {name} = {join_words(wrong, 'or')} (right with {join_words(right)})"


def _first_run(outcome: Callable[..., Outcome], candidates: Sequence[Sizes]) -> Outcome | None:
    """What came of the first of them that the step runs with."""
    outcomes = (outcome(**each) for each in candidates)
    return next((each for each in outcomes if each.does_run and not each.refusal), None)
