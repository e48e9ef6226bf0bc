"""A table and a plan as ColossalAI's `Policy`."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from opensora_accel.plan import Plan
from shardformer.colossalai.config import NO_PIPELINE, check_config, check_group, plan_of
from shardformer.colossalai.norms import norm_replacements
from shardformer.engine import shard
from shardformer.policy import Policy, find_policy

# What ColossalAI 0.5.0 calls on the policy it is given; it asks for no class.
_METHODS = (
    "set_model", "set_shard_config", "config_sanity_check", "preprocess", "module_policy", "postprocess",
    "get_held_layers", "get_shared_params",
)  # fmt: skip


def colossalai_policy(policy: Policy | None = None, *, plan: Plan | None = None) -> Any:
    """A `colossalai.shardformer.policies.base_policy.Policy` that does what our table says.

    For `ShardFormer(shard_config).optimize(model, policy=…)` and `HybridParallelPlugin(custom_policy=…)`. Norms are
    its `module_policy()`, replaced by ColossalAI. What is done to tokens and blocks is put on afterwards, by our
    engine: ColossalAI describes replacements by the class of a module, our tables hooks and kernel calls by its
    place. `shardformer.unshard` takes the latter off again; the norms stay.

    Args:
        policy: the table; by default the one for the model's class.
        plan: what to do. By default what the `ShardConfig` says: mode "all_to_all" is `Plan(ulysses=…)`,
            "ring_attn" is `Plan(ring=…)`, over its sequence group.

    Raises:
        ImportError: ColossalAI is missing or incomplete (the message says what to install).
    """
    return _policy_class()(policy, plan)


class ShardFormerMethods:
    """For a table that ColossalAI's `ShardFormer` is given as it is: each method is the translated policy's."""

    if not TYPE_CHECKING:  # a class with __getattr__ would have every attribute

        def __getattr__(self, name: str) -> Any:
            if name not in _METHODS:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return getattr(self._translated, name)

    @functools.cached_property
    def _translated(self) -> Any:
        """One for all calls: ColossalAI sets the model first and asks for its parts later."""
        assert isinstance(self, Policy)
        return colossalai_policy(self)


# Made when it is first asked for, because ColossalAI need not be installed.
@functools.cache
def _policy_class() -> type:
    base = _import_base()
    policy_class: Any = base.Policy

    class TablePolicy(policy_class):
        """A table and a plan, in the shape in which ColossalAI asks for them."""

        def __init__(self, table: Policy | None, plan: Plan | None):
            super().__init__()
            self.table, self.plan = table, plan

        def config_sanity_check(self) -> None:
            """Everything that can be refused, before the model is touched."""
            check_config(self.shard_config)
            check_group(self.shard_config, plan_of(self.shard_config, self.plan))
            self._find_table()

        def preprocess(self) -> nn.Module:
            return self.model

        # Called by ColossalAI between `preprocess` and `postprocess`.
        def module_policy(self) -> dict[type, Any]:
            norms = norm_replacements(self.model, self._find_table())
            return {
                parent: base.ModulePolicyDescription(
                    sub_module_replacement=[
                        # An instance may have None where another one has a norm.
                        base.SubModuleReplacementDescription(suffix, target, ignore_if_not_exist=True)
                        for suffix, target in targets.items()
                    ]
                )
                for parent, targets in norms.items()
            }

        def postprocess(self) -> nn.Module:
            plan = plan_of(self.shard_config, self.plan)
            if plan == Plan():  # norms alone: the model stays an ordinary one, which can be copied
                return self.model
            return shard(self.model, plan, policy=replace(self._find_table(), replacements=()))

        def get_held_layers(self) -> list[nn.Module]:
            raise ValueError(NO_PIPELINE)

        def _find_table(self) -> Policy:
            return find_policy(self.model) if self.table is None else self.table

    return TablePolicy


def _import_base() -> Any:
    try:
        from colossalai.shardformer.policies import base_policy
    except (ImportError, AttributeError) as error:  # the latter: what another version of a package lacks
        raise ImportError(
            f"ColossalAI cannot be imported ({error}). colossalai 0.5.0 works beside torch 2.13, diffusers 0.42 and "
            "transformers 5.23, but pins older ones; install it without its pins, and then what it needs:\n"
            "  pip install --no-deps colossalai==0.5.0\n"
            "  pip install bitsandbytes==0.50.2 einops==0.8.2 fabric==3.2.3 galore_torch==1.0 peft==0.21.2 "
            "sentencepiece==0.2.3\n"
            "A plain `pip install colossalai` would replace torch and diffusers (docs/colossalai.md)"
        ) from error
    return base_policy
