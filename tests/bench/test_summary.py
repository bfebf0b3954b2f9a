"""Claims of the benchmarks, the runner that collects them, and their page."""

import argparse
import json
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import pytest

from bench import __main__ as runner
from bench.claims import Claim, compared, judge, measured, options_for_claims
from bench.summary import claim_of, page


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    options_for_claims(parser)
    return parser.parse_args(words)


def record(claim: Claim, run: str = "codecs") -> dict[str, object]:
    return {"run": run, "date": "2026-11-23", "commit": "abc", "claim": {**asdict(claim), "load": 2.0}}


def test_a_ratio_is_taken_round_by_round_and_a_goal_may_be_a_lower_limit() -> None:
    claim = compared("step", [1.0, 2.0, 9.0], [2.0, 2.0, 6.0], 1.0, rival="torch 2")
    assert (claim.found, claim.low, claim.high) == (1.0, 0.75, 1.25)
    assert claim.is_met
    rate = measured("rate", [4.0, 6.0], 5.5, unit="GB/s", at_least=True)
    assert not rate.is_met
    assert (rate.found_words, rate.goal_words) == ("5 GB/s (4.5 - 5.5)", "at least 5.5 GB/s")


def test_claims_are_kept_and_wrong_numbers_fail_without_being_asked(tmp_path: Path) -> None:
    kept = tmp_path / "claims"
    good, bad = measured("good", [1.0], 2.0), measured("bad", [3.0], 2.0, bound="the loopback")
    assert judge([good, bad], parsed("--claims", str(kept))) == 0
    assert judge([bad], parsed("--check")) == 1
    assert judge([good], parsed("--check")) == 0
    assert judge([good], parsed(), wrong=["losses differ"]) == 1
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [line["name"] for line in lines] == ["good", "bad"]
    assert all(line["load"] >= 0 for line in lines)
    assert claim_of({"claim": lines[1]}) == bad


def test_the_page_has_a_row_for_each_claim_and_what_bounds_the_missed_ones() -> None:
    good = measured("good", [1.0], 2.0, rival="torch 2.13")
    bad = measured("bad", [3.0], 2.0, bound="the loopback")
    said = page([record(good), record(bad), record(measured("worse", [3.0], 2.0))])
    assert "| good | 1 | at most 2 | met | torch 2.13 | 2.0 | codecs | abc, 2026-11-23 |" in said
    assert "3 claims, 2 missed" in said
    assert said.endswith("- bad: the loopback\n- worse: not known yet\n")


def test_every_run_is_a_benchmark_and_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(find_spec(f"bench.{each.words.split()[0]}") is not None for each in runner.RUNS)
    assert len({each.name for each in runner.RUNS}) == len(runner.RUNS)
    assert runner.parse(["--only", "codecs,planner"]).names == ["codecs", "planner"]
    with pytest.raises(SystemExit):
        runner.parse(["--only", "codecs,codes"])
    assert "unknown: codes; benchmarks are one-rank, " in capsys.readouterr().err


def test_a_run_without_its_rights_is_skipped_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "is_root", lambda: False)
    results, found = tmp_path / "bench.jsonl", tmp_path / "summary.md"
    results.write_text(json.dumps(record(measured("old", [1.0], 2.0), run="lab")) + "\n")
    monkeypatch.setattr(sys, "argv", ["bench", "--only", "lab", "--results", str(results), "--page", str(found)])
    assert runner.main() == 0
    assert "== lab: skipped: it needs root, for network namespaces" in capsys.readouterr().out
    assert "| old | 1 |" in found.read_text()  # its rows stay


def test_a_run_renews_its_own_rows_and_says_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, found = tmp_path / "bench.jsonl", tmp_path / "summary.md"
    old = [record(measured("old", [1.0], 2.0)), record(measured("kept", [1.0], 2.0), run="planner")]
    results.write_text("".join(json.dumps(one) + "\n" for one in old))
    runs = runner.Run("codecs", "codecs --elements 65536 --rounds 2 --formats int8"), runner.Run("planner", "nothing")
    monkeypatch.setattr(runner, "RUNS", runs)
    monkeypatch.setattr(sys, "argv", ["bench", "--results", str(results), "--page", str(found)])
    assert runner.main() == 1  # there is no bench.nothing
    rows = [line.split(" | ")[0].removeprefix("| ") for line in found.read_text().splitlines() if "2026-" in line]
    assert rows == ["int8: encode and decode of bf16 on one core", "kept"]
