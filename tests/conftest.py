"""One thread per rank, one rank pool per session, and the tolerances that every comparison takes."""

from __future__ import annotations

import os
import sys

# Before torch is imported, also by the pool's processes, which inherit it: oversubscribed, a 3 ms model takes 200.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")

import pytest
import torch

from opensora_accel.verify.pool import RankPool

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks():
    """`ranks(n, function, *args)` runs a module-level function on n gloo ranks, started once per session."""
    # A model of diffusers takes seconds to import: once, and not in every process that replaces one that failed.
    pool = RankPool(preload=["diffusers.models.transformers.transformer_wan"])
    yield pool
    pool.close()


@pytest.fixture
def parallel_registry():
    """Leaves no group behind, in this process."""
    from opensora_accel import parallel_states

    parallel_states.reset(destroy_process_group=True)
    yield parallel_states
    parallel_states.reset(destroy_process_group=True)
