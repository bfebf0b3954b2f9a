"""The place of MLflow's record: by default in the working directory, which another start of a run may not share."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from terrace.train.trackers import _absolute_place, open_trackers


def test_mlflow_goes_on_where_it_began_from_another_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places, is_set = list[str](), False
    module: Any = ModuleType("mlflow")
    module.start_run = lambda **more: SimpleNamespace(info=SimpleNamespace(run_id="r1"))
    module.log_params = module.log_metrics = module.end_run = lambda *given, **more: None
    module.get_tracking_uri = lambda: places[-1] if places else "sqlite:///mlflow.db"
    module.set_tracking_uri, module.is_tracking_uri_set = places.append, lambda: is_set
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        open_trackers(["mlflow"], tmp_path, {}, 0)
    assert places == [f"sqlite:///{tmp_path}/here/mlflow.db"]
    is_set = True
    open_trackers(["mlflow"], tmp_path, {}, 0)
    assert len(places) == 1, "a place that the user names wins"


@pytest.mark.parametrize(
    ("place", "wanted"),
    [
        ("sqlite:///mlflow.db", "sqlite:///{}/mlflow.db"),
        ("sqlite:////data/mlflow.db", "sqlite:////data/mlflow.db"),
        ("mlruns", "{}/mlruns"),
        ("file:mlruns", "file:{}/mlruns"),
        ("file:///data/mlruns", "file:///data/mlruns"),
        ("http://host:5000", "http://host:5000"),
        ("databricks://profile", "databricks://profile"),
    ],
)
def test_a_place_is_the_same_in_every_directory(
    place: str, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _absolute_place(place) == wanted.format(tmp_path)
