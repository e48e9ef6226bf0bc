"""One thread per rank, one rank pool per session, and the tolerances that every comparison takes."""

from __future__ import annotations

import collections
import gc
import importlib
import json
import logging
import os
import sys
from pathlib import Path

# Before torch is imported, also by the pool's processes, which inherit it: oversubscribed, a 3 ms model takes 200.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")

import hypothesis
import pytest
import torch

from opensora_accel.verify.pool import RankPool, set_modules_aside

torch.set_num_threads(1)
# An example may take as long as a busy machine makes it.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")
# Every test makes and drops Python objects by the thousand, and the search for cycles among them took a tenth of the
# time. Ranks have it from here; they search after every job.
gc.set_threshold(20_000, 20, 50)

PRELOAD = [
    "diffusers.models.transformers.transformer_wan",
    "opensora_accel.watching.first_steps",
    "opensora_accel.profiler",
    "opensora_accel.training.loop",
    "pytest",
    "shardformer",
    "tests.models",
    "tests.training.runs",
    "tests.verify.mutants",
    "tests.verify.steps",
    "tests.conftest",
]
# This file is the last of them: what the pool's processes are forked with, none of them searches for garbage.
set_modules_aside()


def pytest_collection(session):
    """Where nothing is compiled yet, each of P workers begins to import at another P-th of the files, and finds those
    of the others compiled: rewriting the assertions of all takes 13 s.
    """
    worker = getattr(session.config, "workerinput", None)
    root = Path(__file__).parent
    if worker is None or any(Path(arg).resolve() != root for arg in session.config.args):
        return
    files = sorted(root.rglob("test_*.py"))
    first = len(files) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    for path in files[first:] + files[:first]:
        try:
            importlib.import_module(".".join(path.relative_to(root.parent).with_suffix("").parts))
        except (Exception, pytest.skip.Exception):  # noqa: BLE001 - it is told when the file is collected
            return


def pytest_runtest_setup(item):
    set_modules_aside()


@pytest.fixture(scope="session")
def ranks():
    """`ranks(n, function, *args)` runs a module-level function on n gloo ranks, started once per session."""
    # What jobs need takes seconds to import: once, and not in every process that replaces one that failed.
    pool = RankPool(preload=PRELOAD)
    yield pool
    pool.close()


@pytest.fixture
def fault(record_property):
    """`fault(kind, number)` counts cases that ended as they should; their sums are printed at the end."""

    def count(kind, number=1):
        record_property("fault", (kind, number))

    return count


def pytest_terminal_summary(terminalreporter):
    counts = collections.Counter()
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "fault":
                kind, number = value
                counts[kind] += number
    if counts:
        terminalreporter.section("faults that ended as they should")
        for kind, number in sorted(counts.items()):
            terminalreporter.write_line(f"{number:5} × {kind}")


@pytest.fixture
def parallel_registry():
    """Leaves no group behind, in this process."""
    from opensora_accel import parallel_states

    parallel_states.reset(destroy_process_group=True)
    yield parallel_states
    parallel_states.reset(destroy_process_group=True)


@pytest.fixture(scope="session")
def clips(tmp_path_factory):
    """A folder of small videos with captions."""
    from opensora_accel.training.tiny_run import write_clips

    return write_clips(tmp_path_factory.mktemp("clips"))


@pytest.fixture
def config_file(clips, tmp_path):
    """Of a tiny run of four steps on one rank, which writes to `tmp_path / "run"`."""
    from dataclasses import asdict

    from tests.training.runs import tiny_config

    path = tmp_path / "run.json"
    config = asdict(tiny_config(clips, tmp_path / "run", steps=4, save_every=2))
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.fixture
def run(parallel_registry, monkeypatch, capsys):
    """`run(*arguments)`: the exit status and what was printed, in this process as a single rank."""
    from opensora_accel.cli import main

    # The command gives logging a handler on this test's stderr, which the next test no longer has.
    monkeypatch.setattr(logging.root, "handlers", [])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments):
        parallel_registry.reset(destroy_process_group=True)
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as end:  # tyro's own, for options it does not know and --help
            status = end.code
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return call
