"""A simulated plan that does not fit its device: a line says so, with the figures of `terrace plan --scale`."""

import re

import pytest

from terrace.cli.simulate import VIEWS
from tests.support.nightly import nightly
from tests.support.planning import Planning, here

__all__ = ["here"]


def _lacks(text: str) -> list[str]:
    """Figures of each statement that a plan needs more than it may take."""
    return re.findall(
        r"needs (\S+ GB) of \S+ GB(?: \([^)]*\))?, \S+ GB too much; most are \w+ \S+ GB", " ".join(text.split())
    )


@pytest.mark.parametrize(
    "pins",
    [*nightly((("--axes", "data"),)), ("--axes", "data,pipeline", "--pin", "pipeline=2", "--pin", "schedule=1f1b")],
)
def test_a_plan_that_does_not_fit_says_so_before_its_advice(pins: tuple[str, ...], here: Planning) -> None:
    assert here.say("plan", "--nodes", "2", *pins, "--pin", "micro_batch=2", batch=64)[0] == 0
    assert "does not fit" not in here.call("simulate", "plan.toml", "--page", "p.html").out
    (fits,) = re.findall(r"^ +2 +16 +64 .* (\S+) GB$", here.call("plan", "--scale", "--plan", "plan.toml").out, re.M)[
        :1
    ]
    # Too little for the plan, and enough for its model state.
    tight = ("--cluster.device.memory_bytes", f"{float(fits) - 0.05:.4g}e9", "--cluster.device.headroom", "0%")
    said = here.call("simulate", "plan.toml", *tight, "--page", "p.html", "--force")
    assert said.code == 0
    assert said.out.count("This plan does not fit") == 1
    assert said.out.index("This plan does not fit") < said.out.index("Best next change")
    (needed,) = _lacks(said.out)
    assert float(needed.split()[0]) == pytest.approx(float(fits), abs=0.006)
    assert ("on stage" in said.out.split("does not fit")[1].split(":")[0]) == ("pipeline=2" in pins)
    assert "This plan does not fit" in (here.folder / "p.html").read_text(encoding="utf-8")
    for view in VIEWS:
        assert here.call("simulate", "plan.toml", *tight, "--view", view).out.count("This plan does not fit") == 1
