"""Two device slots: free when nothing uses their memory, grown when an entry is larger."""

import torch

from opensora_accel.offload.device import Slots

CPU = torch.device("cpu")


def test_a_slot_is_free_when_no_view_of_it_lives():
    slots = Slots(CPU)
    assert slots.take(8) is None
    slots.reserve(64)
    first = slots.take(64)
    assert slots.take(8) is None, "one slot, in use"
    view = first[8:16].view(torch.float32)
    del first
    assert slots.take(8) is None, "a view of a view uses it"
    del view
    assert slots.take(8) is not None


def test_two_slots_of_the_largest_entry():
    slots = Slots(CPU)
    for size_bytes in (64, 32, 32, 128, 100):
        slots.reserve(size_bytes)
    assert slots.size_bytes == 256
    held = [slots.take(128), slots.take(128)]
    assert slots.take(1) is None
    held[0].fill_(1)
    held[1].fill_(2)
    assert int(held[0].sum()) == 128, "they do not overlap"
    held.pop()
    assert slots.take(129) is None and slots.take(128) is not None


def test_growing_leaves_what_is_in_use_alone():
    slots = Slots(CPU)
    slots.reserve(16)
    held = slots.take(16).fill_(7)
    slots.reserve(32)
    slots.take(32).fill_(1)
    assert held.tolist() == [7] * 16


def test_what_autograd_holds_of_a_slot_counts():
    slots = Slots(CPU)
    slots.reserve(16)
    x = slots.take(16).view(torch.float32).requires_grad_()
    loss = x.sin().sum()
    del x
    assert slots.take(16) is None, "sin saved its input"
    loss.backward()
    del loss
    assert slots.take(16) is not None
