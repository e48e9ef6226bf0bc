"""Activation checkpointing with offload. Open-Sora's names, on torch's non-reentrant engine."""

from opensora_accel.checkpoint.api import (
    CheckpointFunctionWithOffload,
    auto_grad_checkpoint,
    checkpoint,
    set_grad_checkpoint,
)
from opensora_accel.checkpoint.blocks import checkpoint_blocks
from opensora_accel.checkpoint.chunked import chunk_tokens
from opensora_accel.checkpoint.core import carried, carrying
from opensora_accel.offload import GLOBAL_ACTIVATION_MANAGER, ActivationManager

__all__ = [
    "GLOBAL_ACTIVATION_MANAGER",
    "ActivationManager",
    "CheckpointFunctionWithOffload",
    "auto_grad_checkpoint",
    "carried",
    "carrying",
    "checkpoint",
    "checkpoint_blocks",
    "chunk_tokens",
    "set_grad_checkpoint",
]
