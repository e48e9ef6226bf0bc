"""What a rank sends, and what autograd keeps on it."""

import contextlib

import torch

from opensora_accel.observe import CollectiveRecorder


class Sent(CollectiveRecorder):
    """Number of all-to-alls and sends, and the bytes that leave this rank in them; exchanged sizes are left out."""

    @property
    def _data(self):
        return [call for call in self.calls if call.kind in ("all-to-all", "send")]

    @property
    def num_collectives(self):
        return len(self._data)

    @property
    def size_bytes(self):
        return sum(call.sent_bytes for call in self._data)


counted = Sent


@contextlib.contextmanager
def saved_for_backward():
    """The tensors that autograd keeps, as saved-tensor hooks see them."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        yield kept
