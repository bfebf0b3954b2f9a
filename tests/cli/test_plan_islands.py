"""`terrace plan --outer` and `--allow`: a plan that runs, the output, and refusals."""

import re

import pytest

from terrace.cli.main import main
from terrace.train.resolve import resolve
from tests.support.planning import Planning, here

__all__ = ["here"]

SLOW = ("--nodes", "2", "--cluster.tiers.system.bandwidth_bytes_per_s", "1e7")


def _step(out: str) -> str:
    found = re.search(r"the least whose mean step \(([\d.]+ \w+)\) is within", out)
    assert found is not None, out
    return found[1]


def test_a_plan_of_islands_is_written_and_is_the_step_that_simulate_plays(here: Planning) -> None:
    allowed = ("--allow", "outer=int4+feedback", "--allow", "outer.system=int8", "--allow", "reduce=int8")
    code, out, _ = here.say("plan", *SLOW, "--outer", "every<=200", *allowed, "--best", "2")
    assert code == 0
    said = " ".join(out.split())
    assert "--outer every<=200: islands exchange every " in said
    assert "local steps change what is learned: more of them, or a longer delay, is not the same training" in said
    assert re.search(r"held-out loss, measured nearest to it at 1.0 M .* int4\+feedback \+0.1 % more", said), said
    assert "the best plans of an island with the data" in said
    assert "none of them hides the link" not in said
    assert "allowed and used: outer (system: int4+feedback)" in said
    assert "allowed and not used: outer (package int4+feedback: " in said
    assert "system int8: not with so small a loop); reduce (package int8: coding takes longer than it saves, " in said
    run = resolve(None, {"plan": "plan.toml"}, {})
    assert run.plan.outer.has_islands
    assert 1 < run.plan.outer.delay <= run.plan.outer.every <= 200
    assert run.plan.wire == {"outer": {"system": "int4+feedback"}}
    assert (run.train.batch, run.cluster.world_size) == (16, 16)
    assert main(["simulate", "plan.toml"]) == 0
    assert f"step {_step(out)}" in " ".join(here.out().split())
    # The others play the same cycle, and say so.
    assert main(["plan", "--scale", "--plan", "plan.toml"]) == 0
    said = " ".join(here.out().split())
    assert re.search(rf"; islands exchange every {run.plan.outer.every} steps, .*: a step is its cycle's mean", said)
    assert f" {_step(out)} " in said
    assert "there is one island; leave outer out" in said
    assert main(["doctor", "--plan", "plan.toml"]) == 0
    assert re.search(
        rf"predicted step {_step(out)} \+-\d+ % in the mean of a cycle, of which ", " ".join(here.out().split())
    )


def test_a_synchronous_plan_on_a_slow_link_is_told_of_outer_loops(here: Planning) -> None:
    hint = "most of the step waits for tier system; with --outer"
    slow = here.say("plan", *SLOW, "--axes", "data", "--best", "1")
    assert (slow.code, hint in slow.out) == (0, True)
    fast = here.say("plan", "--nodes", "2", "--axes", "data", "--best", "1", "--force")
    assert (fast.code, hint in fast.out) == (0, False)


