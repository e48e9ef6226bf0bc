"""The class of a model: one of diffusers by its name, or its author's by where Python imports it.

    "WanTransformer3DModel"                          of diffusers
    "opensora.models.mmdit.model:MMDiTModel"         of Open-Sora, whose folder is on PYTHONPATH

A class of diffusers takes its arguments one by one, and has them as `model.config`, a mapping. An author's class takes
one object of its `config_class`, a dataclass as MMDiTConfig or a configuration of transformers as STDiT3Config, and has
that as `model.config`. Whoever asks `make` and `arguments_of` need not know which.

A recipe knows a class by its name alone, as a policy does. What is imported is code, so a configuration that names a
path is to be trusted as its author's repository is.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from opensora_accel.training.pretrained import in_one_line


def is_path(name: str) -> bool:
    """Whether a class is named by where it is imported, "module:Class"."""
    return ":" in name


def name_in(path: str) -> str:
    """The name of a class by its path."""
    return path.rpartition(":")[2]


def import_class(path: str) -> Any:
    """The class at "module:Class".

    Raises:
        ValueError: it cannot be imported, or it is no class that takes one configuration.
    """
    module, _, name = path.rpartition(":")
    try:
        cls = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the author's code raises, which nobody here has seen
        raise ValueError(
            f"model.class_name {path!r} cannot be imported ({in_one_line(error)}); put the folder of its repository "
            "on PYTHONPATH, with what that needs installed, or correct the path"
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, nn.Module) and hasattr(cls, "config_class")):
        raise ValueError(
            f"model.class_name {path!r} is no class of a model that takes a configuration (config_class), as "
            "Open-Sora's are; name the class itself"
        )
    return cls


def taker_of(cls: Any) -> Any:
    """What takes the arguments of a model's class: the class of its configuration, or the class itself."""
    return getattr(cls, "config_class", None) or cls


def parameters_of(cls: Any) -> dict[str, inspect.Parameter]:
    """The arguments of a model's class, by name, without those that take any name."""
    parameters = inspect.signature(taker_of(cls)).parameters
    return {name: each for name, each in parameters.items() if each.kind is not each.VAR_KEYWORD}


def make(cls: Any, arguments: Mapping[str, Any]) -> Any:
    """A model of these arguments."""
    taker = taker_of(cls)
    return cls.from_config(arguments) if taker is cls else cls(taker(**arguments))


def arguments_of(model: Any) -> Mapping[str, Any]:
    """What a model was made with."""
    config = model.config
    if isinstance(config, Mapping):
        return config
    return {name: getattr(config, name) for name in parameters_of(type(model))}
