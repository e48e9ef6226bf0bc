"""Claims that activations leave the GPU at no visible cost, and measures it beside the other ways to do it.

Claim, on a GPU and for sequences of tens of thousands of tokens: moving the inputs of all blocks but the last to
host memory takes at most 1.02 times the step of checkpointing alone, at least 95 % of the copies' time lies beside
compute, at least 99 % of the bytes that theory names are moved, and no other scheme that offloads is faster or has a
lower peak. On a CPU only the accounting can be checked: bytes moved, bytes that stay after the forward, and peaks.

The last part fails by accounting for peers that fetch only when backward waits: two slots and the last block's input
cost two block inputs more at the peak than `save_on_cpu` needs. The run prints and stores that as a failed claim.

The work is done by `opensora_accel.profiler.bench_offload`; `--help` tells the options and how to read the table.
"""

import sys

from opensora_accel.profiler.bench_offload import main

if __name__ == "__main__":
    sys.exit(main())
