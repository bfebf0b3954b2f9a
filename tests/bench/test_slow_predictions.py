"""Predictions    assert f"| the same, int4 | across a slow link: settings that run, and the page of their errors."""

import json
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.claims import read
from bench.local_predictions import MODEL
from bench.slow import predictions
from bench.slow.settings import SETTINGS, Setting
from terrace.cluster.presets import load_cluster
from terrace.model.blocks import block_specs
from terrace.model.config import parse_model
from terrace.plan.layout import Layout
from terrace.plan.presets import parse_plan
from terrace.plan.validate import num_micro_batches
from terrace.program.lowering import build_stages
from terrace.train.metrics import Summary


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_settings_are_plans_whose_cycles_are_timed_behind_a_warm_up(setting: Setting) -> None:
    cluster = load_cluster("lab")
    plan = parse_plan(tomllib.loads(setting.plan), cluster)
    assert plan.outer.has_islands
    blocks = block_specs(parse_model({**MODEL, **predictions.SIZES}))
    build_stages(cluster, plan, blocks, num_micro_batches(plan, Layout.of(cluster, plan), setting.batch), 64)
    timed = setting.steps - Summary(setting.steps, plan.outer.every).num_warm_up
    assert timed >= 2 * plan.outer.every
    assert timed % plan.outer.every == 0


def record(name: str, predicted_s: float, measured_s: float) -> dict[str, Any]:
    machine = {"processor": "a processor", "cores": "2", "torch": "2.13.0", "load": 0.25}
    report = {"sent_bytes": {"outer": {"system": 5}}, "memory_bytes": {"params": 100}}
    sides = {
        side: {**report, "time_s": {"forward": seconds - 0.5, "wait outer": 0.5}}
        for side, seconds in (("predicted", predicted_s), ("measured", measured_s))
    }
    return {**machine, "setting": name, **sides}


def test_errors_are_shown_and_held_to_the_band() -> None:
    records = [record("topk", 0.9, 1.0), record("diloco", 1.2, 1.0)]
    text = predictions.page(records)
    assert "top 1/32 with feedback | 0.900 | 1.000 | -10.0% | 0.500 | 0.500 | equal | +0.0% | 0.2 |" in text
    assert "| +20.0% ! |" in text
    assert text.index("`diloco`") < text.index("top 1/32"), "in the order of settings"
    assert "Largest error 20.0%: **missed**" in text
    assert [each.is_met for each in predictions.claims(records)] == [True, False]
    other = record("co2", 1.0, 1.0)
    other["measured"] = {**other["measured"], "sent_bytes": {"outer": {"system": 6}}}
    assert "| DIFFERENT |" in predictions.page([other])


def test_a_second_call_makes_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[str]()

    def fake(words: Sequence[str], folder: Path, links: Sequence[str]) -> None:
        calls.append(words[0])
        assert "--cluster.tiers.system.bandwidth_bytes_per_s=312500" in links
        if words[0] == "probe":
            (folder / "cluster.toml").write_text("")
            return
        run = folder / words[words.index("--folder") + 1]
        assert not run.exists(), "an interrupted run is in the way"
        run.mkdir()
        (run / "report.json").write_text(json.dumps(record("", 1.0, 1.0)))

    monkeypatch.setattr(predictions, "terrace", fake)
    monkeypatch.setattr(predictions, "is_root", lambda: True)
    (tmp_path / "runs" / "topk").mkdir(parents=True)
    names = {"folder": tmp_path / "runs", "results": tmp_path / "found.jsonl", "page": tmp_path / "page.md"}
    paths = [word for name, path in names.items() for word in (f"--{name}", str(path))]
    for chosen, made in ((["topk"], ["probe", "train"]), (["topk", "co2"], ["train"]), (["topk"], [])):
        calls.clear()
        monkeypatch.setattr("sys.argv", ["predictions", "--settings", *chosen, *paths])
        assert predictions.main() == 0
        assert calls == made
    assert [each["setting"] for each in read(tmp_path / "found.jsonl")] == ["topk", "co2"]
    # Another plan under the same name, or another probe, is another run; the page has the newest alone.
    co2 = next(each for each in SETTINGS if each.name == "co2")
    changed = [replace(co2, plan=co2.plan.replace("bf16", "int8")) if each is co2 else each for each in SETTINGS]
    monkeypatch.setattr(predictions, "SETTINGS", changed)
    calls.clear()
    monkeypatch.setattr("sys.argv", ["predictions", "--settings", "topk", "co2", *paths])
    assert predictions.main() == 0
    assert calls == ["train"]
    assert (tmp_path / "page.md").read_text(encoding="utf-8").count("| equal |") == 2
    (tmp_path / "runs" / "cluster.toml").write_text("# probed again")
    assert predictions.main() == 0
    assert calls == ["train"] * 3
    calls.clear()
    monkeypatch.setattr("sys.argv", ["predictions", "--settings", "topk", "--fresh", *paths])
    assert predictions.main() == 0
    assert calls == ["probe", "train"]
    monkeypatch.setattr(predictions, "is_root", lambda: False)
    assert predictions.main() == 1
