"""Proof that a parallel run has the gradients of one device."""

from opensora_accel.verify.findings import Finding
from opensora_accel.verify.fp64 import lift_casts
from opensora_accel.verify.pool import RankPool
from opensora_accel.verify.report import Report
from opensora_accel.verify.run import Run
from opensora_accel.verify.shapes import meshes_of
from opensora_accel.verify.verify import verify

__all__ = ["Finding", "RankPool", "Report", "Run", "lift_casts", "meshes_of", "verify"]
