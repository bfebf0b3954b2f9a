"""Results of exchanges go to the host in one copy: on CUDA it waits for computing at each."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from terrace.program.exchange import OuterResult
from terrace.runtime.islands import DivergedError, Island
from terrace.runtime.outer_numbers import BEFORE, CHANGE, LOSS, MEAN, NUM_HEARD, TOKENS, OuterNumbers

_TO_HOST = ("cpu", "item", "tolist", "__float__", "__int__", "__bool__")


class OnDevice(Tensor):
    """Counts what makes the host wait."""

    waits = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = getattr(func, "__name__", "") in _TO_HOST
        OnDevice.waits += waits
        found = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        return found.as_subclass(Tensor) if waits and isinstance(found, Tensor) else found


@pytest.fixture(autouse=True)
def no_waits() -> None:
    OnDevice.waits = 0


def test_a_result_is_read_at_once() -> None:
    numbers = OuterNumbers.__new__(OuterNumbers)
    heard = torch.zeros(2, 2, NUM_HEARD, dtype=torch.float64)
    heard[1, :, TOKENS] = torch.tensor([3.0, 5.0])
    heard[1, :, LOSS] = torch.tensor([6.0, 10.0])
    heard[1, :, CHANGE] = torch.tensor([4.0, 12.0])
    heard[1, :, MEAN] = 9.0
    heard[1, :, BEFORE] = torch.tensor([30.0, 42.0])
    numbers.heard = heard.as_subclass(OnDevice)
    result = numbers.result(1)
    assert replace(result, change=0.0) == OuterResult(fragment=1, loss=2.0, num_tokens=8, change=0.0, agreement=0.5)
    assert result.change == pytest.approx(8.0**0.5, rel=1e-14)  # roots of other libraries differ in the last bit
    assert OnDevice.waits == 1
    assert numbers.result(0).agreement is None


def test_anchors_of_all_blocks_are_compared_at_once() -> None:
    class Block:
        name = "block.3"

    class Program:
        blocks = (Block,) * 8

    island = Island.__new__(Island)
    island._digests = {block: torch.ones(2).as_subclass(OnDevice) for block in (1, 2, 5)}
    program: Any = Program
    island._check(program, [1, 2, 3])
    assert OnDevice.waits == 1
    assert list(island._digests) == [5], "each is compared once"
    island._check(program, [1, 2])
    assert OnDevice.waits == 1
    island._digests = {1: torch.ones(2), 3: torch.tensor([1.0, 2.0])}
    with pytest.raises(
        DivergedError, match=r"block 'block\.3' has other outer parameters on island 1 than on island 0"
    ):
        island._check(program, [1, 3])
