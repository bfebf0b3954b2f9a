"""What the benchmark of projected updates makes of its runs."""

import pytest

from bench.projected_learning import FULL, Found, claims_of


def found(variant: str, seed: int, losses: list[float], step_s: float) -> Found:
    return Found(variant, seed, "", losses[-1], 0.0, losses, 0, step_s)


def test_losses_are_compared_at_equal_steps_and_at_equal_time() -> None:
    falling = [float(20 - step) for step in range(10)]
    runs = [found(FULL, 0, falling, 1.0), found("lsp", 0, falling, 1.25), found("lora", 0, [12.0] * 10, 0.5)]
    claims = {claim.name: claim.found for claim in claims_of({(run.variant, run.seed): run for run in runs}, [0])}
    # After ten seconds a method whose steps take 1.25 s has made eight.
    assert claims == {
        "rise of the loss, lsp, equal steps, mean over 1 seeds": 0.0,
        "rise of the loss, lsp, equal simulated time, mean over 1 seeds": pytest.approx(13 / 11 - 1),
        "rise of the loss, lora, equal steps, mean over 1 seeds": pytest.approx(12 / 11 - 1),
    }
