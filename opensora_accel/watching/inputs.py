"""What the ranks of a loop call the model with: who has whose sample, noise and timestep, and which line drew them.

Four ranks, of which 0 and 1 share sample A, and 2 and 3 share sample B:

    rank                      0     1     2     3
    clip, text, timestep      A     A     B     B       right
    clip, text                A     B     C     D       "sample": the loader deals to ranks, not to data ranks
    clip alone                A+ε   A+δ   B+ε   B+δ     "noise": drawn by the rank
    clip, timestep            A,1   A,2   B,3   B,4     "timestep": a noisy clip follows its timestep
    text alone                A     ∅     B     B       "caption dropout"
    noise, as it is drawn     ε     ε     ε     ε       "repeated noise": every rank is seeded alike
    clip, timestep            A,1   A,1   B,1   B,1     "repeated timestep": in every forward, while it changes

So the kind of each input names the mistake. Draws are seen where the program calls torch for them; those of a loader's
worker processes are not, and show in the inputs alone.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from opensora_accel.observe import digest
from opensora_accel.watchdog import named
from opensora_accel.wrapping import replaced
from shardformer.engine import Summary, is_real, named_values, summarise

_RANDOM = (
    *((torch, name) for name in ("randn", "rand", "randn_like", "rand_like", "normal", "bernoulli")),
    *((Tensor, name) for name in ("normal_", "uniform_", "exponential_", "log_normal_", "bernoulli_")),
)
# Two ranks may draw the same few numbers by chance, or drop the same captions.
_FEWEST_NUMBERS = 64

# So many different timesteps that are equal on all data ranks are no chance, also where there are few to choose from.
_ENOUGH_TIMES, _FEW_TIMES = 4, 64

_TIMES = ("time", "sigma")
_TEXTS = ("encoder", "text", "txt", "context", "prompt", "caption", "pooled", "guidance")


@dataclass(frozen=True)
class Draw:
    """A random tensor that the program drew: at which line, how many numbers, and a number of their bits."""

    line: str
    num_numbers: int
    digest: int
    # Whether two draws of one number are the same by no chance.
    is_continuous: bool = True


class Draws:
    """Within it, notes the random tensors that this thread of the program draws, and at which line.

    torch's functions are wrapped, by name. A mode for functions would see them too; but what is compiled within a mode
    is compiled again without it.
    """

    def __init__(self) -> None:
        self.seen: list[Draw] = []
        self.is_paused = False

    def __enter__(self) -> Draws:
        self._thread = threading.get_ident()
        with ExitStack() as undo:
            for owner, name in _RANDOM:
                undo.enter_context(replaced(owner, name, self._noted(getattr(owner, name))))
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _noted(self, draw: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(draw)
        def noted(*args: Any, **kwargs: Any) -> Any:
            result = draw(*args, **kwargs)
            if torch.compiler.is_compiling() or self.is_paused or threading.get_ident() != self._thread:
                return result
            if is_real(result) and result.is_floating_point():
                caller = sys._getframe(1)
                line = f"{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}"
                with _disable_current_modes(), torch.no_grad():
                    is_continuous = not draw.__name__.startswith("bernoulli")
                    self.seen.append(Draw(line, result.numel(), int(digest(result)), is_continuous))
            return result

        return noted


@dataclass(frozen=True)
class Inputs:
    """What one rank calls the model with, in numbers that can be compared."""

    data_rank: int
    # By the name of the argument: "clip", "text" or "timestep", the shape, and the values.
    kinds: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    values: dict[str, Summary]
    draws: tuple[Draw, ...]
    # Different timesteps, of which a few are enough.
    times: tuple[float, ...] = ()

    def of_kind(self, kind: str) -> dict[str, Summary]:
        return {name: self.values[name] for name, each in self.kinds.items() if each == kind}


def look_at_inputs(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], data_rank: int, draws: Sequence[Draw]
) -> Inputs:
    bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    kinds, shapes, values, times = {}, {}, {}, list[float]()
    with _disable_current_modes(), torch.no_grad():
        for name, value in named_values("", bound):
            if isinstance(value, Tensor) and not is_real(value):
                continue
            kinds[name] = _kind(name, value)
            shapes[name] = tuple(value.shape) if isinstance(value, Tensor) else ()
            values[name] = summarise(value)
            if kinds[name] == "timestep":
                times += value.flatten()[:_FEW_TIMES].tolist() if isinstance(value, Tensor) else [value]
    return Inputs(data_rank, kinds, shapes, values, tuple(draws), tuple(dict.fromkeys(times)))


def _kind(name: str, value: Tensor | float) -> str:
    root = name.partition(".")[0].partition("[")[0]
    if root == "t" or any(part in root for part in _TIMES):
        return "timestep"
    if root == "y" or any(part in root for part in _TEXTS):
        return "text"
    return "clip" if isinstance(value, Tensor) and value.is_floating_point() else "other"


def mistakes_of_inputs(everyone: Sequence[Inputs]) -> Iterator[tuple[str, str]]:
    """(Mistake, who and what) for one forward of all ranks; the same on every rank.

    Args:
        everyone: in order of ranks.
    """
    firsts: dict[int, int] = {}  # the first rank that has each data rank's sample
    for rank, inputs in enumerate(everyone):
        first = firsts.setdefault(inputs.data_rank, rank)
        mistake = _difference(everyone[first], inputs)
        if mistake is not None:
            name, what = mistake
            pairs = zip(everyone[first].draws, inputs.draws, strict=False)
            line = next((theirs.line for mine, theirs in pairs if mine != theirs), None)
            drawn = "" if line is None else f"; the first draw that differs is at {line}"
            yield name, f"{named([first, rank])} share a sample, and have another {what}{drawn}"
            return
    for draws in zip(*(everyone[rank].draws for rank in firsts.values()), strict=False):
        large = [draw for draw in draws if draw.num_numbers >= _FEWEST_NUMBERS]
        if len(draws) > 1 and len(large) == len(draws) and len({draw.digest for draw in draws}) == 1:
            texts = [everyone[rank].of_kind("text") for rank in firsts.values()]
            # What is drawn by samples is drawn again for the same ones.
            is_same_sample = bool(texts[0]) and all(text == texts[0] for text in texts)
            yield (
                "repeated samples" if is_same_sample else "repeated noise",
                f"{named([*firsts.values()])} drew the same {draws[0].num_numbers} numbers at {draws[0].line}, for "
                f"{'the same text' if is_same_sample else 'samples of their own'}",
            )
            return
    whole = [everyone[rank] for rank in firsts.values()]
    if len(whole) > 1 and all(_difference(whole[0], other) is None for other in whole[1:]):
        yield "repeated samples", f"{named([*firsts.values()])} called the model with the very same inputs"


class Repeats:
    """What only several forwards show: data ranks whose timesteps go together, microbatches of one noise."""

    def __init__(self) -> None:
        self._times: set[float] = set()
        self._num_drawn_alike = 0
        self._are_times_alike = True
        self.begin_step()

    def begin_step(self) -> None:
        # By rank, line and digest: the text that the noise was drawn for, and after how many backwards.
        self._drawn: dict[tuple[int, str, int], tuple[dict[str, Summary], int]] = {}
        # With the numbers of backwards before both of them.
        self._twice: list[tuple[int, int, str]] = []

    def of_timesteps(self, everyone: Sequence[Inputs]) -> Iterator[tuple[str, str]]:
        """(Mistake, what), after one more forward of all ranks; the same on every rank.

        Args:
            everyone: in order of ranks.
        """
        firsts = _first_of_each_data_rank(everyone)
        ranks = [everyone[rank] for rank in firsts]
        times = [each.of_kind("timestep") for each in ranks]
        if len(ranks) < 2 or not times[0]:
            return
        self._are_times_alike &= all(
            times[0].keys() == other.keys() and all(times[0][n].agrees(other[n]) for n in other)
            for other in times[1:]
        )
        self._times |= set(ranks[0].times)
        for draws in zip(*(each.draws for each in ranks), strict=False):
            is_few = draws[0].is_continuous and draws[0].num_numbers < _FEWEST_NUMBERS
            if is_few and len({draw.digest for draw in draws}) == 1:
                self._num_drawn_alike += draws[0].num_numbers
        # One timestep for all of training is meant. A few that one chooses from may meet by chance; two numbers that
        # were drawn from all there are do not.
        is_chance = len(self._times) < _ENOUGH_TIMES and self._num_drawn_alike < 2
        if self._are_times_alike and len(self._times) > 1 and not is_chance:
            yield (
                "repeated timestep",
                f"{named(firsts)} called the model with the same timesteps, for samples of their own",
            )

    def note_noise(self, everyone: Sequence[Inputs], num_backwards: int) -> None:
        """Compares what each rank has drawn for this forward with what it drew for others of the step.

        Args:
            num_backwards: of the step, before this forward.
        """
        drawn = {}
        for rank, inputs in enumerate(everyone):
            text = inputs.of_kind("text")
            for draw in inputs.draws:
                key = rank, draw.line, draw.digest
                if draw.num_numbers < _FEWEST_NUMBERS:
                    continue
                drawn[key] = text, num_backwards
                # What is drawn by samples is drawn again for the same ones.
                before, when = self._drawn.get(key, (text, 0))
                if key in self._drawn and not (text and text == before):
                    what = (
                        f"rank {rank} drew the same {draw.num_numbers} numbers at {draw.line} for two forwards of a "
                        "step, for samples of their own"
                    )
                    self._twice.append((when, num_backwards, what))
        self._drawn |= drawn

    def forget_noise(self, backwards: range) -> None:
        """Of forwards whose gradients the loop has thrown away.

        Args:
            backwards: numbers of backwards that had ended before these forwards.
        """
        self._twice = [each for each in self._twice if not {*each[:2]} & {*backwards}]

    def of_noise(self) -> list[tuple[str, str]]:
        """(Mistake, what) of the microbatches of a step, before its optimizer."""
        return [("repeated noise", what) for _, _, what in self._twice[:1]]


def _first_of_each_data_rank(everyone: Sequence[Inputs]) -> list[int]:
    firsts: dict[int, int] = {}
    for rank, inputs in enumerate(everyone):
        firsts.setdefault(inputs.data_rank, rank)
    return list(firsts.values())


def _difference(one: Inputs, other: Inputs) -> tuple[str, str] | None:
    """The mistake by which two ranks that share a sample have other inputs, and which those are."""
    names = list(dict.fromkeys([*one.values, *other.values]))
    differing = [
        name
        for name in names
        if name not in one.values
        or name not in other.values
        or not one.values[name].agrees(other.values[name])
    ]
    if not differing:
        return None
    kinds = {(one.kinds | other.kinds)[name] for name in differing}
    reshaped = [
        name
        for name in differing
        if one.kinds.get(name) == "clip" and one.shapes[name] != other.shapes.get(name)
    ]
    if reshaped:
        name = reshaped[0]
        return "bucket", f"shape of {name}: {one.shapes[name]} and {other.shapes.get(name)}"
    if {"clip", "text"} <= kinds:
        mistake = "sample"
    elif "timestep" in kinds:
        mistake = "timestep"
    elif "text" in kinds:
        mistake = "caption dropout"
    elif "clip" in kinds:
        mistake = "noise"
    else:
        mistake = "sample"
    return mistake, ", ".join(differing)
