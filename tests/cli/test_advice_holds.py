"""Advice of an error, followed, is not refused next; lines where something asked for was not found."""

import json
import re
from pathlib import Path

import pytest

from terrace.cli.main import main
from terrace.plan.gaps import gaps_words
from terrace.report.run_view import run_view
from terrace.report.tables import utilisation
from terrace.train.prediction import resolved_run
from terrace.train.resolve import resolve
from tests.support.nightly import nightly
from tests.support.records import step_record, write_metrics
from tests.support.tiny_runs import MODEL, write_run

MIXTURE = {**MODEL, "model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1}


@pytest.mark.parametrize("ranks", [4, *nightly(2, 8)])
def test_islands_are_advised_where_they_can_be(ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(write_run(tmp_path, 2).parent / "config.json")
    words = ["simulate", "--model", model, "--cluster", "local", "--ranks", str(ranks)]
    for preset in ("co2", "diloco"):
        if main([*words, "--plan.outer", preset]) == 0:
            continue
        error = capsys.readouterr().err
        advice = re.search(r"as (.*) does$", error.strip())
        assert advice is not None, error
        assert main([*words, *advice[1].replace("NAME", preset).split()]) == 0, capsys.readouterr().err


def test_shares_that_are_not_found_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path, 2, 2, plan="zero3")
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    words = ["--plan.experts", "{node = {expert = 2}}", "--plan.expert_gaps", "auto"]
    run = resolve(str(path), {}, {"plan": {"experts": {"node": {"expert": 2}}, "expert_gaps": "auto"}})
    said = gaps_words(run.plan, resolved_run(run).plan)
    assert said.startswith('expert_gaps = "auto" takes none')
    assert main(["simulate", "--config", str(path), *words]) == 0
    assert said in " ".join(capsys.readouterr().out.split())
    assert main(["simulate", "--config", str(path), *words[:2]]) == 0
    assert "takes none" not in capsys.readouterr().out


def test_a_share_above_the_peak_has_the_same_words_everywhere(tmp_path: Path) -> None:
    assert utilisation(0.123) == "12.3 %"
    assert utilisation(71.44) == "7144.0 % (the peak is wrong)"
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text("[train]\nsteps = 9\nbatch = 8\n")
    write_metrics(folder, [step_record(step, mfu=1.5, hfu=0.5) for step in range(1, 10)])
    view = run_view(folder)
    assert ("150.0 % (the peak is wrong)", "MFU") in view.figures
    assert ("50.0 %", "HFU") in view.figures
    assert view.final["MFU"].words == "150.0 % (the peak is wrong)"
