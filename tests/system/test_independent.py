"""Random plans against an independent reference: transformers and torch alone, in fp64 (tests/support/independent.py).

Axes, placements, schedules, models and optimizers are drawn by a number (tests/support/random_plans.py), mixtures of
experts with their own divisions, chunks, gates and losses (tests/support/random_mixtures.py).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import count
from pathlib import Path

import pytest
import torch

from terrace.launch.start import LocalPool, World
from terrace.model.decoder import token_loss
from tests.support.comparisons import TOLERANCE, Drawn, compare_plan, compare_run, model_of, until
from tests.support.independent import Reference
from tests.support.random_mixtures import FAMILIES as MIXTURES
from tests.support.random_mixtures import GATES, draw_mixture, draw_mixture_run, mixture_kinds
from tests.support.random_plans import FAMILIES, MOST_IMPORTING, PRESETS, SCHEDULES, Case, draw
from tests.support.random_runs import RATES, WAYS, Run, draw_run

NUM_PLANS, NUM_RUNS = 64, 16
NUM_MIXTURES, NUM_MIXTURE_RUNS = 64, 12
TWO_DATA_RANKS = 35  # a draw: packed documents, AdamW
SHORT = (40, 42)  # tensor rows, a ring with a pipeline: a second each; two data ranks have faults below
SHORT_MIXTURES = (8, 13)  # groups of experts in chunks; noise beside tensor rows and stages

OF_PLANS = (
    *("data", "rows", "columns", "depth", "ulysses", "ring", "pipeline"),
    *(f"preset {name}" for name in PRESETS),
    *(f"schedule {name.partition(':')[0]}" for name in SCHEDULES),
    *(f"family {name}" for name in FAMILIES),
    *(f"optimizer {name}" for name in ("adamw", "lion", "muon")),
    *(f"{size} ranks" for size in (2, 4, 8)),
    *("blocks of transformers", "uneven stages", "recomputed", "prefetched", "accumulated", "units", "packed"),
    *("secondary copy", "frozen", "tied", "biases", "grouped heads", "window", "rope linear", "rope llama3"),
)

OF_RUNS = (
    *(f"documents {way}" for way in WAYS),
    *(f"rate {name}" for name in RATES),
    *("data", "ulysses", "ring", "pipeline", "balance cost", "optimizer adamw", "optimizer lion", "optimizer muon"),
)

OF_MIXTURES = (
    *(f"family {name}" for name in MIXTURES),
    *(f"gate {name}" for name in GATES),
    *("experts here", "experts spread", "expert ranks", "rows of experts", "experts on several tiers"),
    *("copies of experts", "chunks", "other chunks in a backward", "formats of rows", "groups of experts"),
    *("shared expert", "dense layers", "all experts", "one expert", "frozen experts", "weights divided"),
    *("data", "rows", "ring", "ulysses", "pipeline", "units", "recomputed", "packed", "optimizer muon"),
    *("2 ranks", "4 ranks", "8 ranks"),
)
OF_MIXTURE_RUNS = ("z", "experts spread", "documents join", "documents separate")

# How a case is drawn, how many are compared, and the choices that must be among them.
PLANS: dict[str, tuple[Callable[[int], Case], int, tuple[str, ...]]] = {
    "draw": (draw, NUM_PLANS, OF_PLANS),
    "draw_mixture": (draw_mixture, NUM_MIXTURES, OF_MIXTURES),
}
RUNS: dict[str, tuple[Callable[[int], Run], int, tuple[str, ...]]] = {
    "draw_run": (draw_run, NUM_RUNS, OF_RUNS),
    "draw_mixture_run": (draw_mixture_run, NUM_MIXTURE_RUNS, OF_MIXTURE_RUNS),
}


def kinds_of(case: Case) -> set[str]:
    """The choices in a case, those of its experts too."""
    return case.kinds() | (mixture_kinds(case) if case.has_experts else set())


def load_transformers(world: World) -> None:
    """Imports all families on every rank at once, before the time of the first plan runs."""
    for family in FAMILIES:
        import_module(f"transformers.models.{family}.modeling_{family}")


def test_plans_equal_transformers(pool: LocalPool, tmp_path: Path) -> None:
    """Some draws; `test_random_plans_equal_the_reference` has the others."""
    for seed in SHORT:
        found = compare_plan(pool, draw(seed), tmp_path / str(seed))
        assert not found.refused
        assert found.largest < TOLERANCE, found


@pytest.mark.parametrize("seed", SHORT_MIXTURES)
def test_mixtures_equal_plain_loops(pool: LocalPool, tmp_path: Path, seed: int) -> None:
    """Some draws; `test_random_plans_equal_the_reference` has the others."""
    found = compare_plan(pool, draw_mixture(seed), tmp_path)
    assert not found.refused
    assert found.largest < TOLERANCE, found


def test_a_trainer_that_cannot_balance_by_cost_says_so(pool: LocalPool, tmp_path: Path) -> None:
    case = draw(TWO_DATA_RANKS)
    found = compare_plan(pool, replace(case, plan={**case.plan, "balance": "cost"}), tmp_path)
    assert "train with terrace train" in found.refused


def test_the_comparison_sees_a_difference(pool: LocalPool, tmp_path: Path) -> None:
    case = draw(TWO_DATA_RANKS)
    beta2 = case.optimizer["beta2"] + 1e-6
    found = compare_plan(pool, case, tmp_path, replace(case, optimizer={**case.optimizer, "beta2": beta2}))
    assert found.differences["parameters"] > TOLERANCE
    assert found.differences["ranks"] < TOLERANCE


def test_the_reference_steps_as_torch() -> None:
    case = next(case for case in map(draw, count()) if case.optimizer["name"] == "adamw" and case.optimizer["clip"])
    reference, model = Reference(model_of(case), {**case.optimizer, "lr": case.lrs[0]}), model_of(case)
    values = [value for value in model.parameters() if value.requires_grad]
    groups = [
        {"params": [value for value in values if value.ndim > 1], "weight_decay": case.optimizer["weight_decay"]},
        {"params": [value for value in values if value.ndim == 1], "weight_decay": 0.0},
    ]
    betas = (case.optimizer["beta1"], case.optimizer["beta2"])
    optimizer = torch.optim.AdamW(groups, betas=betas, eps=case.optimizer["eps"])
    for batch, lr in zip(case.batches(), case.lrs, strict=True):
        documents = batch.documents()
        wanted = reference.step(documents, lr)
        losses = [token_loss(model(tokens[None]).logits, labels[None]) for tokens, labels in documents]
        loss = torch.stack(losses).sum() / sum(int((labels >= 0).sum()) for _, labels in documents)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        norm = torch.nn.utils.clip_grad_norm_(values, case.optimizer["clip"])
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        assert (wanted.loss, wanted.grad_norm) == pytest.approx((float(loss.detach()), float(norm)), rel=1e-12)
    for one, other in zip(reference.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.nightly
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", PLANS)
def test_random_plans_equal_the_reference(pool: LocalPool, tmp_path: Path, name: str) -> None:
    drawn, number, wanted = PLANS[name]
    pool.run(MOST_IMPORTING, load_transformers, timeout_s=600.0)
    draws = (
        Drawn(f"{name}({seed})", kinds_of(case), partial(compare_plan, pool, case, tmp_path / str(seed)))
        for seed, case in enumerate(map(drawn, count()))
    )
    assert not {*wanted} - until(number, draws).keys()


@pytest.mark.nightly
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", RUNS)
def test_random_runs_equal_the_reference(
    pool: LocalPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    drawn, number, wanted = RUNS[name]
    draws = (
        Drawn(
            f"{name}({seed})",
            run.kinds() | kinds_of(run.case),
            partial(compare_run, pool, run, tmp_path / str(seed), monkeypatch, capsys),
        )
        for seed, run in enumerate(map(drawn, count()))
    )
    assert not {*wanted} - until(number, draws).keys()
