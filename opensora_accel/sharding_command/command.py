"""`opensora-accel shard`: the placements of a sharded einsum's result and gradients, and the collectives it needs."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from opensora_accel.links import Link
from opensora_accel.sharding import (
    Derivation,
    Equation,
    Figures,
    Partial,
    Pending,
    Placement,
    Replicate,
    derive,
    derive_gradients,
    einsum_flops,
    local_sizes,
    parse_placement,
)
from opensora_accel.sharding_command.balance import Balance, balance_of
from opensora_accel.sharding_command.chain_file import chain_dict, chain_text, parse_numbers, read_chain

DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}

EXAMPLES = """\
examples:
  opensora-accel shard "sbi,io->sbo" --axis "tp: weight=o"                 column-parallel linear
  opensora-accel shard "sbi,io->sbo" --axis "tp: input=i weight=i"         row-parallel linear
  opensora-accel shard "sbc,c->sbc" --axis "sp: input=s"                   a norm's weight under sequence parallelism
  opensora-accel shard "sv,vc->sc" --axis "tp: input=v weight=v"           vocabulary-parallel embedding
  opensora-accel shard "te,tc->ec" --names dispatch,tokens --axis "ep: dispatch=e"      MoE dispatch
  opensora-accel shard "bshd,bthd->bhst" --names q,k --axis "ulysses: q=h k=h"
  opensora-accel shard "sbi,io->sbo" --axis "dp: input=b" --axis "tp: weight=o" \\
      --sizes s=4096,b=8,i=5120,o=13824 --degrees dp=4,tp=8 --dtype bf16 --bandwidth 200e9 --flops 400e12

a whole block (docs/sharding.md has the steps):
  opensora-accel shard --chain block.txt --bandwidth 200e9 --flops 400e12

