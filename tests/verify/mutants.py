"""Defects of our own collectives, divisors and policies and of users' loops, and what an engineer would call each.

Every defect is tried alone. `defects.py` says how one is put into a step without touching the text of a source file.

Not tried, and why:
- The exchange of sizes and of texts between ranks, and votes on whether to stop: they carry no gradient.
- What `profiler`, `doctor` and `planner` send: they measure.
- The average of the weights (`EMA`) is not a gradient; sampling runs without one.

Equivalent to a right step, therefore not counted:
- DDP over the world instead of over mixed, where there is no tensor axis. FSDP2 on the root alone, without its
  blocks. DDP that synchronises every accumulated batch: it averages what is averaged.
- A ring that turns the other way, or ring and ulysses groups exchanged, where shares are equal and nothing is
  causal: attention does not see the order of keys. Both are here with a causal mask.
- `gather` after a per-token layer instead of before it.
- `full_tensor()` of the gradients' norm (torch 2.13): the norm of several DTensors is whole already.
"""

from __future__ import annotations

from tests.verify.mutants_hidden import HIDDEN_MUTANTS
from tests.verify.mutants_of_attention import ATTENTION_MUTANTS
from tests.verify.mutants_of_communications import COMMUNICATION_MUTANTS
from tests.verify.mutants_of_forwards import FORWARD_MUTANTS
from tests.verify.mutants_of_loops import LOOP_MUTANTS
from tests.verify.mutants_of_training import TRAINING_MUTANTS

MUTANTS = [
    *(*COMMUNICATION_MUTANTS, *ATTENTION_MUTANTS, *TRAINING_MUTANTS),
    *(*LOOP_MUTANTS, *HIDDEN_MUTANTS, *FORWARD_MUTANTS),
]

_REPRESENTATIVES = (
    "up dropped",
    "down scaled by share",
    "all-reduce of the gradient dropped",
    "ring: the other way",
    "engine: no attention redirected",
    "Wan: output not gathered",
    "DDP: over data",
    "loop: noise by rank in the second microbatch",
    "loop: a parameter outside of the model",
    "loop: a loss told as a sum",
    "loop: a stage without gradients in one replica",
    "loop: the optimizer before fully_shard",
    "loop: clipped by the norm of a shard",
    "forward: pool of its own tokens",
)
REPRESENTATIVES = [mutant for mutant in MUTANTS if mutant.name in _REPRESENTATIVES]
"""One of each kind, for a plain run."""
assert len(REPRESENTATIVES) == len(_REPRESENTATIVES)
