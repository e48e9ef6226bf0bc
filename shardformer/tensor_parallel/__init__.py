"""Linear layers shared between ranks, with collectives derived from their einsums.

A rank holds some heads of every attention and some of every MLP's hidden channels. What a layer communicates follows
from where its weight is cut (`derive`), where it is cut is data (`shardformer.policy.tensors`), and the model's own
forward runs on the shares.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opensora_accel import lazy

if TYPE_CHECKING:
    from shardformer.tensor_parallel.apply import shard_tensors
    from shardformer.tensor_parallel.state import (
        cuts_of,
        full_shape,
        full_state_dict,
        full_tensor,
        full_tensors,
        group_of_cut,
        load_full_state_dict,
        local_tensor,
        whole_name,
    )

__all__ = [
    "cuts_of",
    "full_shape",
    "full_state_dict",
    "full_tensor",
    "full_tensors",
    "group_of_cut",
    "load_full_state_dict",
    "local_tensor",
    "shard_tensors",
    "whole_name",
]

__getattr__, __dir__ = lazy.attach(__name__)
