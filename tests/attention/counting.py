"""What a rank sends, seen where torch.distributed's functions are called."""

import contextlib

import torch
import torch.distributed as dist


class Sent:
    """Number of collectives (a batch of sends and receives is one), and the bytes that leave this rank."""

    def __init__(self):
        self.num_collectives = 0
        self.size_bytes = 0

    def add(self, size_bytes):
        self.num_collectives += 1
        self.size_bytes += size_bytes


@contextlib.contextmanager
def counted():
    sent = Sent()

    def all_to_all(output, input_, output_sizes, input_sizes, group=None, async_op=False):
        own = input_sizes[dist.get_rank(group)]
        sent.add((input_.numel() - own) * input_.element_size())
        return originals["all_to_all_single"](
            output, input_, output_sizes, input_sizes, group=group, async_op=async_op
        )

    def batch(operations):
        sent.add(sum(op.tensor.nbytes for op in operations if op.op is dist.isend))
        return originals["batch_isend_irecv"](operations)

    originals = {name: getattr(dist, name) for name in ("all_to_all_single", "batch_isend_irecv")}
    dist.all_to_all_single, dist.batch_isend_irecv = all_to_all, batch
    try:
        yield sent
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)


@contextlib.contextmanager
def saved_for_backward():
    """The tensors that autograd keeps, as saved-tensor hooks see them."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        yield kept
