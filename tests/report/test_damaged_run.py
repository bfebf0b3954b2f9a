"""Damaged run folders: `terrace report` shows the sound parts of each, or refuses it in one line."""

import json
import math
import random
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from terrace.base.fitting import fitting
from terrace.cli.main import main
from terrace.report.plot import round_ticks
from terrace.train.recorder import RunEvent
from tests.support.nightly import nightly
from tests.support.pages import checked
from tests.support.tiny_runs import terrace, write_run

# Cases of every file. The report reads neither tensors nor report.json, and of a manifest only that it is there.
FILES = {
    "config.toml": 12,
    "metrics.jsonl": 30,
    "events.jsonl": 20,
    "prediction.json": 20,
    "profile/step-2-rank-0.json": 12,
    "report.json": 3,
    "checkpoints/step-00000004/manifest.json": 2,
}
# Of another type, or beyond what a float, a date or a screen takes. json.dumps writes NaN and Infinity.
STRANGE: tuple[Any, ...] = (
    None, True, "x", "", "\ud800<b>\x00", [], [1], {}, {"a": {}}, 0, -1, 0.0, -0.0, 5e-324, 1e-200, 1e20, -1e20, 1e308,
    -1e308, float("nan"), float("inf"), -float("inf"), 10**30, 10**400, -(10**400), 2**63,
)  # fmt: skip
BRACKETS = b"[" * 100_000


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of two ranks with measured constants and a trace; small enough to copy often."""
    folder = tmp_path_factory.mktemp("sound")
    write_run(folder, 2, steps=4, checkpoint_every=2, profile="2-2")
    done = terrace("train", "--config", "run.toml", "--folder", "run", cwd=folder)
    assert done.returncode == 0, done.stderr
    for part in (folder / "run").rglob("*"):
        if part.suffix == ".safetensors":
            part.write_bytes(b"")
    return folder / "run"


def _paths(table: object, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield before
    pairs = table.items() if isinstance(table, dict) else enumerate(table) if isinstance(table, list) else ()
    for key, value in pairs:
        yield from _paths(value, (*before, key))


def _changed(table: Any, draw: random.Random) -> Any:
    # A value at a random path is replaced, or its key is deleted.
    path = draw.choice(list(_paths(table)))
    if not path:
        return draw.choice(STRANGE)
    inner = table
    for key in path[:-1]:
        inner = inner[key]
    if draw.random() < 0.25:
        del inner[path[-1]]
    else:
        inner[path[-1]] = draw.choice(STRANGE)
    return table


def _table(text: str | bytes) -> Any:
    # Without the checksum, which would give away the values to come.
    table = json.loads(text)
    table.pop("crc32", None)
    return table


def _wrong_value(name: str, raw: bytes, draw: random.Random) -> bytes:
    if name.endswith(".toml"):
        table = _changed(tomllib.loads(raw.decode()), draw)
        try:
            return tomli_w.dumps(table).encode(errors="replace")
        except (TypeError, AttributeError):  # TOML has no null
            return b"x = "
    if name.endswith(".jsonl"):
        lines = raw.splitlines()
        at, same = draw.randrange(len(lines)), draw.choice(STRANGE)
        key = draw.choice(sorted(_table(lines[at])))
        if draw.random() < 0.5:
            # The same in every line: no sound one hides the fault.
            lines = [json.dumps(_table(line) | {key: same}).encode() for line in lines]
        else:
            lines[at] = json.dumps(_changed(_table(lines[at]), draw)).encode()
        return b"\n".join(lines) + b"\n"
    return json.dumps(_changed(_table(raw), draw)).encode()


def _flipped(name: str, raw: bytes, draw: random.Random) -> bytes:
    found = bytearray(raw)
    for _ in range(draw.choice((1, 1, 8))):
        found[draw.randrange(len(found))] ^= 1 << draw.randrange(8)
    return bytes(found)


def _cut(name: str, raw: bytes, draw: random.Random) -> bytes:
    return raw[: draw.randrange(len(raw))]


def _bracketed(name: str, raw: bytes, draw: random.Random) -> bytes:
    return draw.choice((BRACKETS, BRACKETS + b"\n" + raw, raw + BRACKETS))


DAMAGES: tuple[Callable[[str, bytes, random.Random], bytes | None], ...] = (
    *(_wrong_value,) * 7, _flipped, _cut, _bracketed, lambda *_: None,
)  # fmt: skip


@pytest.mark.parametrize("rest", [False, *nightly(True)])
@pytest.mark.parametrize("name", FILES)
def test_no_damage_of_a_file_ends_in_a_traceback(
    ran: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, rest: bool
) -> None:
    run = tmp_path / "run"
    shutil.copytree(ran, run)
    sound = (ran / name).read_bytes()
    for number in (number for number in range(FILES[name]) if (number % 3 != 0) == rest):
        draw = random.Random(f"{name} {number}")
        raw = draw.choice(DAMAGES)(name, sound, draw)
        (run / name).unlink(missing_ok=True)
        if raw is not None:
            (run / name).write_bytes(raw)
        try:
            code = main(["report", str(run)])
        except Exception as error:
            raise AssertionError(f"case {number} of {name}: {raw!r:.2000}") from error
        said = capsys.readouterr()
        # Files of a run are left, so there is something to show.
        others = [line for line in said.err.splitlines() if "config.toml is not as it was written" not in line]
        assert (code, others) == (0, []), f"case {number} of {name}: {said.err}"
        checked((run / "report.html").read_text(encoding="utf-8"))


def _page(run: Path) -> str:
    assert main(["report", str(run)]) == 0
    return (run / "report.html").read_text(encoding="utf-8")


def _losses(page: str) -> list[int]:
    # Steps of the first curve.
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    return [step for step, _ in data["curves"][0]["lines"]["loss"]]


@pytest.mark.parametrize("damage", [b"[" * 100_000, b"\xff\x00", b'{"step": 2}', b"", b'"', b"null", b"1e999"])
def test_a_damaged_line_hides_no_other(ran: Path, tmp_path: Path, damage: bytes) -> None:
    run = tmp_path / "run"
    shutil.copytree(ran, run)
    sound = _page(run)
    assert _losses(sound) == [1, 2, 3, 4]
    for name, mark in (("metrics.jsonl", b'"step": 2,'), ("events.jsonl", b'"event": "saved"')):
        lines = (run / name).read_bytes().splitlines()
        lines[next(number for number, line in enumerate(lines) if mark in line)] = damage
        (run / name).write_bytes(b"\n".join(lines) + b"\n")
    page = _page(run)
    assert _losses(page) == [1, 3, 4]
    assert page.count("saved after step") == sound.count("saved after step") - 1 > 0
    assert "Finished after 4 steps" in page


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("events.jsonl", "time", 1e20),
        ("events.jsonl", "time", float("nan")),
        ("events.jsonl", "first_step", "x"),
        ("events.jsonl", "final_loss", "x"),
        ("metrics.jsonl", "time", 1e20),
        ("metrics.jsonl", "step_s", 0.0),
        ("metrics.jsonl", "loss", float("inf")),
        ("metrics.jsonl", "grad_norm", float("nan")),
    ],
)
def test_a_value_of_no_use_costs_itself_alone(ran: Path, tmp_path: Path, name: str, key: str, value: object) -> None:
    run = tmp_path / "run"
    shutil.copytree(ran, run)
    lines = [_table(line) for line in (run / name).read_text().splitlines()]
    (run / name).write_text("".join(json.dumps(line | {key: value}) + "\n" for line in lines))
    page = _page(run)
    assert "Finished after 4 steps" in page
    assert page.count("saved after step") == _page(ran).count("saved after step") > 0
    assert "Throughput" in page


def test_a_prediction_on_a_damaged_cluster_is_named(ran: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(ran, run)
    table = _table((run / "prediction.json").read_text())
    for cluster in (3, {}, {"tiers": [3]}, table["cluster"] | {"name": 10**400}):
        (run / "prediction.json").write_text(json.dumps(table | {"cluster": cluster, "is_measured": True}))
        assert "prediction.json is damaged" in _page(run)
    renamed = table["cluster"] | {"tiers": [tier | {"name": f"x{tier['name']}"} for tier in table["cluster"]["tiers"]]}
    (run / "prediction.json").write_text(json.dumps(table | {"cluster": renamed, "is_measured": True}))
    assert "the plan&#x27;s table: no tier" in _page(run)


@pytest.mark.parametrize("low", [-1e100, 0.0, 5e-324, 1e17, 1e100])
def test_ticks_end_where_a_span_is_below_the_rounding_of_its_numbers(low: float) -> None:
    high = math.nextafter(math.nextafter(low, math.inf), math.inf)
    assert len(round_ticks(low, high)) <= 11


def test_a_value_fits_its_type_or_is_refused() -> None:
    # With a loss: from Python 3.13 on, values with NaN are not equal to their like.
    sound = {"event": "saved", "time": 5, "step": 3, "final_loss": 1.5, "of_a_newer_version": []}
    assert fitting(RunEvent, sound) == RunEvent(event="saved", time=5, step=3, final_loss=1.5)
    for key, value in (("time", math.nan), ("time", 10**400), ("step", 3.0), ("step", True), ("event", None)):
        with pytest.raises(ValueError, match=f"{key} = .* does not fit"):
            fitting(RunEvent, sound | {key: value})
    assert math.isnan(fitting(RunEvent, sound | {"final_loss": math.nan}).final_loss or 0.0)
    assert fitting(RunEvent, sound | {"step": "x"}, skip=True).step is None
    with pytest.raises(ValueError, match="event"):
        fitting(RunEvent, sound | {"event": 3}, skip=True)
