"""Our tables as policies of ColossalAI's shardformer, and the groups of its plugins in our registry.

ColossalAI is imported when a policy is made, not before: its import sets CUDA_DEVICE_MAX_CONNECTIONS.
"""

from shardformer.colossalai.groups import register_groups
from shardformer.colossalai.policy import ShardFormerMethods, colossalai_policy
from shardformer.colossalai.t5 import T5EncoderPolicy

__all__ = [
    "ShardFormerMethods",
    "T5EncoderPolicy",
    "colossalai_policy",
    "register_groups",
]
