"""How a page is written: a Jinja template, filled with values.

The template of a tool stands beside the tool's Python, which computes what the page shows. It extends page.html here,
the frame that all pages have, and takes tables and figures from macros.html:

    render("planner/plan.html", document=Value(document))     {{ document.best.samples | integer }}

Every value is escaped, whoever wrote it; only the pictures of `charts` and what templates make are markup. A template
that asks for what it was not given fails.

A number is shown by a filter. Where it is a `Value`, a place in the tool's JSON document, the page names the place:

    <data value="0.765" data-path="runs/0/mean_step_s">765 ms</data>
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


class Value:
    """A place in a JSON document. A template prints it as text, or by a filter as a number that names its place.

    In a template `value.step_s` and `value["step_s"]` are the place below. For the keys "data" and "path", which are
    attributes here, there is only the latter.
    """

    def __init__(self, data: Any, path: str = ""):
        self.data, self.path = data, path

    def __getitem__(self, key: str | int) -> Value:
        return Value(self.data[key], f"{self.path}/{key}" if self.path else str(key))

    def __iter__(self) -> Iterator[Value]:
        return (self[i] for i in range(len(self.data)))

    def __len__(self) -> int:
        return len(self.data)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __str__(self) -> str:
        return str(self.data)


def render(template: str, **values: Any) -> str:
    """The page that a template makes of the values.

    Args:
        template: its path within opensora_accel, such as "profiler/run.html".

    Raises:
        jinja2.UndefinedError: the template asks for a value that is not given.
    """
    return _ENVIRONMENT.get_template(template).render(values)


def seconds(value: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {unit}" if abs(value) < 1000 else f"{value:,.0f} s"
    return f"{value * 1e9:.3g} ns" if value else "0 s"


def size(value: float) -> str:
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(value) >= scale:
            digits = ",.3g" if abs(value) / scale < 1000 else ",.0f"
            return f"{value / scale:{digits}} {unit}"
    return f"{value:.3g} B"


def speed(value: float) -> str:
    return f"{value / 1e9:.3g} GB/s" if value >= 1e8 else f"{value / 1e6:.3g} MB/s"


def percent(value: float) -> str:
    return f"{value:.1%}"


def number(value: float) -> str:
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def integer(value: float) -> str:
    return f"{value:d}"


def ratio(value: float) -> str:
    return f"{value:.3g} : 1"


def teraflops(value: float) -> str:
    return f"{value / 1e12:,.4g} T"


def _filter(format_number: Callable[[float], str]) -> Callable[[Any], str]:
    """The filter that shows a number, or the one at a place in the document; what is None there as a dash."""

    def show(value: Any) -> str:
        shown = value.data if isinstance(value, Value) else value
        if shown is None:
            return "–"
        text = format_number(shown)
        if isinstance(value, Value):
            return Markup('<data value="{!r}" data-path="{}">{}</data>').format(shown, value.path, text)
        return text

    return show


_ENVIRONMENT = Environment(
    loader=PackageLoader("opensora_accel", ""),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
for _format in (seconds, size, speed, percent, number, integer, ratio, teraflops):
    _ENVIRONMENT.filters[_format.__name__] = _filter(_format)
