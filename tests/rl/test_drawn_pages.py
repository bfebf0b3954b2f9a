"""A rollout over mapped pages has the bits of one over gathered pages, and its memory goes back with the engine."""

from fractions import Fraction
from pathlib import Path

import pytest
import torch

from terrace.generation.pages import GatheredPages
from terrace.rl.values.ragged import Ragged
from terrace.rl.values.rows import Rows
from terrace.rl.workers import drawing
from tests.support.generation import MODELS, make


def maps() -> int:
    """Mappings of this process that show keys and values."""
    return Path("/proc/self/maps").read_text().count("terrace keys and values")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "window"])
def test_a_rollout_draws_the_same_bits_over_mapped_pages(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = MODELS[name]
    blocks = [block.to(dtype) for block in make(config)]
    prompts = [torch.arange(3, 3 + size) for size in (5, 21, 9) for _ in range(2)]
    rows = Rows({"prompts": Ragged.of(prompts), "seeds": torch.arange(6)})

    def made() -> tuple[list[float], ...]:
        responses = drawing.drawn(
            blocks,
            config,
            rows,
            context=48,
            leave=Fraction(0),
            num_tokens=24,
            stops=frozenset({1}),
            seed=0,
            tensor_rows=1,
            version=0,
        )
        return tuple(responses.ragged(column).values.tolist() for column in ("responses", "rollout"))

    before = maps()
    mapped = made()
    assert maps() == before
    monkeypatch.setattr(drawing, "platform_pages", GatheredPages)
    assert made() == mapped
