"""Defects of our own collectives and divisors and of users' loops, one at a time, and what an engineer would call each.

Not mutated, and why:
- The exchange of sizes (`communications.sizes.exchange_sizes`, `attention.checks._exchange`), `check_agreement`,
  `all_gather_object` of `build._check_memory` and `ClipLoader`, `broadcast_object_list` of the tokenizer and the
  listing, `_any_rank` and `_any_rank_failed`: they carry counts and texts that are checked or only read, no gradient.
- The all-reduce of `attention.overlap`, and all of `profiler`, `doctor` and `planner`: they measure.
- Peers of another group in `communications.ring`: as in the ring of attention, where it is tried; a rank that hangs
  costs seconds.
- The average of the weights (`EMA`): not a gradient. `sample`: runs without one.
Equivalent, therefore not counted:
- DDP over the world instead of over mixed, where there is no tensor axis. FSDP2 on the root alone, without its
  blocks. DDP that synchronises every accumulated batch: it averages what is averaged.
- A ring that turns the other way, or ring and ulysses groups exchanged, where shares are equal and nothing is
  causal: attention does not see the order of keys. Both are here with a causal mask.
- A layout's runs in another order (`balance._runs`): whoever arranges the tokens follows it.
- `gather` after a per-token layer instead of before it.
- `full_tensor()` of the gradients' norm (torch 2.13): the norm of several DTensors is whole already.
"""

from __future__ import annotations

from tests.verify.mutants_of_attention import ATTENTION_MUTANTS
from tests.verify.mutants_of_communications import COMMUNICATION_MUTANTS
from tests.verify.mutants_of_forwards import FORWARD_MUTANTS
from tests.verify.mutants_of_loops import LOOP_MUTANTS
from tests.verify.mutants_of_training import TRAINING_MUTANTS

MUTANTS = [*COMMUNICATION_MUTANTS, *ATTENTION_MUTANTS, *TRAINING_MUTANTS, *LOOP_MUTANTS, *FORWARD_MUTANTS]
