"""The place where Open-Sora's code looks for this name. Nothing but the name: it stands above the tables' room."""

from shardformer.colossalai import T5EncoderPolicy

__all__ = ["T5EncoderPolicy"]
