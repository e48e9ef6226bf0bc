"""Attention over a sequence that is spread over ranks. Layout [B, S_local, H, D]; exact in both directions."""

from opensora_accel.attention.call import AttentionCall, autocast, enter_call, torch_attention
from opensora_accel.attention.gathered import gathered_attention
from opensora_accel.attention.joint import joint_attention
from opensora_accel.attention.kernels import kernels_of_cuda
from opensora_accel.attention.linear import linear_attention
from opensora_accel.attention.local import attend_whole, explain_kernel, local_attention
from opensora_accel.attention.ring import ring_attention
from opensora_accel.attention.ulysses import switch_sharded_dim, ulysses_attention, whole_mask
from opensora_accel.attention.usp import SequenceGroups, usp_attention

__all__ = [
    "AttentionCall",
    "SequenceGroups",
    "attend_whole",
    "autocast",
    "balance",
    "enter_call",
    "explain_kernel",
    "gathered_attention",
    "joint_attention",
    "kernels_of_cuda",
    "linear_attention",
    "local_attention",
    "ring_attention",
    "slices",
    "switch_sharded_dim",
    "torch_attention",
    "ulysses_attention",
    "usp_attention",
    "whole_mask",
]
