"""What a step sends, recorded at its true world size without sending it, and what its Plan promises."""

from opensora_accel.verify.communication.agreement import Violation
from opensora_accel.verify.communication.promise import broken_promises
from opensora_accel.verify.communication.record_step import Record, record_step

__all__ = ["Record", "Violation", "broken_promises", "record_step"]
