"""Claims that attention over ranks is exact, sends the fewest bytes and is no slower than anybody's, and measures it.

Claims, against full attention in fp64 and beside yunchang, DeepSpeed, diffusers, torch and ring-attention-pytorch:
gradients right to 1e-9 on 2, 3 and 4 ranks in every case (uneven tokens and heads, S_kv that is not S_q, grouped heads,
key masks, causal); a ring that sends 6 times its local q for each rank but one in fp32 and 8 times in bf16; a Ulysses
of 4 collectives where others need 8. On two gloo ranks, forward and backward: 1.2 times as fast as diffusers' Ulysses,
2 times torch's `context_parallel` with its MATH kernel, the zigzag 1.15 times the contiguous ring in a causal problem,
and slower than nobody within the spread.

The work is done by `opensora_accel.profiler.bench_attention`; `--help` tells the options and how to read the tables.
Peers that need an environment of their own are skipped until `--install-peers` has made it.
"""

import sys

from opensora_accel.profiler.bench_attention import main

if __name__ == "__main__":
    sys.exit(main())
