"""How a model's tokens are spread over the ranks: what is known of them in the running forward, and hooks by path."""

from opensora_accel import lazy
from shardformer.spread.hooks import Spread, uncompiled
from shardformer.spread.tokens import Alone, Tokens, is_own, local_tokens, mark_own, running_tokens

__all__ = [
    "Alone",
    "Spread",
    "Tokens",
    "is_own",
    "local_tokens",
    "mark_own",
    "running_tokens",
    "streams",
    "uncompiled",
]

# What is loaded with attention, which not every plan needs.
__getattr__, __dir__ = lazy.attach(__name__)
