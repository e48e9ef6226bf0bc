"""Activations in host memory: the engine, its arena, and the choice of how many blocks to move."""

from opensora_accel.offload.arena import Arena
from opensora_accel.offload.auto import AutoOffload
from opensora_accel.offload.calls import Call, Saved, Ticket
from opensora_accel.offload.choose import Decision, Memory, choose
from opensora_accel.offload.counters import OffloadCounters
from opensora_accel.offload.manager import GLOBAL_ACTIVATION_MANAGER, ActivationManager
from opensora_accel.offload.queues import HostQueues, Queue, Queues

__all__ = [
    "GLOBAL_ACTIVATION_MANAGER",
    "ActivationManager",
    "Arena",
    "AutoOffload",
    "Call",
    "Decision",
    "HostQueues",
    "Memory",
    "OffloadCounters",
    "Queue",
    "Queues",
    "Saved",
    "Ticket",
    "choose",
]
