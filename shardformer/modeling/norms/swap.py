"""Swaps the norms of a model for kernels that compute the same, and back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import get_args

import torch
from torch import Tensor, nn

from shardformer.modeling.norms.adaptive import swap_adaptive
from shardformer.modeling.norms.choose import Choice
from shardformer.modeling.norms.compare import Mode, agree, largest_difference
from shardformer.modeling.norms.module import SwappedNorm, swapped
from shardformer.modeling.norms.probe import Finding, LeftAlone, NotANorm, identify, refuse_unseen
from shardformer.modeling.norms.report import Row, SwapReport


def swap_norms(model: nn.Module, mode: Mode = "strict", *, within: Sequence[str] = ("",)) -> SwapReport:
    """Replaces every norm whose meaning is known by a kernel that computes the same; the report tells each, and undoes.

    Names, parameter objects and state_dict keys stay. Swap on the device and in the dtype that the model will run
    in, before it is sharded, wrapped or compiled.

    Args:
        mode: `strict` changes no value beyond the last bit of an fp32 sum, and no gradient beyond the original's
            error. `fast` may round a half elsewhere, and takes kernels of quack, Liger or apex, if they agree.
        within: paths below which norms may be swapped, `*` for any one name: `("blocks.*.attn1",)`.

    Raises:
        ValueError: an unknown mode, or a path that no module has.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"mode={mode!r} is unknown; use one of {', '.join(get_args(Mode))}")
    chosen = _Within(model, within)
    like = next((p for p in model.parameters() if p.is_floating_point()), None)
    swaps = _Swaps(mode, like)
    rows: list[Row] = []
    with ExitStack() as undo:
        for parent_name, parent in list(model.named_modules(remove_duplicate=False)):
            if chosen.has(parent_name) and (adaptive := swap_adaptive(parent, parent_name)):
                row, restore = adaptive
                rows.append(row)
                undo.callback(restore)
            for name, child in list(parent.named_children()):
                path = f"{parent_name}.{name}" if parent_name else name
                if chosen.has(path) and (done := swaps.of(child, path)):
                    row, replacement = done
                    rows.append(row)
                    if replacement is not None:
                        setattr(parent, name, replacement)
                        undo.callback(setattr, parent, name, child)
        position = {
            name: index for index, (name, _) in enumerate(model.named_modules(remove_duplicate=False))
        }
        rows.sort(key=lambda row: position[row.name])
        return SwapReport(mode, rows, undo.pop_all().close)


class _Within:
    """Which paths were asked for."""

    def __init__(self, model: nn.Module, patterns: Sequence[str]):
        self._expressions = [
            re.compile(r"(.+\.)?[^.]*" if not p else re.escape(p).replace(r"\*", r"[^.]+") + r"(\..+)?")
            for p in patterns
        ]
        names = [name for name, _ in model.named_modules(remove_duplicate=False)]
        for pattern, expression in zip(patterns, self._expressions, strict=True):
            if not any(expression.fullmatch(name) for name in names):
                raise ValueError(f"within={pattern!r} fits no module of {type(model).__name__}")

    def has(self, path: str) -> bool:
        return any(expression.fullmatch(path) for expression in self._expressions)


class _Swaps:
    """Replacements, one for each norm object, however many places it has in the model."""

    def __init__(self, mode: Mode, like: Tensor | None):
        self.mode = mode
        self.like = like
        self._choices: dict[object, Choice] = {}
        self._findings: dict[object, Finding] = {}
        self._done: dict[int, tuple[nn.Module, Row, SwappedNorm | None]] = {}

    def of(self, module: nn.Module, path: str) -> tuple[Row, SwappedNorm | None] | None:
        """The report's row and the replacement, if there is one; None for what is no norm."""
        if isinstance(module, SwappedNorm):
            return None
        try:
            if id(module) not in self._done:  # it is kept there, so that its id stays its own
                self._done[id(module)] = (module, *self._swap(module))
        except NotANorm:
            return None
        except LeftAlone as error:
            self._done[id(module)] = (module, Row("", type(module).__name__, reason=str(error)), None)
        _, row, replacement = self._done[id(module)]
        return replace(row, name=path), replacement

    def _swap(self, module: nn.Module) -> tuple[Row, SwappedNorm | None]:
        finding = self._identify(module)
        order = finding.order.name if finding.weight or finding.order.centres else "rms"
        row = Row("", type(module).__name__, order, finding.eps)
        made = swapped(module, finding, self.mode, self._choices, self.like)
        if isinstance(made, str):
            return replace(row, reason=made), None
        replacement, choice = made
        difference = self._difference(module, replacement, finding)
        if difference is None:
            return replace(row, reason="with its own parameters its values are others"), None
        row = replace(row, to=choice.kernel, difference=max(difference, choice.difference))
        return replace(row, saved_before=choice.saved_before, saved_after=choice.saved_after), replacement

    def _identify(self, module: nn.Module) -> Finding:
        """Norms of one class with the same attributes are probed once; `_difference` then checks each of them."""
        refuse_unseen(module)
        attributes = tuple((name, repr(v)) for name, v in vars(module).items() if not name.startswith("_"))
        parameters = tuple((name, p.shape, p.device) for name, p in module.named_parameters())
        kind = (type(module), attributes, parameters)
        if kind not in self._findings:
            self._findings[kind] = identify(module)
        return self._findings[kind]

    def _difference(self, module: nn.Module, replacement: SwappedNorm, finding: Finding) -> float | None:
        """With the module's own parameters; None where the two do not agree."""
        own = next(module.parameters(), self.like)
        device = torch.device("cpu") if own is None else own.device
        if device.type == "meta":
            return 0.0
        dtype = torch.float32 if own is None else own.dtype
        x = torch.randn(2, 5, finding.num_features, generator=torch.Generator().manual_seed(2))
        x = x.to(device, dtype)
        with torch.no_grad():
            expected = module(x)
            out = replacement.on_kernel(x, always=True)
        if out is None or not agree(out, expected, self.mode):
            return None
        return largest_difference(out, expected)
