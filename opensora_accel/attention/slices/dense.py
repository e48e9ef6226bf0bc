"""The slices of a dense mask, found row by row.

A row is runs of keys that are seen. A run continues a slice of the row above if it begins and ends at the same places
as the run there (full), or ends one further (causal), begins one further (inverse causal), or both (band), and the
slice has grown so from its first to its second row on:

    row 0   # # . . .      a slice begins: keys 0 1
    row 1   # # # . .      one further at the end: it is causal
    row 2   # # # # .      one further again
    row 3   # # # # .      no further: the slice ends above, and a new one begins

No mask has fewer slices for being cut at other rows, but for runs that could have gone on in two ways; so the number
is near the least, and what is not made of slices (noise) takes about one for each run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from opensora_accel.attention.slices.geometry import Slice


class _Growing(NamedTuple):
    """A slice that may go on: its first row, the run there, its last run, and how it grows from row to row."""

    row: int
    first: tuple[int, int]
    last: tuple[int, int]
    # Of the run's start and stop; None while there is one row only.
    steps: tuple[int, int] | None

    def next_run(self, runs: set[tuple[int, int]]) -> tuple[int, int] | None:
        """Of the next row's runs the one that it goes on with; None where it ends."""
        start, stop = self.last
        for steps in _STEPS if self.steps is None else (self.steps,):
            run = (start + steps[0], stop + steps[1])
            if run in runs:
                return run
        return None

    def ended(self, row: int) -> Slice:
        """The slice, whose last row is the one before `row`."""
        (start, stop), (last_start, last_stop) = self.first, self.last
        made = Slice(
            self.row,
            row,
            min(start, last_start),
            max(stop, last_stop),
            # Without growth the diagonals are no bound; `tight` brings in those that there are.
            start - self.row if last_start > start else -(row + stop),
            last_stop - row if last_stop > stop else last_stop,
        ).tight()
        assert made is not None
        return made


# Of the start and the stop of a run, from row to row: full, causal, inverse causal, band.
_STEPS = ((0, 0), (0, 1), (1, 0), (1, 1))


def slices_of_dense(mask: Tensor, max_slices: int) -> list[Slice]:
    """The slices of a mask [S_q, S_kv], bool.

    Raises:
        ValueError: another shape or dtype, or more than `max_slices` are needed.
    """
    if mask.dim() != 2 or mask.dtype != torch.bool:
        raise ValueError(
            f"a dense mask is bool [S_q, S_kv], true where a key may be seen; got {mask.dtype} {tuple(mask.shape)}"
        )
    return slices_of_rows([mask], mask.size(1), max_slices)


def slices_of_rows(parts: Iterable[Tensor], num_keys: int, max_slices: int) -> list[Slice]:
    """The slices of a mask that comes some rows at a time, [n, S_kv] each, bool.

    Raises:
        ValueError: more than `max_slices` are needed.
    """
    done: list[Slice] = []
    growing: list[_Growing] = []
    num_done = row = 0
    rows = itertools.chain.from_iterable(map(_runs, parts))
    for row, runs in enumerate(itertools.chain(rows, [[]])):
        going_on, left = [], set(runs)
        for each in growing:
            run = each.next_run(left)
            if run is None:
                num_done += 1
                if num_done <= max_slices:
                    done.append(each.ended(row))
                continue
            left.remove(run)
            steps = run[0] - each.last[0], run[1] - each.last[1]
            going_on.append(each._replace(last=run, steps=steps))
        growing = going_on + [_Growing(row, run, run, None) for run in runs if run in left]
    if num_done > max_slices:
        raise ValueError(
            f"this mask of {row} queries and {num_keys} keys would take {num_done:,} slices, and "
            f"{max_slices:,} are the most; one without structure is better passed as it is, or raise max_slices"
        )
    return done


def _runs(mask: Tensor) -> list[list[tuple[int, int]]]:
    """For each row the start and stop of each of its runs of keys that are seen."""
    padded = torch.nn.functional.pad(mask.to(torch.int8), (1, 1))
    changes = padded.diff(dim=1)
    starts, stops = (changes == 1).nonzero(), (changes == -1).nonzero()
    runs: list[list[tuple[int, int]]] = [[] for _ in range(mask.size(0))]
    for (row, start), stop in zip(starts.tolist(), stops[:, 1].tolist(), strict=True):
        runs[row].append((start, stop))
    return runs
