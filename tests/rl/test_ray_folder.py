"""Sockets of a cluster that Ray starts, where the path of the folder for temporary files is too long for them."""

from importlib import import_module
from typing import Any

import pytest

from terrace.base.errors import ConfigError

pytest.importorskip("ray", reason="needs the package ray")
on_ray: Any = import_module("terrace.rl.calls.on_ray")  # which refuses to be imported without Ray


def test_ray_makes_its_sockets_in_a_folder_with_a_short_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[dict[str, Any]] = []

    def init(**options: Any) -> None:
        asked.append(options)
        if "_temp_dir" not in options:
            raise OSError("AF_UNIX path length cannot exceed 107 bytes")

    monkeypatch.setattr(on_ray.ray, "init", init)
    on_ray._join_cluster("")
    (first, second) = asked
    assert second == first | {"_temp_dir": second["_temp_dir"]}
    assert len(second["_temp_dir"]) < 30
    monkeypatch.setattr(on_ray, "short_folders", lambda needed: [])
    with pytest.raises(ConfigError, match="no Ray cluster at this machine"):
        on_ray._join_cluster("")
