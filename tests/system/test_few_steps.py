"""Predictions of a short run are not judged, in any of the places that tell of them."""

import json
import re
from pathlib import Path

from terrace.report.run_view import run_view
from tests.support.tiny_runs import terrace, write_run


def test_a_short_run_is_no_verdict_on_its_prediction(tmp_path: Path) -> None:
    write_run(tmp_path, 1, steps=4, batch=2)
    done = terrace("train", "--config", "run.toml", "--folder", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    why_not = report["no_verdict"]
    assert report["num_timed"] == 3
    assert why_not.startswith("3 of at least 10 timed steps")
    said = done.stdout.replace("\n", " ")
    assert re.search(rf"predicted step time [+-]\d+ %; no verdict on its limit of 20 %: {re.escape(why_not)}", said)
    assert not re.search(r"predicted step time [^;]*(within|OUTSIDE)|most is missed", said)
    assert "predicted model state +0 %, within its limit of 10 %" in said, "memory is counted, not timed"
    finished = json.loads((tmp_path / "run" / "events.jsonl").read_text().splitlines()[-1])
    assert (finished["event"], finished["no_verdict"]) == ("finished", why_not)
    assert any(f"no verdict: {why_not})" in note for note in run_view(tmp_path / "run", draws=False).notes)