placements: a label (the tensor is cut along it), R (whole on every rank; what is not named), P (a sum of terms),
P(avg), P(max), P(min): forward alone, they have no rule in backward; I (whole on every rank, with a whole gradient)"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what was derived; the exit status.

    Raises:
        ValueError, OSError: what a user can mend.
    """
    parsed = _parser().parse_args(arguments)
    shown: str | dict[str, Any]
    if parsed.chain is not None:
        if parsed.equation is not None or parsed.axis or parsed.sizes or parsed.degrees or parsed.names:
            raise ValueError(
                "--chain FILE holds its own steps, axes and sizes: leave the equation and its options out"
            )
        chain = read_chain(parsed.chain, DTYPE_BYTES[parsed.dtype])
        show = chain_dict if parsed.json else chain_text
        shown = show(chain, _link(parsed, chain.has_sizes), parsed.flops)
    elif parsed.equation is None:
        raise ValueError('give an equation, such as "sbi,io->sbo", or --chain FILE; --help has examples')
    else:
        derived = derive_equation(parsed)
        shown = derived.to_dict() if parsed.json else derived.text()
    print(json.dumps(shown, indent=2, ensure_ascii=False) if parsed.json else shown)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="opensora-accel shard",
        description="Derives where the result and every gradient of an einsum lie, when its operands are spread over "
        "the axes of a mesh, and which collectives that needs.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # A new option must not change what an abbreviation in somebody's script means.
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("equation", nargs="?", help='as torch.einsum takes it: "sbi,io->sbo"')
    add("--chain", type=Path, metavar="FILE", help="check a whole block, step by step, that a file describes")
    add(
        "--axis",
        action="append",
        default=[],
        metavar='"AXIS: OPERAND=PLACEMENT ..."',
        help="once for each axis",
    )
    add("--names", metavar="A,B", help="of the operands (default: input,weight, or op0,op1,op2)")
    add("--sizes", metavar="s=4096,...", help="of the labels, for bytes and FLOPs")
    add("--degrees", metavar="tp=8,...", help="ranks of the axes (default: 2)")
    add("--dtype", choices=tuple(DTYPE_BYTES), default="bf16", help="default: bf16")
    add("--bandwidth", type=float, metavar="BYTES/S", help="of a rank's link, for seconds")
    add("--latency", type=float, metavar="S", help="of a step of a collective (default: 5e-6)")
    add("--flops", type=float, metavar="FLOP/S", help="of a rank, for compute beside communication")
    add("--json", action="store_true", help="print JSON")
    return parser


def _link(parsed: argparse.Namespace, has_sizes: bool) -> Link | None:
    """Raises ValueError for an option that would say nothing, and for one that is no number of its kind."""
    if parsed.flops is not None and not 0 < parsed.flops < math.inf:
        raise ValueError(f"--flops is a rank's FLOP/s, a finite number above 0; got {parsed.flops:g}")
    if parsed.bandwidth is None:
        if parsed.flops is not None or parsed.latency is not None:
            raise ValueError("--flops and --latency need --bandwidth: they are set beside what a link takes")
        return None
    if not has_sizes:
        raise ValueError(
            "--bandwidth and --flops need the labels' sizes: seconds are of bytes and operations"
        )
    return Link(parsed.bandwidth) if parsed.latency is None else Link(parsed.bandwidth, parsed.latency)


def derive_equation(parsed: argparse.Namespace) -> DerivedEquation:
    """The equation that was typed, with its operands' names, placements and sizes.

    Raises:
        ValueError: an option does not fit the equation.
    """
    equation = Equation.parse(parsed.equation)
    count = len(equation.operands)
    default = (
        ["input", "weight"] if count == 2 else ["input"] if count == 1 else [f"op{i}" for i in range(count)]
    )
    names = parsed.names.replace(" ", "").split(",") if parsed.names else default
    if len(names) != count or len(set(names)) != count:
        raise ValueError(f"{parsed.equation!r} has {count} operands; --names gives {', '.join(names)}")
    placements = _placements(parsed.axis, names, equation)
    # In the order in which they were typed, which is that of the mesh.
    axes = list(dict.fromkeys(axis for each in placements for axis in each))
    degrees = {axis: 2 for axis in axes} | _numbers(parsed.degrees, "--degrees", axes)
    sizes = _numbers(parsed.sizes, "--sizes", equation.labels) if parsed.sizes else None
    if sizes is not None and set(sizes) != set(equation.labels):
        missing = ", ".join(sorted(set(equation.labels) - set(sizes)))
        raise ValueError(f"--sizes must give every label of {parsed.equation!r}; {missing} is missing")
    link = _link(parsed, sizes is not None)
    figures = Figures(degrees, sizes, DTYPE_BYTES[parsed.dtype])
    return DerivedEquation(equation, names, placements, figures, link, parsed.flops)


def _numbers(text: str | None, option: str, known: Sequence[str]) -> dict[str, int]:
    items = [item for item in (text or "").replace(" ", "").split(",") if item]
    try:
        return parse_numbers(items, known)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from error


def _placements(axes: Sequence[str], names: Sequence[str], equation: Equation) -> list[dict[str, Placement]]:
    placements: list[dict[str, Placement]] = [{} for _ in names]
    if not axes:
        raise ValueError('name an axis and what lies how: --axis "tp: weight=o"')
    seen = set()
    for text in axes:
        axis, colon, rest = (part.strip() for part in text.partition(":"))
        if not colon or not axis or not rest:
            raise ValueError(f'--axis is "AXIS: OPERAND=PLACEMENT ..."; got {text!r}')
        if axis in seen:
            raise ValueError(f"--axis {axis} is given twice; put its operands into one")
        seen.add(axis)
        for item in rest.replace(",", " ").split():
            name, equals, placement = item.partition("=")
            if name not in names or not equals:
                raise ValueError(
                    f"--axis {axis}: {item!r} is no OPERAND=PLACEMENT; operands: {', '.join(names)}"
                )
            of_operand = placements[names.index(name)]
            if axis in of_operand:
                raise ValueError(f"--axis {axis}: {name} is given twice, {of_operand[axis]} and {placement}")
            of_operand[axis] = parse_placement(placement, equation.operands[names.index(name)])
    return placements


@dataclass(frozen=True)
class DerivedEquation:
    """One einsum: what was given, what the rules derive from it, and both as text and as JSON."""

    equation: Equation
    names: Sequence[str]
    placements: Sequence[Mapping[str, Placement]]
    figures: Figures
    link: Link | None
    flops_per_s: float | None

    @cached_property
    def output(self) -> dict[str, Derivation]:
        """The placement of the result on each axis."""
        return derive(self.equation, self.placements, names=self.names)

    @cached_property
    def gradients(self) -> list[dict[str, Derivation]]:
        """For each operand, the placement of its gradient on each axis that has a backward."""
        # A largest term has no gradient rule: its axes are left out here, and `forward_only` lists them.
        kept = [{a: p for a, p in each.items() if a not in self.forward_only} for each in self.placements]
        return derive_gradients(self.equation, kept, names=self.names)

    @property
    def forward_only(self) -> dict[str, Placement]:
        """Axes with terms that are not summed, which no rule differentiates."""
        placed = [(axis, p) for each in self.placements for axis, p in each.items()]
        return {axis: p for axis, p in placed if isinstance(p, Partial) and p.reduction != "sum"}

    @cached_property
    def pending(self) -> list[Pending]:
        """The reductions after which result and gradients are those of one device."""
        why = "the result, before anything that is not linear (or a reduce-scatter along a label)"
        tensors = [("forward", why, self.equation.output, self.output)]
        for name, labels, derived in zip(self.names, self.equation.operands, self.gradients, strict=True):
            tensors.append(
                ("backward", f"the gradient of {name}, which every rank of {{axis}} holds", labels, derived)
            )
        collectives = []
        for direction, why, labels, derivations in tensors:
            for axis, derivation in derivations.items():
                if not isinstance(derivation.placement, Partial):
                    continue
                others = {other: each.placement for other, each in derivations.items() if other != axis}
                reduced = self.figures.redistribution(derivation.placement, Replicate(), axis, labels, others)
                assert reduced is not None
                collectives.append(Pending(direction, why.format(axis=axis), reduced))
        return collectives

    def balance(self) -> Balance | None:
        """Compute beside communication of one rank, forward and backward, where sizes, link and FLOP/s are known."""
        if self.figures.sizes is None or self.link is None or self.flops_per_s is None:
            return None
        local = local_sizes(self.figures.sizes, self.placements, self.figures.degrees)
        # Forward, and two einsums of the same size in backward.
        flops = 3 * einsum_flops(self.equation, local)
        collectives = [pending.collective for pending in self.pending]
        return balance_of(flops, collectives, self.link, self.flops_per_s)

    def text(self) -> str:
        """The report that a person reads."""
        degrees = self.figures.degrees
        width = max(len(name) for name in (*self.names, "result")) + 2

        def line(name: str, labels: Sequence[str], placements: Mapping[str, Placement]) -> str:
            placed = "  ".join(f"{axis}: {placements.get(axis, Replicate())}" for axis in degrees)
            return f"  {name:<{width}}[{''.join(labels)}]  {placed}"

        def lines_of(name: str, labels: Sequence[str], derived: Mapping[str, Derivation]) -> list[str]:
            placements = {axis: derivation.placement for axis, derivation in derived.items()}
            words = [f"    {derivation.words}" for derivation in derived.values()]
            return [line(name, labels, placements), *words]

        over = ", ".join(f"{axis} ({degree} ranks)" for axis, degree in degrees.items())
        lines = [f"{self.equation}   over {over}", "", "forward"]
        operands = list(zip(self.names, self.equation.operands, strict=True))
        for (name, labels), placements in zip(operands, self.placements, strict=True):
            lines.append(line(name, labels, placements))
        lines += lines_of("result", self.equation.output, self.output)
        lines += ["", "backward"]
        for (name, labels), derived in zip(operands, self.gradients, strict=True):
            lines += lines_of(name, labels, derived)
        for axis, placement in self.forward_only.items():
            lines.append(
                f"  over {axis}: no rule for {placement}, which is no sum of terms; reduce it in forward"
            )
        lines += ["", "to communicate"]
        for pending in self.pending:
            collective = pending.collective
            text = f"  {collective.kind} over {collective.axis}; {pending.direction}: {pending.why}"
            if self.figures.sizes is not None:
                size = collective.sent_bytes
                shown = f"{size / 2**20:.3g} MiB" if size >= 2**20 else f"{size / 2**10:.3g} KiB"
                text += f": {shown} sent by a rank"
                if self.link is not None:
                    text += f", {1e3 * collective.time_s(self.link):.3g} ms"
            lines.append(text)
        if not self.pending:
            lines.append("  nothing")
        balance = self.balance()
        return "\n".join(lines if balance is None else [*lines, "", str(balance)])

    def to_dict(self) -> dict[str, Any]:
        """The same for a program."""

        def of(derivations: Mapping[str, Derivation]) -> dict[str, Any]:
            return {
                axis: {"placement": str(d.placement), "rule": d.rule, "why": d.words}
                for axis, d in derivations.items()
            }

        balance = self.balance()
        return {
            "equation": str(self.equation),
            "degrees": dict(self.figures.degrees),
            "operands": {
                name: {axis: str(each.get(axis, Replicate())) for axis in self.figures.degrees}
                for name, each in zip(self.names, self.placements, strict=True)
            },
            "result": of(self.output),
            "gradients": {
                name: of(placements) for name, placements in zip(self.names, self.gradients, strict=True)
            },
            "forward_only": {axis: str(placement) for axis, placement in self.forward_only.items()},
            "collectives": [
                {
                    "kind": pending.collective.kind,
                    "axis": pending.collective.axis,
                    "why": f"{pending.direction}: {pending.why}",
                    "sent_bytes": None if self.figures.sizes is None else pending.collective.sent_bytes,
                    "time_s": pending.collective.time_s(self.link) if self.link else None,
                }
                for pending in self.pending
            ],
            "compute_over_communication": None if balance is None else balance.ratio,
        }
