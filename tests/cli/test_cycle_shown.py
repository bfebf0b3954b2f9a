"""`terrace simulate` of a plan with islands: the cycle, its mean step, and the delay that hides an exchange."""

import json
import re
from pathlib import Path

import pytest

from tests.support.command_line import CommandLine
from tests.support.tiny_runs import write_run

ISLANDS = ("--plan.grads", "node", "--plan.optimizer", "node", "--plan.outer.tier", "system")
SLOW = ("--cluster.tiers.system.bandwidth_bytes_per_s", "1e6", "--cluster.device.overlap_penalty", "0.0")


class Here(CommandLine):
    """A folder with a tiny run on two islands."""

    def say(self, *words: str) -> str:
        code, out, _ = self.call("simulate", "--config", "run.toml", *ISLANDS, *SLOW, *words)
        assert code == 0
        return " ".join(out.split())


@pytest.fixture
def here(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Here:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path, 2, 2, 2, plan="zero2")
    return Here(tmp_path, capsys)


def test_an_exchange_that_is_waited_for_is_hidden_as_advised(here: Here) -> None:
    out = here.say("--plan.outer.every", "20", "--plan.outer.fragments", "2")
    assert "islands exchange every 20 steps, 2 fragments, nesterov" in out
    rows = re.findall(r"([\d]+(?: to \d+)?) (nothing|fragment \d sent and waited for)", out)
    assert rows == [
        ("1 to 9", "nothing"),
        ("10", "fragment 0 sent and waited for"),
        ("11 to 19", "nothing"),
        ("20", "fragment 1 sent and waited for"),
    ]
    assert "is waited for at once; waited for: " in out
    assert "local steps change what is learned" in out
    assert re.search(r"The cycle of islands steps \|[.]+\| fragment 0 \| +[.]+ +\| fragment 1 \| +[.]+\|", out)
    assert ". waiting" in out
    assert "few exchanges in 6 steps (one exchange every 20): outer.momentum = 0.9 remembers 10 exchanges" in out
    advice = re.search(r"outer.delay = (\d+) hides it: step ([\d.]+ \w+), -", out)
    assert advice is not None
    page = here.folder / "page.html"
    late = here.say(
        *("--plan.outer.every", "20", "--plan.outer.fragments", "2", "--plan.outer.delay", advice[1]),
        *("--page", str(page)),
    )
    assert "; nothing is waited for" in late
    assert "hides it" not in late
    assert f"step {advice[2]}" in late
    text = page.read_text()
    assert f"the mean of a cycle is {advice[2]}" in text
    assert "<h2>The cycle of islands</h2>" in text
    assert "fragment 1: sent after step 20, " in text
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    assert text.count('<svg class="chart"') == len(data["charts"])


def test_a_cycle_too_short_for_its_exchange_is_made_longer(here: Here) -> None:
    out = here.say("--plan.outer.every", "1", "--plan.outer.delay", "1")
    advice = re.search(r"outer.delay = (\d+) with outer.every = (\d+) hides it", out)
    assert advice is not None
    assert 1 < int(advice[1]) <= int(advice[2])
