"""Bytes of tensors whose strides are not those of a fresh tensor."""

import pytest
import torch
from torch import Tensor

from terrace.comm.exchange import as_bytes
from terrace.model.hf.checksums import _crc

# Contiguous to torch, and not to be viewed as bytes: nothing, or one element, in the last dim.
TENSORS = {
    "no row": torch.empty(0, 1) * 2.5,
    "one column": torch.arange(15.0).view(5, 3).t()[:, :1],
    "one element": torch.arange(9.0)[::3][:1],
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "plain": torch.arange(12.0).view(3, 4),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_bytes_are_those_of_the_elements(tensor: Tensor) -> None:
    found = as_bytes(tensor)
    assert found.shape == (*tensor.shape[:-1], 4 * tensor.shape[-1])
    assert found.numpy().tobytes() == tensor.numpy().tobytes()


def test_a_fresh_tensor_is_not_copied() -> None:
    tensor = TENSORS["plain"]
    assert as_bytes(tensor).data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_a_checksum_knows_no_strides(tensor: Tensor) -> None:
    assert _crc(tensor) == _crc(torch.tensor(tensor.tolist()).view(tensor.shape))
