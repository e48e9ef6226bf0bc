"""Proof that a parallel run has the gradients of one device."""

from opensora_accel.verify.fp64 import lift_casts

__all__ = ["lift_casts"]
