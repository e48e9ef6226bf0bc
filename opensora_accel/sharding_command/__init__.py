"""`opensora-accel shard`, and the text in which a chain of einsums is written."""

__all__ = ["command"]
