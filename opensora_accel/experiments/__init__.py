"""What is off by default and has never run on a GPU. The folder may go, and nothing else breaks.

Collectives by node (`by_node`; the Plan's `two_level` and `ranks_per_node`)
    moves in when: on 2 nodes of 8 GPUs an all-to-all of 64 KiB a piece is 1.2 times as fast as NCCL's own.
    removing costs: the two fields, a branch each in the planner's candidates and estimate and in the verifier's
    promised groups, and the two places where `fsdp_collectives` asks for it.
Sums in bf16, gathers in int8 or fp8 (`compressed`, `fsdp_collectives`; the Plan's `reduce_dtype` and `gather_dtype`)
    moves in when: a step of HSDP over a network is 1.1 times as fast, at the same loss over 1,000 steps.
    removing costs: the two fields, and what the verifier knows of messages that were compressed; by node, an all-reduce
    between copies needs `fsdp_collectives` too.
Ulysses under compute (`overlap`, `late_values`; the Plan's `overlap_ulysses`)
    moves in when: less than half of the plain exchange is exposed on 8 GPUs, and no step is slower.
    removing costs: the field, and a factor in the planner's estimate.
AdamW with 8 and 4 bits (`low_bit`; the trainer's `optim.state`)
    moves in when: the loss of `configs/bunny.toml` stays within 1 % of fp32's, and no step on a GPU is slower.
    removing costs: the option, and three calls in `training`.

Frozen weights in 8 and 4 bits (`quantized`; the trainer's `lora.base`)
    moves in when: a LoRA of Wan 2.1 14B trains on one GPU of 24 GB, and its step takes at most 1.2 times a bf16 base's.
    removing costs: the option, and in `training` a call and what it counts of memory and parameters.

They import the library; nothing imports them. `opensora_accel/experimental.py` loads the one that a field asks for.
"""
