"""A run with a pipeline of two processes: its output at the start, and the figures of every stage at the end."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import tomli_w

from terrace.train.metrics import own_seconds
from tests.support.tiny_runs import metrics, terrace, write_run


@pytest.mark.timeout(300)
def test_a_run_compares_every_stage(tmp_path: Path) -> None:
    config = write_run(tmp_path, 1, 2)
    table = tomllib.loads(config.read_text())
    table["plan"] |= {"preset": "ddp", "mapping": {"node": {"pipeline": 2}}, "schedule": "zb-h1"}
    config.write_text(tomli_w.dumps(table))
    done = terrace("train", "--config", config, "--folder", tmp_path / "run", "--verbose", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    before, after = done.stdout.split("predicted step:")
    assert "embedding, layers.0" in before
    assert "a copy of embedding" in before
    assert "together exactly the model's" in before
    assert re.search(r"node \S+ \S+ after \S+ \S+$", before, re.M)  # measured, though only stages talk over it
    assert re.search(r"package \S+ \S+ after \S+ \S+ \(by its file\)", before)  # nobody talks inside it
    assert "rank 0, of stage 0" in after
    assert len(re.findall(r"^ +[01] .* yes *$", after, re.M)) == 2
    assert "bytes equal on every stage" in after
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert len(report["stages"]) == 2
    assert report["stages"][0]["measured"] == report["measured"]
    for stage in report["stages"]:
        assert stage["predicted"]["sent_bytes"] == stage["measured"]["sent_bytes"]
        predicted, measured = (stage[side]["memory_bytes"] for side in ("predicted", "measured"))
        assert {name: size for name, size in predicted.items() if size} == {
            name: size for name, size in measured.items() if size
        }
    first, last = (stage["measured"] for stage in report["stages"])
    assert first["sent_bytes"]["tie.node"] == last["sent_bytes"]["tie.node"] > 0
    assert first["time_s"] != last["time_s"]  # of two ranks, not of one twice
    own = [own_seconds(stage["measured"]["time_s"]) for stage in report["stages"]]
    slowest = report["slowest"]
    assert (slowest["rank"], slowest["stage"]) == (own.index(max(own)),) * 2  # of two ranks, one a stage
    assert slowest["measured_s"] == report["stages"][slowest["stage"]]["measured"]["time_s"]
    assert f"rank {slowest['rank']}" in re.search(r"^.* has most work of its own.*$", after, re.M)[0]  # type: ignore[index]
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
