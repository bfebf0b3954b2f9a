"""Error of the predicted steps of outer loops on the slow link, when the model knows only a probe of it.

    python -m bench.slow.predictions [--settings diloco topk] [--seconds 40] [--check]

probes the rehearsal cluster `lab`, with its outermost link as slow as in `bench.slow`, and runs each plan on it with
the probed cluster file, whose step `terrace train` predicts before it starts. Every finished run is appended to the
results file as one line of JSON; a second call runs those that are missing or have changed settings, and writes the
page. Needs root, for network namespaces.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.claims import Claim, judge, measured, options_for_claims, read
from bench.keys import key_of
from bench.lab.launch import is_root
from bench.lab.launches import machine
from bench.lab.links import PRESET, overrides
from bench.local_predictions import MODEL, terrace, train_words
from bench.slow.contestants import JOB, LINK_BITS_PER_S, RATES, SLOW
from bench.slow.settings import SETTINGS, Setting
from bench.summary import table
from terrace.base.files import write_atomic
from terrace.simulate.noting import WAIT_OUTER

BAND = 0.15  # largest relative error of a step
LINKS = ("--cluster", PRESET, *overrides({"system": RATES[SLOW]}))
SIZES = {
    "hidden_size": JOB.hidden,
    "intermediate_size": 512,
    "num_hidden_layers": JOB.layers,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
}
_HEADER = (
    "plan",
    "predicted s",
    "measured s",
    "error",
    "predicted wait s",
    "measured wait s",
    "bytes",
    "memory",
    "load",
)


def probe(folder: Path, seconds: float) -> None:
    """Write the cluster file of the slow lab."""
    words = ["probe", "--cluster", PRESET, "--out", "cluster.toml", "--seconds", f"{seconds:g}", "--force"]
    terrace(words, folder, LINKS)


def train(folder: Path, setting: Setting) -> dict[str, Any]:
    """Run a setting on the probed cluster; its report."""
    (folder / "model.json").write_text(json.dumps({**MODEL, **SIZES}), encoding="utf-8")
    (folder / f"{setting.name}.toml").write_text(setting.plan, encoding="utf-8")
    shutil.rmtree(folder / setting.name, ignore_errors=True)  # of a run that was interrupted
    keys = {"steps": setting.steps, "batch": setting.batch, "sequence": JOB.sequence, "warmup_steps": 0}
    words = ["train", "--cluster", "cluster.toml", "--plan", f"{setting.name}.toml", "--model", "model.json"]
    terrace([*words, "--folder", setting.name, *train_words(keys)], folder, LINKS)
    found: dict[str, Any] = json.loads((folder / setting.name / "report.json").read_text(encoding="utf-8"))
    return found


def key_of_run(folder: Path, setting: Setting) -> str:
    """The key of a line in the results file: the setting, its model, and the probe that predicts it."""
    cluster = (folder / "cluster.toml").read_text(encoding="utf-8")
    return key_of(replace(setting, label=""), {**MODEL, **SIZES}, JOB.sequence, LINKS, cluster)


def run(options: argparse.Namespace) -> None:
    """Probe and run the settings that the results lack."""
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "cluster.toml").exists():
        begin_s = time.monotonic()
        probe(folder, options.seconds)
        print(f"probed ({time.monotonic() - begin_s:.0f} s)", flush=True)
    for setting in SETTINGS:
        key = key_of_run(folder, setting)
        if setting.name not in options.settings or key in {each.get("key") for each in read(options.results)}:
            continue
        begin_s, load = time.monotonic(), os.getloadavg()[0]
        report = train(folder, setting)
        line = {"key": key, **machine(), "setting": setting.name, "load": load}
        line |= {side: report[side] for side in ("predicted", "measured")}
        with options.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{setting.name}: {error(line):+.1%} ({time.monotonic() - begin_s:.0f} s)", flush=True)


def step_s(record: Mapping[str, Any], side: str) -> float:
    """Seconds of the mean step of a cycle; `side` is predicted or measured."""
    seconds: Mapping[str, float] = record[side]["time_s"]
    return sum(seconds.values())


def error(record: Mapping[str, Any]) -> float:
    """The predicted step over the measured one, minus one."""
    return step_s(record, "predicted") / step_s(record, "measured") - 1


def has_equal_bytes(record: Mapping[str, Any]) -> bool:
    """Whether as many bytes were sent as predicted, by message class and tier."""
    sent: Mapping[str, Any] = record["predicted"]["sent_bytes"]
    return bool(sent == record["measured"]["sent_bytes"])


def claims(records: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """A claim for each setting that ran."""
    labels = {each.name: each.label for each in SETTINGS}
    named = {f"one slow link: predicted step, {labels[each['setting']]}": abs(error(each)) for each in records}
    return [measured(name, [found], BAND, bound="see the page") for name, found in named.items()]


def page(records: Sequence[Mapping[str, Any]]) -> str:
    """The page in Markdown."""
    first, by_name = records[0], {each["setting"]: each for each in records}
    method = (
        "`python -m bench.slow.predictions` writes this page, as root. The rehearsal cluster `lab` (2 nodes x 2",
        f"packages x 2 ranks) with a link of a node into the system of {LINK_BITS_PER_S / 1e6:g} Mbit/s is",
        "probed once (`terrace probe`), then each plan is run on the probed cluster file by `terrace train`, which",
        f"predicts its step before it starts. A decoder of {JOB.layers} layers, hidden {JOB.hidden}, in fp32, on",
        f"sequences of {JOB.sequence} bytes. A step is the mean of whole cycles; waits are for exchanges. Nothing",
        f"is fitted to these runs. The goal is {BAND:.0%}. {first['processor']}, {first['cores']} cores, torch",
        f"{first['torch']}. Load is the load average before a run; beside other work errors are an indication alone.",
    )
    rows = [_row(setting, by_name[setting.name]) for setting in SETTINGS if setting.name in by_name]
    worst = max(abs(error(each)) for each in records)
    verdict = f"Largest error {worst:.1%}: {'met' if worst <= BAND else '**missed**'}."
    return "\n\n".join(("# Predicted cycles on a slow link", "\n".join(method), table(_HEADER, rows), verdict)) + "\n"


def _row(setting: Setting, record: Mapping[str, Any]) -> tuple[str, ...]:
    predicted, measured_ = record["predicted"], record["measured"]
    memory = [sum(side["memory_bytes"].values()) for side in (predicted, measured_)]
    found = error(record)
    return (
        setting.label,
        *(f"{step_s(record, side):.3f}" for side in ("predicted", "measured")),
        f"{found:+.1%}" + ("" if abs(found) <= BAND else " !"),
        *(f"{side['time_s'].get(WAIT_OUTER, 0.0):.3f}" for side in (predicted, measured_)),
        "equal" if has_equal_bytes(record) else "DIFFERENT",
        f"{memory[0] / memory[1] - 1:+.1%}",
        f"{record['load']:.1f}",
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    names = [each.name for each in SETTINGS]
    parser = argparse.ArgumentParser(
        prog="python -m bench.slow.predictions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--settings", nargs="+", choices=names, default=names)
    parser.add_argument("--seconds", type=float, default=40.0, help="of the probe, which takes some more on slow links")
    parser.add_argument("--folder", type=Path, default=Path("runs/slow-predictions"), help="of the probe and the runs")
    parser.add_argument("--results", type=Path, default=Path("runs/slow-predictions.jsonl"))
    parser.add_argument("--page", type=Path, default=Path("docs/benchmarks/slow-predictions.md"))
    parser.add_argument("--fresh", action="store_true", help="put probe, runs and results aside first (.old)")
    options_for_claims(parser)
    return parser.parse_args(arguments)


def main() -> int:
    """Probe, run, write the page."""
    options = parse()
    if not is_root():
        print("the rehearsal cluster needs root, for network namespaces")
        return 1
    if options.fresh:
        if options.folder.exists():
            aside = options.folder.with_name(f"{options.folder.name}.old")
            shutil.rmtree(aside, ignore_errors=True)
            options.folder.rename(aside)
        if options.results.exists():
            options.results.rename(options.results.with_suffix(".old.jsonl"))
    options.results.parent.mkdir(parents=True, exist_ok=True)
    run(options)
    wanted = {key_of_run(options.folder, setting) for setting in SETTINGS}
    records = [each for each in read(options.results) if each.get("key") in wanted]
    write_atomic(options.page, page(records))
    print(f"{options.page}: {len(records)} runs")
    wrong = [f"{each['setting']}: other bytes than predicted" for each in records if not has_equal_bytes(each)]
    return judge(claims(records), options, wrong)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that links are taken down then, too
    sys.exit(main())
