"""The page of public names and the code: what is promised is there, and guides use nothing else of the library."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

import opensora_accel
import shardformer
from tests.test_layers import LIBRARY

ROOT = Path(__file__).parent.parent
NAMES = re.findall(r"^\| `([\w.]+)`", (ROOT / "docs" / "names.md").read_text(encoding="utf-8"), re.M)
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Families' tables, which `tables_named` gives; what goes with an experiment; and how one looks into a norm.
NOT_PROMISED = re.compile(
    r"shardformer\.policy\.wan\.|opensora_accel\.fsdp\.forget_rounding"
    r"|shardformer\.modeling\.(kernels\.explain_kernel|norm_orders\.find_meaning)"
)


def test_there_are_at_most_sixty_and_each_stands_once():
    assert 40 < len(NAMES) == len(set(NAMES)) <= 60


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("shardformer.colossalai.")])
def test_a_public_name_is_there_and_says_what_it_is(name):
    module, _, attribute = name.rpartition(".")
    assert inspect.getdoc(value_of(name))
    assert attribute in getattr(importlib.import_module(module), "__all__", [attribute])


def test_both_packages_hand_out_public_names_alone():
    handed_out = {f"opensora_accel.{name}" for name in opensora_accel.__all__ if name != "__version__"}
    handed_out |= {f"shardformer.{name}" for name in shardformer.__all__}
    assert handed_out - set(NAMES) == set()


def library_names(text: str) -> set[str]:
    """What a text imports from the library or names with its whole path."""
    rooms = sorted(set().union(*LIBRARY, {"opensora_accel", "shardformer"}))
    found = set()
    for module, names in re.findall(r"from ([\w.]+) import ([\w, ]+)", text):
        found |= {f"{module}.{name.split(' as ')[0].strip()}" for name in names.split(",")}
    found |= set(re.findall(r"\b((?:opensora_accel|shardformer)(?:\.\w+)+)\(", text))
    return {name for name in found if name.rpartition(".")[0] in rooms and name not in rooms}


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.name)
def test_guides_build_on_public_names(guide):
    used = {name for name in library_names(guide.read_text(encoding="utf-8")) if not NOT_PROMISED.match(name)}
    # `shardformer.policy.Policy` is `shardformer.Policy`.
    promised = {id(value_of(name)) for name in NAMES if not name.startswith("shardformer.colossalai.")}
    assert {name for name in used - set(NAMES) if id(value_of(name)) not in promised} == set()


def value_of(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def test_a_guide_with_another_name_would_be_found():
    text = "```python\nfrom opensora_accel.communications import Cut, all_to_all\nshardformer.lora.rank_of(model)\n```"
    assert library_names(text) - set(NAMES) == {
        "opensora_accel.communications.Cut",
        "shardformer.lora.rank_of",
    }
