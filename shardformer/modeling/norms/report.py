"""What was swapped and why, for people (`print`) and for files (`as_dict`)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass

from shardformer.modeling.norms.compare import Mode


@dataclass(frozen=True)
class Row:
    """One norm of the model.

    Attributes:
        was: its class. order, eps: what it was found to compute; "" and None where nothing was found.
        to: what runs instead; None where it was kept. reason: why it was kept.
        difference: the largest of the outputs on random input, over the largest value of a row; 0 is bit for bit.
        saved_before, saved_after: bytes kept for backward per token, beside the input and the parameters.
    """

    name: str
    was: str
    order: str = ""
    eps: float | None = None
    to: str | None = None
    reason: str = ""
    difference: float = 0.0
    saved_before: int = 0
    saved_after: int = 0

    @property
    def outcome(self) -> str:
        if self.to is None:
            return f"kept: {self.reason}"
        change = "bit for bit" if self.difference == 0 else f"within {self.difference:.1e}"
        return (
            f"{self.to}, {change}, keeps {self.saved_after} B a token for backward, not {self.saved_before}"
        )


class SwapReport:
    """Every norm of a model in order, and the way back."""

    def __init__(self, mode: Mode, rows: list[Row], undo: Callable[[], None]):
        self.mode = mode
        self.rows = rows
        self._undo: Callable[[], None] | None = undo

    @property
    def num_swapped(self) -> int:
        return sum(row.to is not None for row in self.rows)

    def undo(self) -> None:
        """Puts the very same modules back. ValueError the second time."""
        if self._undo is None:
            raise ValueError("these swaps were undone already")
        self._undo()
        self._undo = None

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {"mode": self.mode, "norms": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        head = f"norms swapped ({self.mode}): {self.num_swapped} of {len(self.rows)}"
        lines = [
            (f"{count} ×", name, row.was, row.order, "" if row.eps is None else f"{row.eps:.3g}", row.outcome)
            for name, row, count in self._grouped()
        ]
        table = [("", "module", "class", "order", "eps", "now"), *lines]
        widths = [max(len(line[column]) for line in table) for column in range(5)]
        rows = [
            "  ".join([*(cell.ljust(w) for cell, w in zip(line, widths, strict=False)), line[5]])
            for line in table
        ]
        return "\n".join([head, *(row.rstrip() for row in rows)] if lines else [head])

    def _grouped(self) -> list[tuple[str, Row, int]]:
        """Rows that tell the same, once: `blocks.*.attn1.norm_q` for those of all blocks."""
        groups: dict[tuple[object, ...], list[Row]] = {}
        for row in self.rows:
            pattern = re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", row.name)
            told = (pattern, *list(asdict(row).values())[1:])
            groups.setdefault(told, []).append(row)
        return [
            (str(told[0]) if len(rows) > 1 else rows[0].name, rows[0], len(rows))
            for told, rows in groups.items()
        ]
