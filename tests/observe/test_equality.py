"""A digest of a tensor: the same bits have the same one, and no change escapes it."""

import pytest
import torch

from opensora_accel.observe.equality import digest


def changes(tensor, generator):
    """Tensors that differ from this one in ways that simple sums do not see."""
    flat = tensor.flatten()
    a, b = torch.randperm(flat.numel(), generator=generator)[:2].tolist()
    one = flat.clone()
    one.view(torch.uint8)[a * flat.element_size()] ^= 1
    swapped = flat.clone()
    swapped[a], swapped[b] = flat[b], flat[a]
    yield "one bit", one
    if flat[a] != flat[b]:
        yield "two swapped", swapped
    yield "the other sign", -flat
    yield "doubled", flat * 2
    yield "rolled", flat.roll(1)
    yield "reversed", flat.flip(0)
    yield "blocks swapped", torch.cat([flat[flat.numel() // 2 :], flat[: flat.numel() // 2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
@pytest.mark.parametrize("shape", [(7,), (4096,), (3, 4096), (130, 100), (2, 3, 2731)])
def test_a_digest_sees_every_change(dtype, shape):
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        tensor = torch.randn(shape, generator=generator).to(dtype)
        value = digest(tensor)
        assert 0 <= value < 2**62 and digest(tensor.clone()) == value
        for what, changed in changes(tensor, generator):
            assert torch.equal(changed, tensor.flatten()) or digest(changed.view(shape)) != value, what
    assert digest(torch.zeros(3, 0)) == digest(torch.zeros(0)) and digest(torch.tensor(True)) >= 0
    turned = tensor.transpose(0, -1)
    assert digest(turned) == digest(turned.contiguous())
