"""Imports run downward between the layers of the house, and importing it starts nothing."""

import ast
import importlib
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import house
import pytest

ROOT = Path(__file__).parent.parent

# They may import everything, and nothing imports them.
EXPERIMENTS = [{"opensora_accel.experiments"}]
USE = [
    {"opensora_accel.cli"},
    {
        "opensora_accel.training",
        "opensora_accel.integrations",
        "opensora_accel.doctor",
        "opensora_accel.proposal",
    },
]
TOOLS = [
    {
        "opensora_accel.planner",
        "opensora_accel.profiler",
        "opensora_accel.verify",
        "opensora_accel.watching",
        "opensora_accel.sharding_command",
    },
    {"opensora_accel.observe", "opensora_accel.pages"},
]
LIBRARY = [
    {"shardformer.policy.t5_encoder"},
    {"shardformer.colossalai", "shardformer.packing"},
    {"shardformer.engine"},
    {"shardformer.clipping", "shardformer.lora", "shardformer.comfyui"},
    {"shardformer.tensor_parallel"},
    {"shardformer.policy"},
    {"shardformer.modeling"},
    {"shardformer.spread"},
    {"shardformer.paths", "shardformer.functions"},
    {
        "opensora_accel.checkpoint",
        "opensora_accel.attention",
        "opensora_accel.fsdp",
        "opensora_accel.sharding",
    },
    {"opensora_accel.offload"},
    {"opensora_accel.communications"},
    {"opensora_accel.parallel_states"},
    {"opensora_accel.weights", "opensora_accel.experimental"},
    {
        "opensora_accel.plan",
        "opensora_accel.precision",
        "opensora_accel.arguments",
        "opensora_accel.deferred",
        "opensora_accel.flash_attn",
        "opensora_accel.watchdog",
        "opensora_accel.regions",
        "opensora_accel.interception",
        "opensora_accel.links",
    },
    {
        "opensora_accel.documents",
        "opensora_accel.files",
        "opensora_accel.wrapping",
        "opensora_accel.dtensors",
        "opensora_accel.aliases",
        "opensora_accel.lazy",
    },
]
LAYERS = [*EXPERIMENTS, *USE, *TOOLS, *LIBRARY]
"""From the top. A room imports from the rows below its own; within a row nothing but a package and its front.

So the library knows no tool, no tool another one or what users start.
"""


def level(name: str) -> int:
    for number, row in enumerate(LAYERS):
        if name in row:
            return number
    raise AssertionError(f"{name} has no place in the layers: give it one in DESIGN and here")


def violations(module: str, source: str) -> list[str]:
    """Imports that run upward or sideways."""
    mine = house.room(module)
    others = sorted({house.room(imported) for imported, _ in house.imports_of(source)} - {mine})
    return [f"{module} imports {other}" for other in others if level(other) <= level(mine)]


@pytest.mark.parametrize(
    ("module", "path"), list(house.modules().items()), ids=lambda value: str(value).removeprefix(str(ROOT))
)
def test_imports_run_downward_and_stop_at_faces(module, path):
    source = path.read_text(encoding="utf-8")
    assert violations(module, source) == []
    assert house.past_the_face(module, source) == set()


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("opensora_accel.plan", "from opensora_accel.parallel_states import init_parallel"),
        ("opensora_accel.plan", "import opensora_accel"),
        ("opensora_accel.fsdp", "def f():\n    from opensora_accel.experiments import by_node"),
        ("opensora_accel.cli", "from opensora_accel.experiments import low_bit"),
        ("opensora_accel.communications.ring", "from opensora_accel import attention"),
        ("opensora_accel.offload.engine", "import opensora_accel.checkpoint"),
        ("opensora_accel.attention.ulysses", "from opensora_accel.checkpoint import checkpoint"),
        ("opensora_accel.checkpoint", "def f():\n    from opensora_accel.training.loop import Trainer"),
        ("shardformer.engine.apply", "from opensora_accel.verify import verify"),
        ("opensora_accel.fsdp", "def f():\n    from opensora_accel.profiler import watch"),
        ("opensora_accel.checkpoint", "if TYPE_CHECKING:\n    import opensora_accel.planner"),
        ("opensora_accel", "from opensora_accel.integrations import diffusers"),
        ("opensora_accel.verify.report", "from opensora_accel.proposal import draft"),
        ("opensora_accel.planner.run", "from opensora_accel.verify import verify"),
        ("opensora_accel.profiler.page", "from opensora_accel.planner import page"),
        ("opensora_accel.observe.places", "from opensora_accel.profiler.records import REGIONS"),
        ("opensora_accel.training.loop", "from opensora_accel.cli import main"),
        ("opensora_accel.integrations.diffusers", "from opensora_accel.training.loop import Trainer"),
        ("shardformer.policy.wan", "from shardformer.engine import shard"),
        ("shardformer.engine.apply", "from shardformer.colossalai import colossalai_policy"),
        ("shardformer.modeling.t5", "from shardformer.policy import find_policy"),
    ],
)
def test_an_upward_import_would_be_found(module, source):
    assert violations(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("opensora_accel.cli", "from opensora_accel.doctor import main"),
        (
            "opensora_accel.training.loop",
            "import shardformer\nfrom opensora_accel.training.data import ClipLoader",
        ),
        ("opensora_accel.attention.ulysses", "from opensora_accel.parallel_states import get_parallel_group"),
        (
            "shardformer.engine",
            "from shardformer.policy import find_policy\nfrom opensora_accel.plan import Plan",
        ),
    ],
)
def test_a_downward_import_is_allowed(module, source):
    assert violations(module, source) == []


