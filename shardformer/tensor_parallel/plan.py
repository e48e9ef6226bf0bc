"""What a table means for one model: every layer with the cut of its parameters, checked before anything is changed.

A feed-forward layer of 12 channels on P = 3 ranks: the table says ColumnParallel("up"), RowParallel("down").

    up.weight     [12, C]  →  [4, C]   each rank makes 4 of the 12 channels; its bias is cut alike
    down.weight   [C, 12]  →  [C, 4]   and needs just those 4: its product is a term, which is summed over ranks

In attention the unit is a head: 40 channels in 10 heads on 3 ranks are 4, 3 and 3 heads, 16, 12 and 12 channels.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from torch import nn

from shardformer.policy import ColumnParallel, TensorLayer, TensorRegion
from shardformer.tensor_parallel.cut import Cut, share
from shardformer.tensor_parallel.derive import Flow, derive_path


@dataclass(frozen=True)
class PlannedLayer:
    """One layer: what it communicates, how its parameters are cut, and the width that it then states."""

    name: str
    module: nn.Linear | nn.Embedding
    flow: Flow
    # By the parameter's name in the module.
    cuts: dict[str, Cut]
    # The module's own attribute that states its width, and this rank's value.
    width: tuple[str, int]


@dataclass(frozen=True)
class PlannedRegion:
    """One module that a region's pattern fits, with its layers in the order in which they run."""

    name: str
    module: nn.Module
    layers: list[PlannedLayer]
    # This rank's value, by path below the module.
    attributes: dict[str, int]
    shared: list[nn.Module]


def plan_region(model: nn.Module, region: TensorRegion, num_ranks: int, rank: int) -> Iterator[PlannedRegion]:
    """One plan for each module that the region's pattern fits.

    Raises:
        ValueError: the table does not fit the model.
    """
    # In a policy `*` stands for any one name between dots.
    expression = re.compile(re.escape(region.module).replace(r"\*", r"[^.]+"))
    modules = [(name, module) for name, module in model.named_modules() if expression.fullmatch(name)]
    if not modules:
        raise ValueError(
            f"the policy's tensor region {region.module!r} fits no module of {type(model).__name__}"
        )
    for name, module in modules:
        try:
            yield _plan(name, module, region, num_ranks, rank)
        except (ValueError, AttributeError) as error:  # an attribute or a shared module that is not there
            where = name or type(model).__name__
            raise ValueError(f"tensor parallelism of {where}: {error}") from error


def _plan(name: str, module: nn.Module, region: TensorRegion, num_ranks: int, rank: int) -> PlannedRegion:
    shares = _Shares(module, region, num_ranks)
    steps = [_present(module, step) for step in region.steps]
    labels = {
        True: "o",
        False: "i",
    }  # what the weight is cut along: a column-parallel layer's outputs, or its inputs
    flows = derive_path(
        [[(entry.module, labels[isinstance(entry, ColumnParallel)]) for entry in step] for step in steps]
    )
    layers = []
    # What the step before leaves: the channels that every rank has of each of its segments.
    given: set[tuple[int, ...]] = set()
    for step, of_step in zip(steps, flows, strict=True):
        leaving: set[tuple[int, ...]] = set()
        for entry, flow in zip(step, of_step, strict=True):
            layer = module.get_submodule(entry.module)
            cut = shares.cut(entry, layer)
            _check_taken(entry, cut, given)
            leaving.update(cut.shares)
            assert isinstance(layer, (nn.Linear, nn.Embedding))
            cuts, attribute = {"weight": cut}, "in_features"
            if isinstance(entry, ColumnParallel):
                attribute = "embedding_dim" if isinstance(layer, nn.Embedding) else "out_features"
                if getattr(layer, "bias", None) is not None:
                    # A row-parallel layer's bias stays whole, and is added once, after the sum.
                    cuts["bias"] = Cut(0, cut.shares)
            # The module states its own width, which code of the model may read.
            width = attribute, sum(of_ranks[rank] for of_ranks in cut.shares)
            layers.append(PlannedLayer(f"{name}.{entry.module}".lstrip("."), layer, flow, cuts, width))
        given = leaving
    shared = [child for path in region.shared for child in module.get_submodule(path).modules()]
    attributes = {path: of_ranks[rank] for path, of_ranks in shares.of_attribute.items()}
    return PlannedRegion(name, module, layers, attributes, shared)


