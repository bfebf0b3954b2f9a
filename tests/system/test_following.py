"""Shares dealt anew in mid-run: the steps of one process, resumed to the bit, replayed to the same figures."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from terrace.cli.main import main
from terrace.cli.overrides import parse_overrides
from terrace.cluster.cluster import Cluster
from terrace.launch.start import LocalPool, World, launch_local
from terrace.train import loop
from terrace.train.deals import read_deals
from terrace.train.follow import Following
from terrace.train.job import RunJob
from terrace.train.metrics import Silent
from terrace.train.prepare import prepare
from terrace.train.recorder import read_events
from terrace.train.resolve import resolve
from tests.support.dealt_runs import check_resumed_and_repeated
from tests.support.member_cases import FOUR, INSIDE, PAIRS, SGD, alone, case_of, rows_of
from tests.support.nightly import nightly
from tests.support.parity import ADAMW, TOLERANCE, Case, Outcome, engine_of, gathered, run
from tests.support.shares import own_rows
from tests.support.tiny_runs import terrace, write_run
from tests.support.toys import MODELS


def _dealing(world: World, cluster: Cluster, cases: Sequence[Case]) -> list[Outcome]:
    """Each case with its shares in reverse from the second step on."""
    found = []
    for case in cases:
        blocks = MODELS[case.model].blocks(torch.float64)
        engine, results = engine_of(world, cluster, case, blocks), []
        for step in range(case.num_steps):
            shares = case.plan.shares[:: 1 if step == 0 else -1]
            if shares != engine.program.plan.shares:
                engine.deal(shares)
            dealt = replace(case, plan=replace(case.plan, shares=shares))
            results.append(engine.step(own_rows(engine, dealt, step), case.optimizer.lr))
        engine.check_bytes()
        parameters = gathered(engine, blocks)
        engine.close()
        found.append(Outcome([each.loss for each in results], [each.grad_norm for each in results], parameters))
    return found


CASES: dict[str, Case] = {
    "ddp": case_of(FOUR, "ddp", [1, 2, 1, 4], ADAMW),
    "zero1": case_of(PAIRS, "zero1", [1, 4], SGD, micro_batch=2),
    "zero2 inside": case_of(PAIRS, "zero2", [5, 1], ADAMW, grads="package"),
    "zero3 inside": case_of(PAIRS, "zero3", [1, 5], ADAMW, **INSIDE),
}


@pytest.mark.parametrize("name", ["zero3 inside", *nightly(*(set(CASES) - {"zero3 inside"}))])
def test_shares_dealt_between_two_steps_train_as_one_process(pool: LocalPool, name: str) -> None:
    case = CASES[name]
    cluster = FOUR if len(case.plan.shares) == 4 else PAIRS
    (outcomes,) = run(pool, cluster, [case], _dealing)
    expected, norms, parameters = alone("llama tied", rows_of(cluster, case.plan), case.optimizer.name)
    for outcome in outcomes:
        assert outcome.losses == pytest.approx(expected, abs=TOLERANCE)
        assert outcome.norms == pytest.approx(norms, abs=TOLERANCE)
        assert outcome.parameters.sub(parameters).abs().max() < TOLERANCE


def _measured(world: World, job: RunJob) -> None:
    """A run whose ranks find at their first look that the second member has become slow."""

    def found(self: Following, measured_s: Sequence[float]) -> Mapping[str, Any] | None:
        assert len(measured_s) == 2
        assert min(measured_s) > 0
        plan = self._rank.engine.program.plan
        return {"speeds": [1.0, 0.3], "shares": [6, 2], "now_s": 2.0, "dealt_s": 1.5} if plan.shares[0] == 4 else None

    Following._found = found  # type: ignore[method-assign,assignment]
    loop.train(world, job, Silent())


def _dealt_run(folder: Path, *more: str) -> Path:
    words = ("--plan.shares", "[4, 4]", "--train.slow_steps", "4", "--train.steps", "12", *more)
    path = write_run(folder, 1, 2, plan="ddp", checkpoint_every=2, keep_checkpoints=9, eval_every=4)
    config = resolve(str(path), {}, parse_overrides((*words, "--data.holdout", "8")))
    launch_local(2, _measured, (prepare(config, folder / "whole", None),), say=lambda text: None)
    return folder / "whole"


@pytest.mark.parametrize("killed", [6, *nightly(10)])
def test_a_run_that_dealt_anew_is_resumed_to_the_bit_and_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], killed: int
) -> None:
    """Killed before its deal holds, or after; the look is after step 4, and batches of three more steps are made."""
    whole = _dealt_run(tmp_path, "--train.follow", "true")
    assert [(each.step, each.shares) for each in read_deals(whole)] == [(0, (4, 4)), (7, (6, 2))]
    notes = [event.text for event in read_events(whole)[0] if "shares = " in (event.text or "")]
    assert notes == [
        "member 1 computes at 0.30 times the speed that shares were dealt for, member 0 at 1.00 times; with shares = "
        "[6, 2], from step 8 on, a step takes 1.50 s, and 2.00 s with [4, 4] (predicted)"
    ]
    check_resumed_and_repeated(whole, killed)
    # The whole run in one process, in fp32: a loss and a norm of each step, and checkpoints after every second.
    assert main(["replay", str(whole)]) == 0
    assert "2 deals are those of the run: 30 figures and checkpoints differ by at most" in capsys.readouterr().out


@pytest.mark.nightly
def test_without_the_key_a_line_says_what_dealing_anew_brings(tmp_path: Path) -> None:
    whole = _dealt_run(tmp_path)
    assert read_deals(whole) == ()
    notes = [event.text for event in read_events(whole)[0] if "shares = " in (event.text or "")]
    assert len(notes) == 1, "said once, not at every look"
    assert 'resume with --plan.shares "[6, 2]"' in str(notes[0])
    done = terrace("train", "--resume", whole, "--train.steps", "14", "--plan.shares", "[6, 2]", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (whole / "deals.jsonl").read_text().splitlines()]
    assert [(each["step"], each["shares"]) for each in lines] == [(0, [4, 4]), (12, [6, 2])]