def test_formats_that_shorten_a_step_are_used_and_told(here: Planning) -> None:
    code, out, _ = here.say("plan", *SLOW, "--axes", "data", "--allow", "sync=int8", "--best", "2")
    assert code == 0
    said = " ".join(out.split())
    assert re.search(r"allowed and used: sync \(system: int8\); step [\d.]+ \w+, [\d.]+ \w+ without", said), said
    assert "allowed and not used: sync (package int8: " in said
    assert "rounded messages change what is learned held-out loss, measured at 1.0 M parameters between two" in said
    assert resolve(None, {"plan": "plan.toml"}, {}).plan.wire == {"sync": {"system": "int8"}}
    code, out, _ = here.say("plan", *SLOW, "--axes", "data", "--allow-rounding", "int8", "--best", "1", "--force")
    assert code == 0
    wire = resolve(None, {"plan": "plan.toml"}, {}).plan.wire
    assert wire
    assert {name for row in wire.values() for name in row.values()} == {"int8"}
    assert re.search(r"allowed and not used: gather, gather_backward, .*tensor, context", " ".join(out.split())), out
    assert all(len(line) <= 80 for line in out.splitlines() if "allowed" in line)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--outer", "delay<=5"], "does not bound every"),
        (["--outer", "every<=5", "--nodes", "1"], "has one member, so there is one island"),
        (["--outer", "every<=5", "--nodes", "3"], "--batch 16 does not divide over the 3 islands"),
        (["--outer", "every<=5", "--pin", "grads=system"], "every island keeps all states"),
        (["--allow", "outer=int8"], "all ranks are one island; give --outer"),
        (["--allow", "sync"], "write CLASS=FORMAT"),
        (["--allow-rounding", "int9"], "--allow-rounding int9: 'int9' is not a wire format; did you mean 'int8'"),
        (["--outer", "every<=5", "--cluster.device.memory_bytes", "1.2e9"], "no plan fits; the nearest of an island ("),
    ],
)
def test_bad_input_is_one_line(here: Planning, words: list[str], said: str) -> None:
    assert said in here.refused("plan", *words)


@pytest.mark.parametrize(
    ("batch", "words", "said"),
    [
        (
            60,
            ["--axes", "data"],
            "--batch 60 does not divide over the 32 ranks of the data axis: use --batch 32 or 64, or --axes all",
        ),
        (16, ["--axes", "data"], "use --batch 32, --nodes 2, or --axes all"),
        (8, ["--axes", "data"], "use --batch 32, or --axes all"),  # one node would be one island
        (
            60,
            ["--axes", "data,tensor"],
            "60 sequences of 256 tokens and 4 layers do not divide over 4 islands of 8 ranks by the data, tensor axes",
        ),
        (
            32,
            ["--pin", "data=3"],
            "with 32 sequences on 4 islands: data = 3 does not divide the 8 sequences of an island's step",
        ),
        (64, ["--pin", "data=16"], "data = 16 is more than the 8 ranks of an island"),
    ],
)
def test_errors_of_an_island_name_the_whole_batch(here: Planning, batch: int, words: list[str], said: str) -> None:
    assert said in here.refused("plan", "--nodes", "4", "--outer", "every<=9", *words, batch=batch)


def test_where_nothing_fits_with_a_delay_exchanges_are_waited_for(here: Planning) -> None:
    """Of a delayed exchange a rank keeps two slices more: 107 MB here, where the optimizer is whole on a device."""
    plan = ("plan", *SLOW, "--axes", "data", "--pin", "optimizer=device", "--best", "1", "--headroom", "0%")
    words = here.refused(*plan, "--outer", "every<=5,delay>=1", "--cluster.device.memory_bytes", "1e8")
    needed = re.search(r"the nearest of an island .*? needs ([\d.]+) GB of", words)
    assert needed is not None, words
    less = ("--cluster.device.memory_bytes", f"{float(needed[1]) * 1e9 - 5e7:.0f}")
    assert "no plan fits" in here.refused(*plan, *less, "--outer", "every<=5,delay>=1")
    code, out, _ = here.say(*plan, *less, "--outer", "every<=5")
    assert code == 0
    said = " ".join(out.split())
    assert "--outer every<=5 with delay=0, since no plan fits with a delay: islands exchange every " in said
    run = resolve(None, {"plan": "plan.toml"}, {})
    assert run.plan.outer.has_islands
    assert run.plan.outer.delay == 0


def test_a_link_that_no_loop_hides_is_told(here: Planning) -> None:
    code, out, _ = here.say("plan", *SLOW, "--outer", "every<=3", "--best", "1")
    assert code == 0
    assert "islands exchange every 3 steps" in out
    assert "none of them hides the link: allow more steps" in out