def _present(module: nn.Module, step: Sequence[TensorLayer]) -> list[TensorLayer]:
    """The layers of a step, without the optional ones that this module does without."""
    names = {name for name, _layer in module.named_modules()}
    present = [entry for entry in step if entry.module in names or not entry.optional]
    for entry in present:
        if entry.module not in names:
            raise ValueError(
                f"it has no layer {entry.module!r}; its modules are {', '.join(sorted(names - {''}))}"
            )
    if not present:
        raise ValueError(f"it has none of the layers {', '.join(entry.module for entry in step)}")
    return present


def _check_taken(entry: TensorLayer, cut: Cut, given: set[tuple[int, ...]]) -> None:
    """What a row-parallel layer takes must be what the layers before it give, or it would take other channels."""
    if isinstance(entry, ColumnParallel):
        return
    for shares in cut.shares:
        if shares not in given:
            listed = ", ".join(str(sum(each)) for each in sorted(given))
            raise ValueError(
                f"{entry.module} takes a segment of {sum(shares)} channels, of which the ranks hold {shares}, but "
                f"the layers before it give segments of {listed}; name the segments of {entry.module} in its entry"
            )


class _Shares:
    """Every rank's part of the heads, and of what is counted in heads or in single channels."""

    def __init__(self, module: nn.Module, region: TensorRegion, num_ranks: int):
        self._module, self._num_ranks = module, num_ranks
        counts = {path: self._value(path) for path in region.heads}
        if len(set(counts.values())) > 1:
            raise ValueError(f"the heads are counted differently: {counts}; make a region of each")
        self._num_heads = next(iter(counts.values()), None)
        # By path below the module.
        self.of_attribute: dict[str, tuple[int, ...]] = {}
        for path in (*region.heads, *region.head_widths):
            self.of_attribute[path] = self._share(path, self._value(path), self._num_heads)
        for path in region.widths:
            self.of_attribute[path] = self._share(path, self._value(path), None)

    def cut(self, entry: TensorLayer, layer: nn.Module) -> Cut:
        """The cut of a layer's weight, [out, in] of a Linear.

        Raises:
            ValueError: the layer cannot be cut as its entry says.
        """
        is_column = isinstance(entry, ColumnParallel)
        if not isinstance(layer, nn.Linear) and not (is_column and isinstance(layer, nn.Embedding)):
            raise ValueError(
                f"{entry.module} is a {type(layer).__name__}; tensor parallelism cuts nn.Linear, and nn.Embedding by "
                "columns"
            )
        # Columns of the product: rows of a Linear's weight, but columns of an Embedding's.
        dim = 1 if isinstance(layer, nn.Embedding) or not is_column else 0
        size = layer.weight.size(dim)
        if not entry.segments:
            return Cut(dim, (self._share(entry.module, size, self._num_heads),))
        for path in entry.segments:
            if path not in self.of_attribute:
                raise ValueError(
                    f"{entry.module} has a segment {path!r}, which is none of the region's head_widths and widths: "
                    f"{', '.join(self.of_attribute) or 'none'}"
                )
        shares = tuple(self.of_attribute[path] for path in entry.segments)
        sizes = [sum(each) for each in shares]
        if sum(sizes) != size:
            raise ValueError(
                f"the segments of {entry.module} are {' + '.join(map(str, sizes))} = {sum(sizes)} channels, but it has "
                f"{size}; name them all, in order"
            )
        return Cut(dim, shares)

    def _value(self, path: str) -> int:
        value = attrgetter(path)(self._module)
        if not isinstance(value, int):
            raise ValueError(f"its attribute {path} should count channels or heads; it is {value!r}")
        return value

    def _share(self, what: str, size: int, num_heads: int | None) -> tuple[int, ...]:
        # Without heads each channel is a unit, and may go to any rank.
        units = size if num_heads is None else num_heads
        if units < self._num_ranks:
            kind = "channels" if num_heads is None else "heads"
            raise ValueError(
                f"{what} has {units} {kind}, so some of the tp={self._num_ranks} ranks would have none; "
                f"use tp={units} or less, and put the other ranks on ulysses, ring or dp_shard"
            )
        if size % units:
            raise ValueError(
                f"{what} counts {size} channels, which is no multiple of the {units} heads; name the segments of fused "
                "layers, or list it in widths where its channels belong to no heads"
            )
        return share(size, units, self._num_ranks)
