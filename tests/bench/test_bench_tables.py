"""The benchmark of tables at its smallest sizes."""

import pytest

from bench.tables import WAYS, lines_of, measure, parse
from terrace.launch.start import LocalPool


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
