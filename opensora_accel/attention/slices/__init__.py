"""Masks as slices: which queries see which keys, at the cost of their area."""

from opensora_accel.attention.slices.dealing import Deal, deal, dealt
from opensora_accel.attention.slices.geometry import Kind, Slice
from opensora_accel.attention.slices.mask import AttentionSlices, tile_order
from opensora_accel.attention.slices.pieces import PieceFacts, Pieces

__all__ = ["AttentionSlices", "Deal", "Kind", "PieceFacts", "Pieces", "Slice", "deal", "dealt", "tile_order"]
