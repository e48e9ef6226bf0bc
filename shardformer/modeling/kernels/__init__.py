"""Norms with what a transformer block does right after them, each in one pass over memory, forward and backward.

Each function has a plain PyTorch version (`plain.py`), which is what it computes, rounding included, and a Triton
kernel, which runs where Triton and its device are there. Importing this package does not import Triton.
"""

from shardformer.modeling.kernels.choose import explain_kernel, gated_residual, modulated_norm, norm_rotary

__all__ = ["explain_kernel", "gated_residual", "modulated_norm", "norm_rotary"]
