"""Activations in host memory: the engine, its arena, and the choice of how many blocks to move."""

from opensora_accel.offload.arena import Arena
from opensora_accel.offload.calls import Call, Kept, OffloadCounters, Saved, Ticket
from opensora_accel.offload.choose import Decision, Measurement, choose
from opensora_accel.offload.device import Queue, Queues
from opensora_accel.offload.engine import OffloadEngine
from opensora_accel.offload.host_memory import allocate_on_host, default_limit_bytes
from opensora_accel.offload.manager import GLOBAL_ACTIVATION_MANAGER, ActivationManager
from opensora_accel.offload.packing import can_move, is_plain
from opensora_accel.offload.share import OffloadShare, num_blocks_to_move

__all__ = [
    "GLOBAL_ACTIVATION_MANAGER",
    "ActivationManager",
    "Arena",
    "Call",
    "Decision",
    "Kept",
    "Measurement",
    "OffloadCounters",
    "OffloadEngine",
    "OffloadShare",
    "Queue",
    "Queues",
    "Saved",
    "Ticket",
    "allocate_on_host",
    "can_move",
    "choose",
    "default_limit_bytes",
    "is_plain",
    "num_blocks_to_move",
]
