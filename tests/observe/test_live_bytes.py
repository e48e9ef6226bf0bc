"""Live bytes by counting storages: exact for what tensors ask for, on real and on fake tensors."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from opensora_accel.profiler import LiveBytes


@pytest.mark.parametrize("fake", [False, True])
def test_a_small_program(fake):
    with FakeTensorMode(allow_non_fake_inputs=True) if fake else torch.no_grad(), LiveBytes() as live:
        x = torch.zeros(1024)
        assert live.now_bytes == 4096
        y = x + 1
        view = y[5:]
        del y
        assert live.now_bytes == 8192, "a view keeps its storage"
        del view
        assert (live.now_bytes, live.peak_bytes) == (4096, 8192)
        x.add_(1)
        assert live.now_bytes == 4096, "in place makes nothing"
    assert live.timeline[0] == 4096 and live.timeline[-1] == 4096


def test_backward_frees_what_it_used():
    x = torch.randn(256, requires_grad=True)
    with LiveBytes() as live:
        y = x.sin().cos().sin().sum()
        saved = live.now_bytes
        assert saved == 2 * 1024 + 4, "the inputs of cos and sin, and the sum"
        y.backward()
        del y
    assert live.now_bytes == 1024, "the gradient"


def test_what_is_ignored_and_what_was_there_before():
    before, host = torch.zeros(100), torch.zeros(50)
    live = LiveBytes()
    live.count([before, before[1:]])
    live.ignore(host)
    assert live.now_bytes == 400
    with live:
        view, _twice = host[2:], before * 2
        assert live.now_bytes == 800
        live.ignore(before)
        assert live.now_bytes == 400
        address = before.untyped_storage()._cdata
        del before
        assert address not in live._ignored, "another storage may come to lie there"
    assert view is not None


def test_resized_storages_are_followed():
    original = torch.UntypedStorage.resize_
    with LiveBytes() as live:
        x = torch.zeros(100)
        x.untyped_storage().resize_(0)
        assert live.now_bytes == 0
        x.untyped_storage().resize_(400)
        assert live.now_bytes == 400
    assert torch.UntypedStorage.resize_ is original


def test_a_storage_at_an_ignored_address_is_counted_again():
    live = LiveBytes()
    for _ in range(50):
        live.ignore(torch.zeros(1000))
        with live:
            made = torch.ones(1000)
            assert live.now_bytes == 4000
            del made
        assert live.now_bytes == 0
