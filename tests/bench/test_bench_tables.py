"""The benchmark of tables at its smallest sizes."""

from pathlib import Path
from typing import Any

import pytest

from bench import tables_limit
from bench.tables import WAYS, lines_of, measure, parse
from terrace.launch.start import LocalPool, World


@pytest.mark.timeout(60)
def test_both_ways_are_measured(pool: LocalPool) -> None:
    vocab, hidden, sizes = 64, 32, ["--layers", "1", "--sequence", "8", "--batch", "1", "--steps", "2"]
    options = parse(["--vocab", str(vocab), "--hidden", str(hidden), *sizes])
    for found in pool.run(2, measure, options, timeout_s=60.0):
        whole, spread = (found[way] for way in WAYS)
        # AdamW in fp32: parameters, gradient and two moments on one rank; half of them on two, and no gradient buffer.
        assert whole["state_bytes"] - spread["state_bytes"] == vocab * hidden * (16 - 6)
        looked_up = {"route", "dispatch", "combine"}
        assert not looked_up & whole["sent_bytes"].keys()
        assert all(spread["sent_bytes"][name] > 0 for name in looked_up)
        assert min(whole["step_s"], spread["step_s"]) > 0
        assert lines_of(found)[0] == "| | whole | spread |"


@pytest.mark.timeout(60)
def test_rows_on_a_disk_have_the_bytes_of_their_formula(pool: LocalPool, tmp_path: Path) -> None:
    words = ["--rows", "20000", "--batch", "64", "--steps", "2", "--folder", str(tmp_path)]
    (found,) = pool.run(1, limited, words, timeout_s=60.0)
    for row in found["rows"]:
        assert row["moved"] == pytest.approx(found["predicted_bytes"], rel=0.1)
        assert row["time_s"]["wait row_read"] > 0
    assert found["resting_bytes"] == 4096 * 4000
    assert "anonymous memory" in tables_limit.lines_of(found)[1]


def limited(world: World, words: list[str]) -> dict[str, Any]:
    return tables_limit.measure(tables_limit.options_of(words))
