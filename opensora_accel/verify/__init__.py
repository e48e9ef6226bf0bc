"""Proof that a parallel run has the gradients of one device."""

from opensora_accel.observe.meshes import Run, meshes_of
from opensora_accel.verify.causes import Cause
from opensora_accel.verify.diagnose import diagnose
from opensora_accel.verify.pool import RankPool
from opensora_accel.verify.report import Report
from opensora_accel.verify.verify import verify

__all__ = ["Cause", "RankPool", "Report", "Run", "diagnose", "meshes_of", "verify"]
