"""Any strided tensor as bytes and back: the same values, the same strides, no more bytes than it has elements."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opensora_accel.offload.packing import TensorMeta, can_move, from_bytes, to_bytes


@st.composite
def strided(draw):
    """A view of random shape, strides (0 and overlaps among them) and offset over a short storage."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    stride = [draw(st.integers(0, 9)) for _ in shape]
    offset = draw(st.integers(0, 5))
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.int16, torch.bool]))
    span = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True) if n)
    storage = torch.arange(offset + span).to(dtype)
    return storage.as_strided(shape, stride, offset)


@settings(max_examples=300)
@given(strided())
def test_what_comes_back_is_what_went(tensor):
    meta = TensorMeta.of(tensor)
    data = to_bytes(tensor, meta).clone()
    assert data.dtype == torch.uint8 and data.shape == (meta.size_bytes,)
    back = from_bytes(data, meta)
    assert torch.equal(back, tensor) and back.dtype == tensor.dtype
    assert back.stride() == tensor.stride() and back.shape == tensor.shape
    assert meta.num_elements <= tensor.numel()


def test_a_tensor_without_gaps_is_not_copied_on_the_way():
    x = torch.randn(4, 6).t()
    assert to_bytes(x, TensorMeta.of(x)).data_ptr() == x.data_ptr()
    memory = torch.zeros(96, dtype=torch.uint8)
    assert from_bytes(memory, TensorMeta.of(x)).data_ptr() == memory.data_ptr()


def test_neighbours_in_memory_have_versions_of_their_own():
    memory, meta = torch.zeros(64, dtype=torch.uint8), TensorMeta.of(torch.zeros(8))
    first, second = (from_bytes(piece, meta) for piece in memory.split(32))
    first.add_(1)
    assert (first._version, second._version) == (1, 0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.zeros(2, dtype=torch.complex64).conj(),
        lambda: torch.zeros(2, dtype=torch.complex64).conj().imag,
    ],
)
def test_what_is_not_plain_memory_stays(make):
    assert not can_move(make())
    assert can_move(torch.zeros(2)) and can_move(torch.nn.Parameter(torch.zeros(2)))
