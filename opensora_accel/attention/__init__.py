"""Attention over a sequence that is spread over ranks. Layout [B, S_local, H, D]; exact in both directions."""

from opensora_accel.attention.local import local_attention
from opensora_accel.attention.ulysses import ulysses_attention

__all__ = ["local_attention", "ulysses_attention"]
