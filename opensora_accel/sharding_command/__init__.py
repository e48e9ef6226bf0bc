"""`opensora-accel shard`, and the text in which a chain of einsums is written."""

from opensora_accel.sharding_command import command

__all__ = ["command"]
