"""Random draws that depend on what is drawn for, and never on which rank draws."""

from __future__ import annotations

import hashlib

import torch


def generator(seed: int, purpose: str, counter: int) -> torch.Generator:
    """A random stream of its own for each (seed, purpose, counter): neighbouring seeds share nothing.

    Keyed by a sample's position in the job, it gives all ranks of a sequence group equal draws, ranks with other
    samples different ones, and any number of data ranks the same job.
    """
    digest = hashlib.sha256(f"{seed}/{purpose}/{counter}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
