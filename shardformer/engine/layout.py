"""Layouts of a grid of tokens, as einops writes them: `B (T S) C`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Which dimensions of a grid each dim of a tensor holds, outer first."""

    pattern: str
    groups: tuple[tuple[str, ...], ...]

    @classmethod
    def parse(cls, pattern: str) -> Layout:
        found = re.findall(r"\(([^()]*)\)|(\w+)", pattern)
        groups = tuple(tuple(inner.split()) if inner else (single,) for inner, single in found)
        names = [name for group in groups for name in group]
        if not names or len(set(names)) != len(names) or re.sub(r"\([^()]*\)|\w+|\s", "", pattern):
            raise ValueError(f'{pattern!r} is no layout; write one like "B (T S) C", every name once')
        return cls(pattern, groups)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for group in self.groups for name in group)

    def sizes(self, tensor: Tensor, known: dict[str, int], what: str) -> dict[str, int]:
        """The size of every dimension, one unknown a group at most; ValueError where the tensor does not fit."""
        if tensor.dim() != len(self.groups):
            raise ValueError(f'{what} is {tuple(tensor.shape)}, which is not "{self.pattern}"')
        sizes: dict[str, int] = {}
        for size, group in zip(tensor.shape, self.groups, strict=True):
            unknown = [name for name in group if name not in known]
            rest = math.prod(known[name] for name in group if name in known)
            if len(unknown) > 1 or (size != rest if not unknown else rest == 0 or size % rest):
                raise ValueError(
                    f'{what} is {tuple(tensor.shape)}, which is not "{self.pattern}" with '
                    + ", ".join(f"{name} = {known[name]}" for name in self.names if name in known)
                )
            sizes |= {name: known.get(name, size // rest if unknown else size) for name in group}
        return sizes

    def unfold(self, tensor: Tensor, sizes: dict[str, int]) -> Tensor:
        """A dim for every name."""
        return tensor.reshape([sizes[name] for name in self.names])

    def fold(self, tensor: Tensor) -> Tensor:
        """The inverse of `unfold`."""
        sizes = dict(zip(self.names, tensor.shape, strict=True))
        return tensor.reshape([math.prod(sizes[name] for name in group) for group in self.groups])
