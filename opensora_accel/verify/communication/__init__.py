"""What a step sends, recorded at its true world size without sending it, and what its Plan promises."""

from opensora_accel.verify.communication.promise import broken_promises
from opensora_accel.verify.communication.record import Call, Recorder
from opensora_accel.verify.communication.recorded import Record
from opensora_accel.verify.communication.static import record_step
from opensora_accel.verify.communication.table import as_dict, as_table
from opensora_accel.verify.communication.violation import Violation

__all__ = ["Call", "Record", "Recorder", "Violation", "as_dict", "as_table", "broken_promises", "record_step"]
