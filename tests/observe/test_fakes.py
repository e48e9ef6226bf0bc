"""What tensors without memory know all the same, where programs branch on it."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

from opensora_accel.observe.fakes import FakeFloats


def test_zeros_are_known_until_they_are_written_to():
    with FakeFloats():
        zeros, drawn = torch.zeros(2, 3), torch.randn(2, 3)
        assert bool(torch.all(zeros == 0)) and not bool(torch.any(zeros == 1))
        zeros[0] += drawn[0]
        for values in (zeros, drawn):
            with pytest.raises(DataDependentOutputException):
                bool(torch.all(values == 0))


def test_rows_that_a_mask_chooses_are_counted():
    with FakeFloats():
        mask, states = torch.tensor([True, False, True]), torch.randn(3, 5)
        assert states[mask].shape == (2, 5) and states[~mask].shape == (1, 5)
