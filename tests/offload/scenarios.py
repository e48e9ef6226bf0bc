"""Training steps that take the engine through all of its orders. Each returns the gradients that it found."""

from __future__ import annotations

import contextlib
import gc

import torch
import torch.nn.functional as F
from torch import nn

from opensora_accel import checkpoint as ck
from opensora_accel.attention import local_attention

DEVICE = "cpu"


class Block(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, hidden):
        q, k, v = self.qkv(hidden).unflatten(-1, (3, 2, -1)).unbind(2)
        hidden = hidden + self.out(local_attention(q, k, v).flatten(2))
        return hidden + self.down(F.gelu(self.up(hidden)))


class Aborted(Exception):
    pass


@contextlib.contextmanager
def engine(manager):
    """The checkpoint API on this engine."""
    with ck.GLOBAL_ACTIVATION_MANAGER.show(manager):
        yield manager
    gc.collect()


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE) * 1


def model(num=5):
    torch.manual_seed(0)
    return nn.ModuleList([Block() for _ in range(num)]).to(DEVICE)


def forward(blocks, seed=1):
    hidden = random(1, 6, 16, seed=seed)
    for block in blocks:
        hidden = block(hidden)
    return hidden.square().sum()


def gradients(blocks):
    found = [parameter.grad.clone() for parameter in blocks.parameters()]
    blocks.zero_grad()
    return found


ENTRY_BYTES = 6 * 16 * 4


def two_steps(manager, mode):
    """The second step's copies out land where the first one's copies in came from."""
    blocks = model()
    manager.setup_arena(ENTRY_BYTES * 4 if mode == "full" else 1 << 14)
    ck.checkpoint_blocks(blocks, mode, 1.0)
    found = []
    for seed in (1, 2):
        forward(blocks, seed).backward()
        found += gradients(blocks)
    return found


def aborted_backward(manager, mode):
    """An exception while the next block is being fetched; then a step in the same memory."""
    blocks = model()
    manager.setup_arena(ENTRY_BYTES * 4 if mode == "full" else 1 << 14)
    ck.checkpoint_blocks(blocks, mode, 1.0)
    loss = forward(blocks)

    def explode(*_):
        raise Aborted

    handle = blocks[2].qkv.register_forward_hook(explode)
    try:
        loss.backward()
    except Aborted:
        handle.remove()
    del loss
    gc.collect()
    blocks.zero_grad()
    forward(blocks, 2).backward()
    return gradients(blocks)


def backward_inside_of_the_call(manager, mode):
    """Something is asked back before its copy out has been waited for."""
    manager.setup_arena(1 << 14)
    x = random(64, seed=3).requires_grad_()
    y = x * 2
    with manager.call([y]):
        z = (y * y).sum()
        (found,) = torch.autograd.grad(z, [x])
    return [found]


def two_asked_back_apart(manager, mode):
    """One call saves twice and is asked for the first in between."""
    manager.setup_arena(1 << 14)
    x, y = (random(64, seed=seed) for seed in (3, 4))
    with manager.call() as call:
        first = manager.save(x, call)
        found = [manager.load(first) * 1]
        second = manager.save(y, call)
        found.append(manager.load(second) * 1)
    found += [manager.load(first) * 1, manager.load(second) * 1]
    return found


def left_in_mid_backward(manager, mode, leave):
    """A step that fails while a block is being fetched; `leave()`, and another step."""
    blocks = model()
    ck.checkpoint_blocks(blocks, mode, 1.0)
    loss = forward(blocks)
    handle = blocks[2].qkv.register_forward_hook(lambda *_: (_ for _ in ()).throw(Aborted()))
    with contextlib.suppress(Aborted):
        loss.backward()
    handle.remove()
    del loss
    # After a backward that failed, autograd keeps what it did not reach until the next one (torch 2.13).
    torch.ones(1, requires_grad=True).sum().backward()
    gc.collect()
    leave()
    blocks.zero_grad()
    forward(blocks, 2).backward()
    return gradients(blocks)


def closed_in_mid_backward(manager, mode):
    """The arena goes while a copy from it is under way."""

    def leave():
        manager.close()
        manager.setup_arena(1 << 14)

    manager.setup_arena(1 << 14)
    return left_in_mid_backward(manager, mode, leave)


def trimmed_in_mid_backward(manager, mode):
    """An arena gives its empty slabs back while a copy from them is under way."""
    manager.setup_arena(limit_bytes=1 << 14)
    return left_in_mid_backward(manager, mode, manager.trim)


def no_room_in_mid_backward(manager, mode):
    """As above, because another size needs the room."""
    manager.setup_arena(limit_bytes=1 << 14)

    def leave():
        tickets = [manager.offload(torch.full((500,), 1.0, device=DEVICE)) for _ in range(8)]
        assert any(tickets)

    return left_in_mid_backward(manager, mode, leave)


def single_tensors(manager, mode):
    manager.setup_arena(1 << 14)
    tickets = [manager.offload(torch.full((64,), float(n), device=DEVICE)) for n in range(4)]
    return [manager.onload(ticket) * 1 for ticket in (tickets[2], tickets[0], tickets[0], tickets[3])]


SCENARIOS = {
    f.__name__: f
    for f in (
        two_steps,
        aborted_backward,
        backward_inside_of_the_call,
        two_asked_back_apart,
        closed_in_mid_backward,
        trimmed_in_mid_backward,
        no_room_in_mid_backward,
        single_tensors,
    )
}
