"""Our tables as policies of ColossalAI's shardformer, and the groups of its plugins in our registry.

ColossalAI is imported when a policy is made, not before: its import sets CUDA_DEVICE_MAX_CONNECTIONS.
"""

from shardformer.colossalai.groups import register_groups
from shardformer.colossalai.policy import ShardFormerMethods, colossalai_policy

__all__ = ["ShardFormerMethods", "colossalai_policy", "register_groups"]
