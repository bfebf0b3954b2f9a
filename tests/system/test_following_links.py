"""Formats of a pipeline's boundaries chosen anew in mid-run: the bits of the history, resumed and repeated."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from terrace.base.errors import PlanError, TrainingError
from terrace.cli.main import main
from terrace.cli.overrides import parse_overrides
from terrace.launch.start import World, launch_local
from terrace.train import follow_links, loop
from terrace.train.deals import Dealt, read_deals
from terrace.train.job import RunJob
from terrace.train.metrics import Silent
from terrace.train.prepare import prepare
from terrace.train.recorder import read_events
from terrace.train.resolve import resolve
from tests.support.dealt_runs import check_resumed_and_repeated
from tests.support.tiny_runs import write_run

FAST, SLOW = (1e9, 1e-5), (1e5, 1e-5)
PIPELINE = ("--plan.mapping.node.pipeline", "2", "--plan.schedule", "1f1b")
CODED = {"pipeline": ("int8",), "pipeline_backward": ("int8",)}


def _slowed(world: World, job: RunJob) -> None:
    """A run whose only boundary is found to be slow from the second look on."""
    looks, measure = [0], follow_links.measure_boundaries

    def found(engine: object) -> Sequence[tuple[float, float]]:
        looks[0] += 1
        (bandwidth, latency_s), *others = measure(engine)  # type: ignore[arg-type]
        assert bandwidth > 0
        assert latency_s >= 0
        assert not others
        return [FAST if looks[0] == 1 else SLOW]

    follow_links.measure_boundaries = found  # type: ignore[assignment]
    follow_links.steps_apart = lambda took_s, step_s: 0  # type: ignore[attr-defined]
    loop.train(world, job, Silent())


def _run(folder: Path, *more: str) -> Path:
    words = (*PIPELINE, "--train.slow_steps", "4", "--train.steps", "12", *more)
    path = write_run(folder, 1, 2, plan="ddp", checkpoint_every=2, keep_checkpoints=9, eval_every=4)
    config = resolve(str(path), {}, parse_overrides((*words, "--data.holdout", "8")))
    launch_local(2, _slowed, (prepare(config, folder / "whole", None),), say=lambda text: None)
    return folder / "whole"


def test_formats_chosen_in_mid_run_are_resumed_to_the_bit_and_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed before the formats hold, after step 8, so that the run repeats them from its record."""
    whole = _run(tmp_path, "--train.follow", "true")
    first, later = read_deals(whole)
    assert (first.step, first.formats) == (0, {"pipeline": ("fp32",), "pipeline_backward": ("fp32",)})
    assert (later.step, later.formats) == (8, CODED)
    (note,) = [event.text for event in read_events(whole)[0] if "boundary 0" in (event.text or "")]
    assert 'with wire.pipeline.node = "int8" and wire.pipeline_backward.node = "int8" a step takes' in str(note)
    assert str(note).endswith("from step 9 on")
    records = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [bool(each["quantisation_error"]) for each in records] == [False] * 8 + [True] * 4
    check_resumed_and_repeated(whole, 6)
    assert main(["replay", str(whole)]) == 2
    assert "has formats of messages between members, and one process sends none" in capsys.readouterr().err


def _disagreeing(world: World, job: RunJob) -> None:
    if world.rank == 1:
        job = replace(job, deals=(*job.deals[:-1], Dealt(step=9, formats=CODED)))
    with pytest.raises(TrainingError, match="rank 1 resumes with other deals than rank 0") as refused:
        loop.train(world, job, Silent())
    assert "\n" not in str(refused.value)


@pytest.mark.nightly
def test_a_rank_with_another_record_is_named_by_all(tmp_path: Path) -> None:
    whole = _run(tmp_path, "--train.follow", "true")
    for step in range(8, 13, 2):
        shutil.rmtree(whole / "checkpoints" / f"step-{step:08d}")
    config = resolve(str(whole / "config.toml"), {}, {})
    launch_local(2, _disagreeing, (prepare(config, None, whole),), say=lambda text: None)
    config = resolve(str(whole / "config.toml"), {}, parse_overrides(("--plan.compute", "bf16")))
    with pytest.raises(PlanError, match="the run has dealt these formats itself"):
        prepare(config, None, whole)


@pytest.mark.nightly
def test_without_the_key_a_line_says_what_other_formats_bring(tmp_path: Path) -> None:
    whole = _run(tmp_path)
    assert read_deals(whole) == ()
    notes = [event.text for event in read_events(whole)[0] if "boundary 0" in (event.text or "")]
    assert len(notes) == 1, "said once, not at every look"
    assert str(notes[0]).endswith("set train.follow = true, or resume with these")
