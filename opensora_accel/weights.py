"""Weights of a folder in diffusers' layout, or of one file, read into a model part by part.

A folder holds one safetensors file, or several with an index that names the file of each tensor. A rank of P = 3 that
holds rows 2 and 3 of a weight [6, 4] reads those two rows. So each byte is read once for all ranks of a machine that
share a copy, and no rank ever holds a whole tensor of which it keeps a part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from opensora_accel.deferred import deferred_shapes, region_of, replace_later
from opensora_accel.documents import read_text
from opensora_accel.dtensors import is_dtensor
from opensora_accel.files import retried


@dataclass(frozen=True)
class Stored:
    """One tensor of a safetensors file."""

    path: Path
    name: str

    def read(self, dtype: torch.dtype, region: tuple[slice, ...] = ()) -> Tensor:
        """The tensor, or a region of it, as `dtype`."""
        from safetensors import safe_open

        def read() -> Tensor:
            with safe_open(self.path, framework="pt") as file:
                tensor: Tensor = file.get_slice(self.name)[region] if region else file.get_tensor(self.name)
                return tensor.to(dtype)

        return retried(read, f"reading {self.path}")

    @property
    def shape(self) -> tuple[int, ...]:
        from safetensors import safe_open

        with safe_open(self.path, framework="pt") as file:
            return tuple(file.get_slice(self.name).get_shape())


def load_weights(model: nn.Module, folder: str | Path) -> None:
    """Fills a model from the safetensors of a folder in diffusers' layout, one file or several with an index, or of the
    one file that is named.

    A deferred model (`deferred_init`) only notes where its values lie, and each rank reads what it holds when
    `shardformer.shard` or `materialize` makes them. Any other model is filled at once. The files may have another dtype
    than the model.

    Communication: none; every rank reads what it holds.

    Raises:
        FileNotFoundError: there are no safetensors in the folder.
        ValueError: names or shapes do not fit; nothing was changed.
    """
    stored = find_stored(Path(folder))
    names = model.state_dict().keys()
    missing, unknown = sorted(missing_in(stored, model)), sorted(stored.keys() - names)
    if missing or unknown:
        raise ValueError(
            f"the weights in {folder} are not those of this {type(model).__name__}: missing {missing[:5]}, unknown "
            f"{unknown[:5]}; copy it again, whole, or name its file where others lie beside it, build the model with "
            "the arguments that it was made with (its config.json), and add adapters afterwards"
        )
    fill(model, stored)


def missing_in(stored: Mapping[str, Stored], model: nn.Module) -> list[str]:
    """Names of the model that files lack. Of tied parameters one name is enough, and files often have only one."""
    targets = model.state_dict(keep_vars=True)
    there = {id(tensor) for name, tensor in targets.items() if name in stored}
    return [name for name, tensor in targets.items() if id(tensor) not in there]


@torch.no_grad()
def fill(model: nn.Module, stored: Mapping[str, Stored]) -> None:
    """Gives each tensor of the model what is stored under its name: at once, or where it is deferred when it is made.

    Raises:
        ValueError: shapes do not fit; nothing was changed.
    """
    waiting, targets = deferred_shapes(model), model.state_dict(keep_vars=True)
    # By the tensor: a tied one may lie under any of its names.
    by_tensor = {id(tensor): stored[name] for name, tensor in targets.items() if name in stored}
    sources = {name: by_tensor[id(tensor)] for name, tensor in targets.items() if id(tensor) in by_tensor}
    for name, source in sources.items():
        expected = waiting.get(name, tuple(targets[name].shape))
        if source.shape != expected:
            raise ValueError(
                f"{name} is {list(source.shape)} in {source.path} and {list(expected)} in this "
                f"{type(model).__name__}; build the model with the arguments that it was made with (its config.json)"
            )
    replace_later(model, {name: source.read for name, source in sources.items() if name in waiting})
    for name in sources.keys() - waiting.keys():
        tensor, read = targets[name], partial(sources[name].read, targets[name].dtype)
        if is_dtensor(tensor):
            tensor.to_local().copy_(read(region_of(tensor.shape, tensor.device_mesh, tensor.placements)))
        else:
            tensor.copy_(read())


def _index(path: Path) -> dict[str, str]:
    """Which file holds each tensor, by its name."""
    try:
        index = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}); copy the folder again, whole") from error
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not all(isinstance(file, str) and file for file in names.values()):
        raise ValueError(f"{path} is no index of weights (a table weight_map); copy the folder again, whole")
    return names


def find_stored(folder: Path, stem: str = "*") -> dict[str, Stored]:
    """The tensors of a folder by name, in one file `STEM.safetensors` or several; or those of the one file `folder`.

    Raises:
        FileNotFoundError: there are none.
        ValueError: files of a set are missing, two files hold one name, or there are two sets.
    """
    from safetensors import safe_open

    indices = sorted(folder.glob(f"{stem}.safetensors.index.json"))
    if len(indices) > 1:
        raise ValueError(
            f"{folder} has {len(indices)} sets of weights: {', '.join(path.name for path in indices)}; "
            "copy the files of one of them into a folder of their own"
        )
    if indices:
        names = _index(indices[0])
        # The name alone: an index leads nowhere else.
        return {name: Stored(folder / Path(file).name, name) for name, file in names.items()}
    if not folder.exists():
        raise FileNotFoundError(
            f"there is no {folder}; give the folder of the transformer itself, or a .safetensors file"
        )
    if folder.is_file():
        with safe_open(folder, framework="pt") as file:
            return {name: Stored(folder, name) for name in file.keys()}  # noqa: SIM118 (no dict)
    paths = sorted({*folder.glob(f"{stem}.safetensors"), *folder.glob(f"{stem}-*-of-*.safetensors")})
    stored = dict[str, Stored]()
    for path in paths:
        base, _, count = path.stem.rpartition("-of-")
        prefix = base.rpartition("-")[0]
        if count.isdecimal() and len(list(folder.glob(f"{prefix}-*-of-{count}.safetensors"))) != int(count):
            raise ValueError(
                f"files {prefix}-…-of-{count} are missing in {folder}; copy the folder again, whole"
            )
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (no dict)
                if name in stored:
                    raise ValueError(
                        f"{name} lies in {stored[name].path.name} and in {path.name} of {folder}; leave one of them"
                    )
                stored[name] = Stored(path, name)
    if not stored:
        raise FileNotFoundError(
            f"{folder} has no .safetensors; give the folder of the transformer itself, as model/transformer"
        )
    return stored
