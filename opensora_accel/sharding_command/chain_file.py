"""A chain of einsums as text, one step a line, and the report on it as text or JSON.

axes tp=8
sizes s=4096 t=4096 b=1 c=5120 h=40 d=128
x[sbc]                           a tensor; I on the axes that it does not name
wq[chd] tp:S(h)
n = map x along c                a function that is not linear, here of whole rows along c
n_used = move n tp:R
q[sbhd] = einsum n_used wq       a product, by the letters
keys[tbc] = rename n_used
out = add x y
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from opensora_accel.documents import read_text
from opensora_accel.links import Link
from opensora_accel.sharding import FREE, Chain, Collective, Placement, parse_placement
from opensora_accel.sharding_command.balance import balance_of

_LINE = re.compile(
    r"(?P<name>\w+)(\[(?P<labels>[A-Za-z]*)\])?\s*(=\s*(?P<operation>\w+)\s+(?P<rest>.*)|(?P<placed>.*))"
)
STEPS = "einsum, map, add, rename, move"


def read_chain(path: Path, element_bytes: int = 2) -> Chain:
    """The chain that a file describes.

    Raises:
        ValueError: a line is wrong; the message has its number and text.
        OSError: the file cannot be read.
    """
    chain: Chain | None = None
    degrees: dict[str, int] = {}
    sizes: dict[str, int] | None = None
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        text = line.partition("#")[0].strip()
        word, _, rest = text.partition(" ")
        try:
            if not text:
                continue
            if word in ("axes", "sizes"):
                if chain is not None:
                    raise ValueError(f"{word} come before the first tensor")
                numbers = parse_numbers(rest.split())
                degrees, sizes = (numbers, sizes) if word == "axes" else (degrees, numbers)
                continue
            if not degrees:
                raise ValueError("the first line names the axes and their ranks: axes tp=8")
            # Made by the first step, when axes and sizes are known.
            chain = chain or Chain(degrees, sizes, element_bytes)
            _add_step(chain, text)
        except (ValueError, KeyError) as error:
            said = f"the size of {error} is missing" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"{path.name}, line {number} ({text}): {said}") from error
    if chain is None:
        raise ValueError(f"{path.name} holds no steps")
    return chain


def parse_numbers(items: Sequence[str], known: Sequence[str] | None = None) -> dict[str, int]:
    """The numbers of items such as "tp=8", by name.

    Raises:
        ValueError: an item has another form, a name that is not `known`, or a name that was there before.
    """
    numbers: dict[str, int] = {}
    for item in items:
        name, _, value = item.partition("=")
        is_known = known is None or name in known
        if not name or not is_known or not value.isdigit() or int(value) < 1:
            names = "" if known is None else f"; the names are {', '.join(known)}"
            raise ValueError(f"{item!r} is no NAME=NUMBER{names}")
        if name in numbers:
            raise ValueError(f"{name} is given twice, {numbers[name]} and {value}")
        numbers[name] = int(value)
    return numbers


def _add_step(chain: Chain, text: str) -> None:
    match = _LINE.fullmatch(text)
    if match is None:
        raise ValueError(
            f"a step is NAME[labels] placements, or NAME[labels] = STEP operands; steps: {STEPS}"
        )
    name, labels, operation = match["name"], match["labels"], match["operation"]
    if labels is None and operation in (None, "einsum", "rename"):
        raise ValueError(f"{name} needs its labels: {name}[...]")
    if operation is None:
        chain.tensor(name, labels, **_placements(match["placed"].split(), labels))
        return
    words = match["rest"].split()
    if operation == "einsum":
        chain.einsum(name, labels, *words)
    elif operation == "rename":
        chain.rename(name, _one(words, operation), labels)
    elif operation == "add":
        chain.add(name, *words)
    elif operation == "move":
        # The labels distinguish a placement R from a label R.
        operand = _one(words[:1], operation)
        known = chain.nodes[operand].labels if operand in chain.nodes else ()
        chain.move(name, operand, **_placements(words[1:], known))
    elif operation == "map":
        operand, _, along = match["rest"].partition(" along ")
        chain.map(name, _one(operand.split(), operation), along.strip())
    else:
        raise ValueError(f"there is no step {operation!r}; steps: {STEPS}")


def _one(words: list[str], operation: str) -> str:
    if len(words) != 1:
        raise ValueError(f"{operation} takes one tensor; got {' '.join(words) or 'none'}")
    return words[0]


def _placements(words: list[str], labels: Sequence[str]) -> dict[str, Placement]:
    placements: dict[str, Placement] = {}
    for word in words:
        axis, colon, placement = word.partition(":")
        if not colon:
            raise ValueError(f"{word!r} is no AXIS:PLACEMENT")
        if axis in placements:
            raise ValueError(f"{axis} is given twice: {axis}:{placements[axis]} and {word}")
        placements[axis] = parse_placement(placement, labels)
    return placements


def chain_text(chain: Chain, link: Link | None, flops_per_s: float | None) -> str:
    """Every tensor with its placement, then what is communicated, forward and backward."""
    shown = [f"{node.name}[{''.join(node.labels)}]" for node in chain.nodes.values()]
    width = max(map(len, shown)) + 2
    lines = [", ".join(f"{axis} ({degree} ranks)" for axis, degree in chain.degrees.items()), ""]
    for text, node in zip(shown, chain.nodes.values(), strict=True):
        placed = "  ".join(f"{axis}:{placement}" for axis, placement in node.placements.items())
        made = f"{node.operation} {' '.join(node.operands)}" if node.operands else ""
        lines.append(f"  {text:<{width}}{placed:<12} {made}".rstrip())
    lines += ["", "to communicate"]
    for move in chain.moves:
        way = f"{move.tensor} {move.before} → {move.after} over {move.axis}"
        lines.append(f"  {way}: {_said(move.forward, link)}; backward {_said(move.backward, link)}")
    for pending in chain.pending:
        lines.append(f"  {pending.why}: {pending.direction} {_said(pending.collective, link)}")
    if not chain.moves and not chain.pending:
        lines.append("  nothing")
    if chain.sent_bytes:
        lines += ["", f"sent by a rank, forward and backward: {chain.sent_bytes / 2**20:.3g} MiB"]
    if link is not None and flops_per_s is not None:
        lines.append(str(balance_of(chain.flops, chain.collectives, link, flops_per_s)))
    return "\n".join(lines)


def _said(collective: Collective | None, link: Link | None) -> str:
    if collective is None or collective.kind in FREE or collective.degree == 1:
        return "nothing"
    if not collective.size_bytes:
        return collective.kind
    time = f", {1e3 * collective.time_s(link):.3g} ms" if link is not None else ""
    return f"{collective.kind} ({collective.sent_bytes / 2**20:.3g} MiB{time})"


def chain_dict(chain: Chain, link: Link | None, flops_per_s: float | None) -> dict[str, Any]:
    """What `chain_text` says, for JSON."""

    def of(collective: Collective | None) -> dict[str, Any] | None:
        if collective is None:
            return None
        time_s = collective.time_s(link) if link is not None else None
        return {"kind": collective.kind, "sent_bytes": collective.sent_bytes, "time_s": time_s}

    ratio = None
    if link is not None and flops_per_s is not None:
        ratio = balance_of(chain.flops, chain.collectives, link, flops_per_s).ratio
    return {
        "degrees": chain.degrees,
        "tensors": {
            node.name: {
                "labels": "".join(node.labels),
                "placements": {axis: str(placement) for axis, placement in node.placements.items()},
                "gradient": {axis: str(placement) for axis, placement in chain.gradient(node.name).items()},
            }
            for node in chain.nodes.values()
        },
        "moves": [
            {
                "tensor": move.tensor,
                "axis": move.axis,
                "before": str(move.before),
                "after": str(move.after),
                "forward": of(move.forward),
                "backward": of(move.backward),
            }
            for move in chain.moves
        ],
        "pending": [
            {"direction": pending.direction, "why": pending.why, **(of(pending.collective) or {})}
            for pending in chain.pending
        ],
        "sent_bytes": chain.sent_bytes,
        "flops": chain.flops,
        "compute_over_communication": ratio,
    }
