"""What the pages of reports are made of: numbers that name their place, tables, pictures with their tables, a frame.

A page has no script and loads nothing but clips that lie beside it, which its content security policy enforces. Tables
open with <details>, by mouse or keyboard, and wide ones scroll by themselves.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Sequence
from typing import Any


class Value:
    """A place in the JSON document, which shows itself as HTML."""

    def __init__(self, data: Any, path: str = ""):
        self.data, self.path = data, path

    def __getitem__(self, key: str | int) -> Value:
        return Value(self.data[key], f"{self.path}/{key}" if self.path else str(key))

    def __iter__(self) -> Iterator[Value]:
        return (self[i] for i in range(len(self.data)))

    def __bool__(self) -> bool:
        return bool(self.data)

    def show(self, formatter: Callable[[float], str]) -> str:
        if self.data is None:
            return "–"
        return (
            f'<data value="{self.data!r}" data-path="{html.escape(self.path)}">{formatter(self.data)}</data>'
        )

    def text(self) -> str:
        return html.escape(str(self.data))


def seconds(value: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {unit}" if abs(value) < 1000 else f"{value:,.0f} s"
    return f"{value * 1e9:.3g} ns" if value else "0 s"


def size(value: float) -> str:
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(value) >= scale:
            return (
                f"{value / scale:,.3g} {unit}"
                if abs(value) / scale < 1000
                else f"{value / scale:,.0f} {unit}"
            )
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


UNITS = {"s": seconds, "bytes": size, "tokens/s": number, "share": percent}


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first cell of each row names it."""
    columns = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in head)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    label = html.escape(caption)
    return (
        f'<div class="wide" role="region" tabindex="0" aria-label="{label}"><table><caption>{label}</caption>'
        f"<thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def figure(picture: str, how_to_read: str, numbers: str) -> str:
    return (
        f'<figure><div class="wide" role="region" tabindex="0" aria-label="picture">{picture}</div>'
        f"<figcaption>{how_to_read}</figcaption></figure>"
        f"<details><summary>The numbers as a table</summary>{numbers}</details>"
    )


def frame(title: str, header: str, links: Sequence[tuple[str, str]], body: str, footer: str) -> str:
    """The whole page.

    Args:
        links: the identifier of each section in `body`, and its heading.
    """
    navigation = "".join(f'<a href="#{identifier}">{heading}</a>' for identifier, heading in links)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "img-src data:; media-src 'self' file:\">"
        f'<link rel="icon" href="data:,"><title>{title}</title><style>{_STYLE}</style></head><body>'
        f'<header>{header}<nav aria-label="Sections">{navigation}</nav></header><main>{body}</main>'
        f"<footer>{footer}</footer></body></html>\n"
    )


_STYLE = """
:root{color-scheme:light dark;--ink:#1c2430;--soft:#566070;--line:#d4d9e0;--surface:#fff;--page:#f5f6f8;
--accent:#2f6aa8}
@media(prefers-color-scheme:dark){:root{--ink:#e4e8ee;--soft:#a3adba;--line:#3a424e;--surface:#1b2027;--page:#12161b;
--accent:#7fb3e6}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,sans-serif}
header,main,footer{max-width:76rem;margin:0 auto;padding:0 1.25rem}
header{padding-top:2rem}
.kind{margin:0;color:var(--soft);font-size:.85rem;letter-spacing:.04em}
h1{margin:.1rem 0 .6rem;font-size:1.9rem;line-height:1.2;overflow-wrap:anywhere}
h2{margin:0 0 .8rem;font-size:1.25rem}
h3.run{margin:0 0 .6rem;font-size:1rem;color:var(--soft);overflow-wrap:anywhere}
.label{display:inline-block;margin:0 0 .6rem;padding:.15rem .6rem;border:1px solid var(--line);border-radius:.4rem;
color:var(--soft);font-size:.9rem}
nav{display:flex;flex-wrap:wrap;gap:.3rem 1.1rem;padding:.4rem 0 1.2rem;font-size:.92rem}
a{color:var(--accent);text-underline-offset:.2em}
:focus-visible{outline:2px solid var(--accent);outline-offset:2px;border-radius:.2rem}
section{margin:0 0 1.2rem;padding:1.3rem 1.4rem;background:var(--surface);
border:1px solid var(--line);border-radius:.7rem}
.runs{display:grid;gap:2rem;grid-template-columns:minmax(0,1fr)}
.runs>div{min-width:0}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(8.5rem,1fr));gap:.8rem 1.4rem;margin:0 0 1.2rem}
.facts dt{color:var(--soft);font-size:.82rem}
.facts dd{margin:0;font-size:1.3rem;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.findings{margin:0;padding:0;list-style:none;counter-reset:f}
.findings li{counter-increment:f;position:relative;padding:.7rem 0 .7rem 2.6rem;border-top:1px solid var(--line)}
.findings li::before{content:counter(f);position:absolute;left:.2rem;top:.7rem;font-weight:600;color:var(--soft)}
.findings p{margin:.1rem 0;max-width:62rem}
.findings p:first-child{color:var(--soft);font-size:.88rem}
.tag{display:inline-block;padding:0 .5rem;border:1px solid currentColor;border-radius:1rem;color:var(--ink);
font-weight:600}
.notes{margin:1rem 0 0;padding-left:1.1rem;color:var(--soft);font-size:.9rem}
figure{margin:0 0 .4rem}
.clips{display:flex;flex-wrap:wrap;gap:.8rem}
.clip video{display:block;max-width:100%;max-height:16rem;border-radius:.3rem}
h3{margin:.8rem 0 .4rem;font-size:1rem}
.wide{overflow-x:auto;max-width:100%}
/* Black is what SVG has where matplotlib says nothing. */
svg{fill:var(--ink);display:block;width:100%;max-width:60rem;height:auto}
svg.sent{max-width:30rem}
svg.narrow{display:none}
figcaption{margin:.3rem 0 .5rem;color:var(--soft);font-size:.9rem;max-width:60rem}
details{margin:0 0 1.1rem}
summary{cursor:pointer;color:var(--accent);font-size:.92rem;width:fit-content}
table{border-collapse:collapse;font-size:.88rem;font-variant-numeric:tabular-nums;margin:.3rem 0 .9rem}
caption{text-align:left;padding:.3rem 0;font-weight:600;white-space:nowrap}
th,td{padding:.28rem .8rem .28rem 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--line);
white-space:nowrap}
thead th{color:var(--soft);font-weight:500}
tbody th{font-weight:500}
small{color:var(--soft);font-size:.85em;font-weight:400}
footer{padding:.6rem 1.25rem 2.5rem;color:var(--soft);font-size:.88rem}
@media(min-width:64rem){.runs.n2{grid-template-columns:repeat(2,minmax(0,1fr))}.runs.n2 svg{display:none}
.runs.n2 svg.narrow{display:block}}
@media(max-width:40rem){header,main,footer{padding-left:.7rem;padding-right:.7rem}section{padding:1rem .8rem}
.findings li{padding-left:1.7rem}h1{font-size:1.5rem}svg{display:none}svg.narrow{display:block}
th,td,caption{white-space:normal;overflow-wrap:anywhere}}
@media(prefers-reduced-motion:no-preference){html{scroll-behavior:smooth}}
@media print{details{display:block}section{break-inside:avoid-page}}
"""
