"""What a run leaves on disk to go on from: written beside the training, verified before it is read, agreed on by all.

A saved state is one folder of safetensors and JSON under a manifest of SHA-256 sums; nothing in it can execute. Every
tensor is whole in one file, and the files are shared between the ranks that write them. So a run may go on with any
Plan and any number of ranks, each of which reads the rows that it holds, and the weights are a model folder of
diffusers as they lie. P = 3 ranks that hold thirds of four weights w0 … w3:

    rank 0    sends its thirds of w1, w2    receives the other thirds of w0, w3    writes w0, w3
    rank 1    sends its thirds of w0, w2    receives the other thirds of w1        writes w1
    rank 2    sends its thirds of w0, w1    receives the other thirds of w2        writes w2

The step waits only until each rank has copied its shards to host memory. Threads exchange them and write the files,
into a folder that gets its name when it is whole; older ones are removed after that.
"""

from opensora_accel.training.saved_state.folder import (
    AUTO,
    FOLDER,
    MODEL_WEIGHTS,
    NEWEST,
    TOKENIZER,
    ModelRecord,
    Record,
    find_saved_state,
    list_saved_states,
    read_record,
    run_of,
    set_newer_aside,
)
from opensora_accel.training.saved_state.load import load_states, stored_of
from opensora_accel.training.saved_state.save import SAVING, Saver, TrainState, record_of_model

__all__ = [
    "AUTO",
    "FOLDER",
    "MODEL_WEIGHTS",
    "NEWEST",
    "SAVING",
    "TOKENIZER",
    "ModelRecord",
    "Record",
    "Saver",
    "TrainState",
    "find_saved_state",
    "list_saved_states",
    "load_states",
    "read_record",
    "record_of_model",
    "run_of",
    "set_newer_aside",
    "stored_of",
]