@pytest.mark.parametrize(
    "source",
    [
        "from opensora_accel.attention.ring import ring_attention",
        "def f():\n    from opensora_accel.communications import sizes",
        "import opensora_accel.offload.arena",
        "from opensora_accel.links import _slow",
        "if TYPE_CHECKING:\n    from opensora_accel.offload.calls import Ticket",
    ],
)
def test_an_import_past_a_face_would_be_found(source):
    assert len(house.past_the_face("shardformer.engine.apply", source)) == 1


def test_sources_use_nothing_that_is_made_for_tests():
    for module, path in house.modules().items():
        source = path.read_text(encoding="utf-8")
        assert not re.search(r"^\s*(from|import) (unittest|pytest|tests)\b", source, re.M), module


# By module: names that `global` statements change, and containers, thread-locals and objects of its own that it holds.
STATE = {
    "opensora_accel.parallel_states": {
        *("_groups", "_meshes", "_host_groups", "_made", "_exchanges", "_exchange_groups"),
        *("_at_reset", "_group_timeout", "_is_layout_given"),
    },
    "opensora_accel.attention.slices.dealing": {"_named"},
    "opensora_accel.offload.manager": {"GLOBAL_ACTIVATION_MANAGER"},
    "opensora_accel.watchdog": {"entered", "_has_failed", "_stop", "_store"},
    "opensora_accel.checkpoint.recompute": {"_preserving"},
    "opensora_accel.checkpoint.selective": {"_active"},
    "shardformer.spread.tokens": {"_running"},
    "shardformer.modeling.attention": {"_running", "_traced"},
    "opensora_accel.communications.checks": {"_compares_inputs", "_compares_next_forwards", "_wants_exact"},
    "opensora_accel.experiments.by_node": {"_links", "_nodes", "_ranks_per_node"},
    "opensora_accel.regions": {"_listener"},
}


# What makes a container, or another thing that changes.
MADE = {"local", "dict", "list", "set", "defaultdict", "deque", "Counter", "ContextVar", "count"}
MADE |= {"WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "WeakIdKeyDictionary"}


def state_of(source: str) -> set[str]:
    """Names of a module's state: what changes while the program runs, as far as a reader of its source can tell."""
    tree = ast.parse(source)
    found = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    own = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            name, value = getattr(target, "id", "__"), node.value
            is_made = isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] in {
                *own,
                *MADE,
            }
            is_empty = isinstance(value, (ast.Dict, ast.List)) and not ast.unparse(value).strip("[]{}")
            if not name.startswith("__") and (is_made or is_empty):
                found.add(name)
    return found


def test_state_that_outlives_a_call_is_what_the_page_of_the_house_lists():
    everywhere = set().union(*LIBRARY, *EXPERIMENTS)
    # A kernel or a table is made once and does not change.
    constants = {"opensora_accel.attention.kernels.choose", "shardformer.policy"}
    found = {
        module: state
        for module, path in house.modules().items()
        if house.room(module) in everywhere
        and not module.startswith(tuple(constants))
        and (state := state_of(path.read_text(encoding="utf-8")))
    }
    assert found == STATE
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    listed = page.partition("## What outlives a call")[2].partition("\n## ")[0]
    assert all(f"{module.rpartition('.')[2]}.py`" in listed for module in STATE)


@pytest.mark.parametrize(
    "source",
    [
        "_cache = {}",
        "def f():\n    global n\n    n = 1",
        "x = threading.local()",
        "_seen = set()",
        "c = count()",
    ],
)
def test_more_state_would_be_found(source):
    assert len(state_of(source)) == 1


