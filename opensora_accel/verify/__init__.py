"""Proof that a parallel run has the gradients of one device."""

from opensora_accel.observe import Run, meshes_of
from opensora_accel.verify import command
from opensora_accel.verify.beside_one_device import verify
from opensora_accel.verify.causes import Cause
from opensora_accel.verify.command import Proof, show_on_terminal
from opensora_accel.verify.diagnose import diagnose
from opensora_accel.verify.pool import RankPool
from opensora_accel.verify.report import Report

__all__ = [
    "Cause",
    "Proof",
    "RankPool",
    "Report",
    "Run",
    "command",
    "diagnose",
    "meshes_of",
    "show_on_terminal",
    "verify",
]
