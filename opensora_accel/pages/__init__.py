"""Pages that tools write: figures, tables and charts in one file that needs no network."""

from opensora_accel.pages import charts
from opensora_accel.pages.markup import (
    UNITS,
    Value,
    figure,
    frame,
    integer,
    number,
    percent,
    ratio,
    seconds,
    size,
    speed,
    table,
)

__all__ = [
    "UNITS",
    "Value",
    "charts",
    "figure",
    "frame",
    "integer",
    "number",
    "percent",
    "ratio",
    "seconds",
    "size",
    "speed",
    "table",
]
