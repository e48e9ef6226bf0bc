"""Finds out whether a module computes `norm(x) * (1 + scale) + shift`, and from which chunks of its linear layer.

The module is run with known chunks in place of the linear layer's output, so nothing depends on its weights (which
are zero at the start of a training) nor on its class.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from shardformer.modeling.norms.compare import agree
from shardformer.modeling.norms.probe import Finding, LeftAlone, NotANorm, identify


@dataclass(frozen=True)
class Modulation:
    """What a module does with its inputs and the chunks of its linear layer.

    Attributes:
        streams: for every tensor that is normalised: its argument, and the chunks that are its scale and shift.
        condition: the argument that the linear layer sees, after `activation`.
        rest: the chunks that are returned as they are, and whether with a token dimension.
        is_tuple: whether a tuple is returned.
    """

    linear: str
    activation: str
    norm: str
    finding: Finding
    num_chunks: int
    streams: tuple[tuple[str, int, int], ...]
    condition: str
    rest: tuple[tuple[int, bool], ...]
    is_tuple: bool


class KnownChunks(nn.Module):
    """Stands for the linear layer: remembers what it was given, returns known chunks."""

    def __init__(self, out: Tensor):
        super().__init__()
        self.out = out
        self.given: Tensor | None = None

    def forward(self, given: Tensor) -> Tensor:
        self.given = given
        return self.out


def find_modulation(module: nn.Module) -> Modulation | None:
    """The modulation that `module` computes; None where it is none, or one of another kind."""
    children = dict(module.named_children())
    linears = {name: child for name, child in children.items() if isinstance(child, nn.Linear)}
    if (
        len(linears) != 1
        or "forward" in vars(module)
        or any(isinstance(each, _DropoutNd) and each.p > 0 for each in module.modules())  # of another mode
        or next(module.parameters(recurse=False), None) is not None
    ):
        return None
    norms = {}
    for name, child in children.items():
        try:
            norms[name] = identify(child)
        except (NotANorm, LeftAlone):
            continue
    others = [name for name in children if name not in norms and name not in linears]
    if len(norms) != 1 or any(True for name in others for _ in children[name].parameters()):
        return None
    (norm, finding), (name, linear) = next(iter(norms.items())), next(iter(linears.items()))
    num_chunks, remainder = divmod(linear.out_features, finding.num_features)
    if finding.order.rounds != "native" or remainder or num_chunks < 2:
        return None
    return _Search(module, name, norm, finding, num_chunks, others).run()


class _Search:
    """Runs a copy of the module whose linear layer returns random chunks, and tells what became of each."""

    def __init__(
        self,
        module: nn.Module,
        linear: str,
        norm: str,
        finding: Finding,
        num_chunks: int,
        activations: list[str],
    ):
        self.linear, self.norm, self.finding, self.activations = linear, norm, finding, activations
        generator = torch.Generator().manual_seed(3)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        features = getattr(module, linear).in_features
        self.known = KnownChunks(draw(2, num_chunks * finding.num_features))
        self.chunks = self.known.out.chunk(num_chunks, dim=1)
        self.tensors = [draw(2, rows, finding.num_features) for rows in (5, 4)]
        self.condition = draw(2, features)
        self.twin = twin_of(module, {linear: self.known}, norm)

    def run(self) -> Modulation | None:
        names = list(inspect.signature(self.twin.forward).parameters)
        for count in (1, 2):
            streams = names[:count]
            for condition in names[count:]:
                found = self._try(streams, condition)
                if found is not None:
                    return found
        return None

    @torch.no_grad()
    def _try(self, streams: list[str], condition: str) -> Modulation | None:
        given = dict(zip(streams, self.tensors, strict=False))
        try:
            outs = self.twin(**given, **{condition: self.condition})
        except Exception:  # noqa: BLE001  (foreign code: these are not its arguments)
            return None
        flat = outs if isinstance(outs, tuple) else (outs,)
        found = [self._pair(x, out) for x, out in zip(given.values(), flat, strict=False)]
        rest = [self._chunk(out) for out in flat[len(streams) :]]
        activation = next((name for name in self.activations if self._leads_to_linear(name)), None)
        if None in found or None in rest or activation is None or len(flat) < len(streams):
            return None
        pairs = tuple((name, *pair) for name, pair in zip(streams, found, strict=True) if pair)
        return Modulation(
            self.linear, activation, self.norm, self.finding, len(self.chunks), pairs, condition,
            tuple(index for index in rest if index), isinstance(outs, tuple),
        )  # fmt: skip

    def _pair(self, x: Tensor, out: Any) -> tuple[int, int] | None:
        if not isinstance(out, Tensor) or out.shape != x.shape:
            return None
        normalized = getattr(self.twin, self.norm)(x)
        for scale, shift in permutations(range(len(self.chunks)), 2):
            expected = normalized * (1 + self.chunks[scale])[:, None] + self.chunks[shift][:, None]
            if agree(out, expected, "strict"):
                return scale, shift
        return None

    def _chunk(self, out: Any) -> tuple[int, bool] | None:
        for index, chunk in enumerate(self.chunks):
            for spread in (False, True):
                if isinstance(out, Tensor) and torch.equal(out, chunk[:, None] if spread else chunk):
                    return index, spread
        return None

    def _leads_to_linear(self, name: str) -> bool:
        expected, given = getattr(self.twin, name)(self.condition), self.known.given
        return given is not None and given.shape == expected.shape and torch.equal(given, expected)


def twin_of(module: nn.Module, replacements: dict[str, nn.Module], norm: str) -> nn.Module:
    """The module with other children, on the CPU in fp32; the large ones are never copied."""
    twin = copy.copy(module)
    twin.__dict__["_modules"] = {**module._modules, **replacements}
    affine = copy.deepcopy(getattr(module, norm))
    twin._modules[norm] = affine.to_empty(device="cpu").float()
    for parameter in affine.parameters():
        nn.init.normal_(parameter.data, mean=0.5, generator=torch.Generator().manual_seed(4))
    return twin
