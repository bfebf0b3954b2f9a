"""The best next change of a pipeline: the one that playing every candidate finds, with fewer plays."""

import pytest

from terrace.simulate import changes as room
from terrace.simulate.changes import best_changes, changes
from terrace.simulate.step import predict_step, resolved
from tests.simulate.test_step import step_of


@pytest.mark.parametrize(
    ("schedule", "batch", "recompute", "is_faster"),
    [
        ("1f1b", 16, ("layers.*",), True),  # played whole
        ("1f1b", 240, ("layers.*",), True),  # folded
        ("zbv", 16, (), False),  # it computes in less time than changes of placement could save
    ],
)
def test_the_best_changes_are_the_first_of_all(
    schedule: str, batch: int, recompute: tuple[str, ...], is_faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = resolved(step_of(batch, schedule, recompute=recompute))
    base = predict_step(step)
    played: list[float] = []
    predicted = room._predicted

    def counted(*numbers: object) -> object:
        found = predicted(*numbers)  # type: ignore[arg-type]
        played.append(found.step_s)
        return found

    monkeypatch.setattr(room, "_predicted", counted)
    found, num_best = best_changes(step, base), len(played)
    every = changes(step, base=base)
    assert found == sorted(
        (next(change for change in every if change.kind == kind) for kind in ("plan", "cluster")),
        key=lambda change: change.step_s,
    )
    if is_faster:
        assert num_best < 0.6 * (len(played) - num_best)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "zbv", "interleaved:2", "breadth-first:2", "zeropp:2"])
@pytest.mark.parametrize("unit", [1, 4])
def test_passes_alone_take_no_longer_than_the_step(schedule: str, unit: int) -> None:
    base = predict_step(resolved(step_of(16, schedule, unit=unit, recompute=("layers.*",))))
    assert 0.3 * base.step_s < room._least_s(base, base.step) <= base.step_s
