"""Activation checkpointing with offload. Open-Sora's names, on torch's non-reentrant engine."""

from opensora_accel.checkpoint.blocks import KEEP_LAST, checkpoint_blocks
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
    "KEEP_LAST",
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
