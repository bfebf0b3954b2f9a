"""`terrace plan --scale` of a plan's file: the sequences per device that it was made for, and each reason once."""

import re

from tests.support.planning import Planning, here

__all__ = ["here"]


def rows(out: str, scaling: str) -> dict[int, list[str]]:
    """Cells of a curve's table by size."""
    found = re.findall(r"^ +(\d+ {2,}\d+ {2,}.*)$", out.split(f"{scaling} scaling")[1].split(" scaling")[0], re.M)
    return {int(line.split()[0]): re.split(r"\s{2,}", line.strip()) for line in found}


def test_more_nodes_keep_the_sequences_per_device_that_a_plan_was_made_for(here: Planning) -> None:
    words = ("--nodes", "3", "--axes", "data", "--pin", "micro_batch=2", "--pin", "unit=1")
    assert here.say("plan", *words, batch=96)[0] == 0
    made = here.call("plan", "--scale", "--plan", "plan.toml").out
    said = here.call("plan", "--scale", "--plan", "plan.toml", "--nodes", "8")
    assert said.code == 0
    assert "weak scaling: 4 sequences per device" in said.out
    weak, strong = rows(said.out, "weak"), rows(said.out, "strong")
    assert {size: cells[2] for size, cells in weak.items()} == {1: "32", 2: "64", 3: "96", 4: "128", 8: "256"}
    assert {cells[2] for cells in strong.values()} == {"96"}
    # At its own size both curves are the plan as it was found.
    assert weak[3][:5] == strong[3][:5]
    assert weak[3][3:5] == rows(made, "weak")[3][3:5]
    given = here.call("plan", "--scale", "--plan", "plan.toml", "--nodes", "8", "--batch", "96").out
    assert rows(given, "weak")[8][2] == "96"


def test_a_reason_is_told_once_for_all_sizes(here: Planning) -> None:
    assert here.say("plan", "--nodes", "8", "--axes", "data", "--pin", "params=system", batch=64)[0] == 0
    needed = rows(here.call("plan", "--scale", "--plan", "plan.toml").out, "weak")[2][-1].removesuffix(" GB")
    tight = ("--cluster.device.memory_bytes", f"{float(needed) - 0.005:g}e9", "--headroom", "0%")
    out = here.call("plan", "--scale", "--plan", "plan.toml", *tight).out
    for scaling in ("weak", "strong"):
        part = out.split(f"{scaling} scaling")[1].split("strong scaling")[0]
        missing = [size for size, cells in rows(out, scaling).items() if cells[3] == "-"]
        assert missing[:2] == [1, 2]
        assert part.count("too much") == 1
        assert f"not at system {', '.join(map(str, missing))}: needs" in part


def test_a_curve_fits_in_eighty_columns(here: Planning) -> None:
    assert here.say("plan", "--nodes", "3", "--axes", "data", "--pin", "micro_batch=2", batch=96)[0] == 0
    out = here.call(
        "plan", "--scale", "--plan", "plan.toml", "--nodes", "5", "--cluster.device.memory_bytes", "1.8e9"
    ).out
    assert "not a multiple" in out
    curves = out.split("weak scaling")[1]
    assert max(len(line.rstrip()) for line in curves.splitlines()) <= 80


def test_a_preset_gets_the_numbers_of_each_size(here: Planning) -> None:
    """A memory in which the numbers of the largest size do not fit at the smallest."""
    tight = ("--nodes", "8", "--plan", "zero3", "--cluster.device.memory_bytes", "1.73e9", "--headroom", "0%")
    out = here.say("plan", "--scale", *tight, batch=512).out
    for scaling in ("weak", "strong"):
        curve = rows(out, scaling)
        assert list(curve) == [1, 2, 4, 8]
        assert all("-" not in cells for cells in curve.values())
    part = out.split("strong scaling")[0]
    told = dict(re.findall(r"(micro-batch \d+[^;]*?) at system ([\d, ]+)", " ".join(part.split())))
    assert len(told) > 1, "sizes differ in their numbers"
    assert sorted(int(size) for at in told.values() for size in at.split(", ")) == [1, 2, 4, 8]
