"""Activation checkpointing with offload. Open-Sora's names, on torch's non-reentrant engine."""

from opensora_accel.checkpoint.blocks import checkpoint_blocks
from opensora_accel.checkpoint.chunked import chunk_tokens
from opensora_accel.checkpoint.recompute import (
    CheckpointFunctionWithOffload,
    auto_grad_checkpoint,
    checkpoint,
    preserve_state,
    set_grad_checkpoint,
    with_preserved_state,
)
from opensora_accel.offload import GLOBAL_ACTIVATION_MANAGER, ActivationManager

__all__ = [
    "GLOBAL_ACTIVATION_MANAGER",
    "ActivationManager",
    "CheckpointFunctionWithOffload",
    "auto_grad_checkpoint",
    "checkpoint",
    "checkpoint_blocks",
    "chunk_tokens",
    "preserve_state",
    "set_grad_checkpoint",
    "with_preserved_state",
]
