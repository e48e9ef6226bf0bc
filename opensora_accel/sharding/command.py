"""`opensora-accel shard`: where the result and the gradients of a sharded einsum lie, and what must be communicated."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from opensora_accel.sharding.chain_file import chain_dict, chain_text, read_chain
from opensora_accel.sharding.cost import (
    Balance,
    Collective,
    Link,
    einsum_flops,
    local_sizes,
    num_elements,
    redistribution,
)
from opensora_accel.sharding.einsum import Derivation, derive, derive_gradients
from opensora_accel.sharding.equation import Equation
from opensora_accel.sharding.placement import Partial, Placement, Replicate, parse_placement

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

a whole block (docs/sharding.md tells the steps):
  opensora-accel shard --chain block.txt --bandwidth 200e9 --flops 400e12

placements: a label (the tensor is cut along it), R (whole on every rank; what is not named), P (a sum of terms),
P(avg), P(max), P(min): forward alone, they have no rule in backward; I (whole on every rank, with a whole gradient)"""


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = _parser().parse_args(arguments)
    if parsed.chain is not None:
        return _run_chain(parsed)
    if parsed.equation is None:
        raise ValueError('give an equation, such as "sbi,io->sbo", or --chain FILE; --help has examples')
    report = make_report(parsed)
    print(json.dumps(report.to_dict(), indent=2, ensure_ascii=False) if parsed.json else report.text())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="opensora-accel shard",
        description="Derives where the result and every gradient of an einsum lie, when its operands are spread over "
        "the axes of a mesh, and which collectives that needs.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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


def _run_chain(parsed: argparse.Namespace) -> int:
    if parsed.equation is not None or parsed.axis or parsed.sizes or parsed.degrees or parsed.names:
        raise ValueError(
            "--chain FILE holds its own steps, axes and sizes: leave the equation and its options out"
        )
    chain = read_chain(parsed.chain, DTYPE_BYTES[parsed.dtype])
    link = _link(parsed, chain.has_sizes)
    shown = chain_dict(chain, link, parsed.flops) if parsed.json else chain_text(chain, link, parsed.flops)
    print(json.dumps(shown, indent=2, ensure_ascii=False) if parsed.json else shown)
    return 0


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


def make_report(parsed: argparse.Namespace) -> Report:
    equation = Equation.parse(parsed.equation)
    count = len(equation.operands)
    default = (
        ["input", "weight"] if count == 2 else ["input"] if count == 1 else [f"op{i}" for i in range(count)]
    )
    names = parsed.names.replace(" ", "").split(",") if parsed.names else default
    if len(names) != count or len(set(names)) != count:
        raise ValueError(f"{parsed.equation!r} has {count} operands; --names gives {', '.join(names)}")
    placements = _placements(parsed.axis, names, equation)
    axes = list(dict.fromkeys(axis for each in placements for axis in each))
    degrees = {axis: 2 for axis in axes} | _numbers(parsed.degrees, "--degrees", axes)
    sizes = _numbers(parsed.sizes, "--sizes", equation.labels) if parsed.sizes else None
    if sizes is not None and set(sizes) != set(equation.labels):
        missing = ", ".join(sorted(set(equation.labels) - set(sizes)))
        raise ValueError(f"--sizes must give every label of {parsed.equation!r}; {missing} is missing")
    link = _link(parsed, sizes is not None)
    return Report(equation, names, placements, degrees, sizes, DTYPE_BYTES[parsed.dtype], link, parsed.flops)


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


