"""Attention kernels of one device that return the log-sum-exp, and whose backward takes that of the whole row.

This is what attention over keys in blocks needs, and what `scaled_dot_product_attention` hides. Layout [B, S, H, D].
"""

from opensora_accel.attention.kernels.base import Grads, Kernel, PiecesKernel, Problem, Scores
from opensora_accel.attention.kernels.choose import (
    Choice,
    choose_for_pieces,
    choose_kernel,
    explain_pieces,
    kernels_of_cuda,
)

__all__ = [
    "Choice",
    "Grads",
    "Kernel",
    "PiecesKernel",
    "Problem",
    "Scores",
    "choose_for_pieces",
    "choose_kernel",
    "explain_pieces",
    "kernels_of_cuda",
]