@pytest.mark.prove
@pytest.mark.parametrize("folder", ["tools", "tests"])
def test_every_import_of_ours_is_there(folder):
    """Also of scripts that no test runs, and of tests that `make test` leaves out."""
    named = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in house.PACKAGES:
                named |= {(str(node.module), alias.name) for alias in node.names}
    assert len(named) > 50
    # Triton, ColossalAI and pydantic need not be there.
    optional = (
        *("shardformer.colossalai", "opensora_accel.documents"),
        *("shardformer.modeling.kernels.", "opensora_accel.experiments.unpack_kernel"),
    )
    for module, name in sorted(named):
        if not module.startswith(optional) and f"{module}.{name}" not in house.modules():
            assert hasattr(importlib.import_module(module), name), (module, name)


FACES_CHECK = """
import importlib, sys
for module in sys.argv[1:]:
    package = importlib.import_module(module)
    known = set(dir(package))  # what completion offers, before anything is asked for
    for name in package.__all__:
        assert name in known, f"completion does not know {module}.{name}"
        getattr(package, name)
"""


def test_what_a_face_names_is_there():
    """In a process of its own, where no other test has loaded a module already."""
    listed = [module for module, names in house.faces().items() if names]
    assert len(listed) > 20
    listed.remove("shardformer.colossalai")  # which imports ColossalAI
    done = subprocess.run([sys.executable, "-c", FACES_CHECK, *listed], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_name_that_is_loaded_on_use_is_that_of_a_module_which_would_take_its_place():
    lazy = [module for module, path in house.modules().items() if "lazy.attach(" in path.read_text("utf-8")]
    assert len(lazy) > 4
    for module in lazy:
        for name in house.faces().get(module) or ():
            if f"{module}.{name}" in house.modules():
                assert isinstance(getattr(importlib.import_module(module), name), types.ModuleType), name


# All of the library's modules, but for a plugin that is ColossalAI's own and kernels that need Triton.
LIBRARY_CHECK = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(*sorted(name for name in sys.modules if name.startswith("opensora_accel")))
"""


def test_the_library_loads_no_tool():
    needs = ("shardformer.colossalai.plugin", "shardformer.modeling.kernels.")
    everywhere = set().union(*LIBRARY)
    names = [
        name for name in house.modules() if house.room(name) in everywhere and not name.startswith(needs)
    ]
    assert len(names) > 100
    done = subprocess.run([sys.executable, "-c", LIBRARY_CHECK, *names], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [name for name in done.stdout.split() if house.room(name) not in everywhere] == []


# What torch's sharded tensors and FSDP load takes as long as torch itself: they are loaded where a Plan asks for them.
LIGHT_CHECK = """
import sys
import torch
import shardformer
for name in ("torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo", "sympy"):
    assert name not in sys.modules, f"{name} was imported"
for name in ("counts", "frames", "grids", "wan"):  # what a table of a model needs
    assert f"shardformer.policy.{name}" not in sys.modules, f"{name} was imported"
"""


def test_the_library_adds_little_to_the_import_of_torch():
    done = subprocess.run([sys.executable, "-c", LIGHT_CHECK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


IMPORT_CHECK = """
import os, sys
import torch
import torch.distributed as dist
before, forward = dict(os.environ), torch.nn.Module.__call__
import opensora_accel, shardformer
import opensora_accel.attention, opensora_accel.communications, opensora_accel.verify, opensora_accel.cli
import opensora_accel.integrations, opensora_accel.integrations.diffusers
import opensora_accel.planner
import shardformer.modeling.kernels, opensora_accel.proposal.command
assert dict(os.environ) == before, "the environment was written to"
assert torch.nn.Module.__call__ is forward and not dist.is_initialized()
assert not torch.cuda.is_initialized(), "a device was asked for"
for name in ("diffusers", "transformers", "colossalai", "apex", "matplotlib", "jinja2", "av", "rich", "tyro", "triton"):
    assert name not in sys.modules, f"{name} was imported"
"""


def test_importing_starts_nothing_and_needs_torch_only():
    # What torch's compiler writes there once it is loaded, which another test may have done in this process.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHINDUCTOR_")}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_CHECK], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr


def test_the_page_of_the_house_names_files_that_are_there():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = {text for text in re.findall(r"`([a-z_/0-9]+(?:\.py)?)`", page) if "/" in text}
    assert len(named) > 20 and sorted(path for path in named if not (ROOT / path).exists()) == []
