"""Torch's flight recorder: the functions in use, the entries that are kept, and that no failure of it ends a rank."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from terrace.launch import flight
from terrace.launch.flight import FlightRecorder, flight_recorder, settings
from terrace.launch.fork_server import _defaults_in_environment

SOME, NONE = b'{"entries":[{"op_id":1}],"version":"2.10"}', b'{"version":"2.10"}'


class Module:
    """The module of torch with these functions."""

    def __init__(self, **records: bytes) -> None:
        for name, each in records.items():
            setattr(self, name, self._returning(each))

    def _returning(self, records: bytes) -> Callable[[], bytes]:
        return lambda: records


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[FlightRecorder | None, str]]:
    """The recorder that is found with a backend and these functions of torch."""

    def find(backend: str, **records: bytes) -> tuple[FlightRecorder | None, str]:
        monkeypatch.setattr(torch._C, "_distributed_c10d", Module(**records))
        monkeypatch.setattr(dist, "get_backend", lambda: backend)
        return flight_recorder(tmp_path / "flight")

    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "2000")
    return find


@pytest.mark.parametrize(
    ("backend", "records", "file", "kept"),
    [
        ("gloo", {"_dump_fr_trace_json": SOME, "_dump_fr_trace": b"raw"}, "json", SOME),
        ("gloo", {"_dump_fr_trace": b"raw", "_dump_nccl_trace_json": SOME}, "pickle", b"raw"),
        ("gloo", {"_dump_fr_trace_json": NONE, "_dump_fr_trace": b"raw"}, "json", NONE),
        # NCCL's own recorder first: torch before 2.14 has NCCL's collectives in no other.
        ("nccl", {"_dump_fr_trace_json": SOME, "_dump_nccl_trace_json": SOME + b" "}, "json", SOME + b" "),
        ("nccl", {"_dump_fr_trace_json": SOME, "_dump_nccl_trace_json": NONE}, "json", SOME),
        ("nccl", {"_dump_fr_trace": b"general", "_dump_nccl_trace": b"raw"}, "pickle", b"raw"),
        ("nccl", {"_dump_fr_trace_json": SOME, "_dump_nccl_trace": b"raw"}, "json", SOME),
    ],
)
def test_the_best_form_of_the_records_is_kept(
    recorder: Any, tmp_path: Path, backend: str, records: dict[str, bytes], file: str, kept: bytes
) -> None:
    found, why_not = recorder(backend, **records)
    assert why_not == ""
    assert found.keep(12, 3) is None
    (path,) = (tmp_path / "flight").iterdir()
    assert path.name == f"step-00000012-rank-00003.{file}"
    assert path.read_bytes() == kept
    assert str(tmp_path / "flight" / f"step-*-rank-*.{file}") in found.words()


def test_a_torch_without_a_recorder_is_said_and_one_switched_off_is_not(
    recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    why_not = f"torch {torch.__version__} has no flight recorder: a hang will be told without last collectives"
    assert recorder("nccl") == (None, why_not)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    assert recorder("nccl", _dump_nccl_trace_json=SOME) == (None, "")


def test_a_disk_that_fails_or_hangs_holds_up_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flight").write_text("a file where the folder should be")
    problem = FlightRecorder(tmp_path / "flight", [lambda: SOME], True).keep(1, 0)
    assert problem is not None
    assert "exists" in problem or "Not a directory" in problem

    end = threading.Event()

    def late() -> bytes:
        end.wait(60)
        return SOME

    monkeypatch.setattr(flight, "LIMIT_S", 0.1)
    stuck = FlightRecorder(tmp_path / "flight", [late], True)
    begin_s = time.monotonic()
    assert stuck.keep(1, 0) == "not written within 0.1 s"
    assert time.monotonic() - begin_s < 50
    end.set()


@pytest.mark.parametrize("name", ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"])
def test_the_users_own_size_holds(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for each in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        monkeypatch.delenv(each, raising=False)
    with _defaults_in_environment(settings()):
        assert os.environ["TORCH_FR_BUFFER_SIZE"] == "2000"
    assert "TORCH_FR_BUFFER_SIZE" not in os.environ
    monkeypatch.setenv(name, "7")
    assert settings() == {}
    assert flight._size() == 7