def _numbers(text: str | None, option: str, known: Sequence[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for item in (text or "").replace(" ", "").split(","):
        if not item:
            continue
        name, _, value = item.partition("=")
        if name not in known or not value.isdigit() or int(value) < 1:
            raise ValueError(f"{option}: {item!r} is no NAME=NUMBER; the names are {', '.join(known)}")
        if name in found:
            raise ValueError(f"{option}: {name} is given twice, {found[name]} and {value}")
        found[name] = int(value)
    return found


@dataclass(frozen=True)
class Need:
    """A collective, why it is needed, and, where sizes are known, how much it is."""

    what: str
    kind: str
    axis: str
    collective: Collective | None


@dataclass(frozen=True)
class Report:
    """What was derived."""

    equation: Equation
    names: Sequence[str]
    placements: Sequence[Mapping[str, Placement]]
    degrees: Mapping[str, int]
    sizes: Mapping[str, int] | None
    element_bytes: int
    link: Link | None
    flops_per_s: float | None

    @cached_property
    def output(self) -> dict[str, Derivation]:
        return derive(self.equation, self.placements, names=self.names)

    @cached_property
    def gradients(self) -> list[dict[str, Derivation]]:
        """But for axes that have no backward."""
        kept = [{a: p for a, p in each.items() if a not in self.forward_only} for each in self.placements]
        return derive_gradients(self.equation, kept, names=self.names)

    @property
    def forward_only(self) -> dict[str, Placement]:
        """Axes with terms that are not summed, which no rule differentiates."""
        placed = [(axis, p) for each in self.placements for axis, p in each.items()]
        return {axis: p for axis, p in placed if isinstance(p, Partial) and p.reduction != "sum"}

    def needs(self) -> list[Need]:
        """To hold the result whole, and to bring the gradient of what every rank holds to what one device has."""
        found = []
        for axis, derivation in self.output.items():
            if isinstance(derivation.placement, Partial):
                what = "forward: the result, before anything that is not linear (or a reduce-scatter along a label)"
                found.append(self._need(what, self.equation.output, derivation.placement, axis, self.output))
        for name, labels, derivations in zip(self.names, self.equation.operands, self.gradients, strict=True):
            for axis, derivation in derivations.items():
                if isinstance(derivation.placement, Partial):
                    what = f"backward: the gradient of {name}, which every rank of {axis} holds"
                    found.append(self._need(what, labels, derivation.placement, axis, derivations))
        return found

    def _need(
        self,
        what: str,
        labels: tuple[str, ...],
        placement: Placement,
        axis: str,
        all_axes: Mapping[str, Derivation],
    ) -> Need:
        collective = None
        if self.sizes is not None:
            others = {other: found.placement for other, found in all_axes.items() if other != axis}
            left = local_sizes(self.sizes, [others], {other: self.degrees[other] for other in others})
            size_bytes = num_elements(labels, left) * self.element_bytes
            collective = redistribution(placement, Replicate(), axis, self.degrees[axis], size_bytes)
        return Need(what, "all-reduce", axis, collective)

    def balance(self) -> Balance | None:
        """Forward and backward of one rank, where sizes, link and FLOP/s are known."""
        if self.sizes is None or self.link is None or self.flops_per_s is None:
            return None
        flops = 3 * einsum_flops(self.equation, local_sizes(self.sizes, self.placements, self.degrees))
        seconds = sum(need.collective.time_s(self.link) for need in self.needs() if need.collective)
        return Balance(flops / self.flops_per_s, seconds)

    def text(self) -> str:
        degrees = ", ".join(f"{axis} ({degree} ranks)" for axis, degree in self.degrees.items())
        lines = [f"{self.equation}   over {degrees}", "", "forward"]
        width = max(len(name) for name in (*self.names, "result")) + 2
        for name, labels, each in zip(self.names, self.equation.operands, self.placements, strict=True):
            lines.append(f"  {name:<{width}}[{''.join(labels)}]  {_shown(each, self.degrees)}")
        output = {axis: derivation.placement for axis, derivation in self.output.items()}
        lines.append(
            f"  {'result':<{width}}[{''.join(self.equation.output)}]  {_shown(output, self.degrees)}"
        )
        lines += [f"    {derivation.words}" for derivation in self.output.values()]
        lines += ["", "backward"]
        for name, labels, derivations in zip(self.names, self.equation.operands, self.gradients, strict=True):
            placed = {axis: derivation.placement for axis, derivation in derivations.items()}
            lines.append(f"  {name:<{width}}[{''.join(labels)}]  {_shown(placed, self.degrees)}")
            lines += [f"    {derivation.words}" for derivation in derivations.values()]
        for axis, placement in self.forward_only.items():
            lines.append(
                f"  over {axis}: no rule for {placement}, which is no sum of terms; reduce it in forward"
            )
        lines += ["", "to communicate"]
        lines += [f"  {self._said(need)}" for need in self.needs()] or ["  nothing"]
        return "\n".join([*lines, *self._balance_lines()])

    def _said(self, need: Need) -> str:
        line = f"{need.kind} over {need.axis}; {need.what}"
        if need.collective is not None:
            line += f": {_mebibytes(need.collective.sent_bytes)} sent by a rank"
            if self.link is not None:
                line += f", {1e3 * need.collective.time_s(self.link):.3g} ms"
        return line

    def _balance_lines(self) -> list[str]:
        balance = self.balance()
        if balance is None:
            return []
        return ["", str(balance)]

    def to_dict(self) -> dict[str, Any]:
        def of(derivations: Mapping[str, Derivation]) -> dict[str, Any]:
            return {
                axis: {"placement": str(d.placement), "rule": d.rule, "why": d.words}
                for axis, d in derivations.items()
            }

        balance = self.balance()
        return {
            "equation": str(self.equation),
            "degrees": dict(self.degrees),
            "operands": {
                name: {axis: str(each.get(axis, Replicate())) for axis in self.degrees}
                for name, each in zip(self.names, self.placements, strict=True)
            },
            "result": of(self.output),
            "gradients": {name: of(found) for name, found in zip(self.names, self.gradients, strict=True)},
            "forward_only": {axis: str(placement) for axis, placement in self.forward_only.items()},
            "collectives": [
                {
                    "kind": need.kind,
                    "axis": need.axis,
                    "why": need.what,
                    "sent_bytes": need.collective.sent_bytes if need.collective else None,
                    "time_s": need.collective.time_s(self.link) if need.collective and self.link else None,
                }
                for need in self.needs()
            ],
            "compute_over_communication": None if balance is None else balance.ratio,
        }


def _shown(placements: Mapping[str, Placement], degrees: Mapping[str, int]) -> str:
    return "  ".join(f"{axis}: {placements.get(axis, Replicate())}" for axis in degrees)


def _mebibytes(size_bytes: float) -> str:
    return f"{size_bytes / 2**20:.3g} MiB" if size_bytes >= 2**20 else f"{size_bytes / 2**10:.3g} KiB"
