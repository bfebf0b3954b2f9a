"""The cores of a rank beside its device, and the file of its output."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from terrace.launch.device import bind, cores


@pytest.mark.parametrize(
    ("text", "found"), [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("", set()), ("0-1,4-5,9", {0, 1, 4, 5, 9})]
)
def test_cores_of_a_list(text: str, found: set[int]) -> None:
    assert cores(text) == found


def _nodes(folder: Path, lists: dict[int, str]) -> Path:
    (folder / "has_cpu").write_text(",".join(str(node) for node in lists) + "\n")
    for node, text in lists.items():
        (folder / f"node{node}").mkdir()
        (folder / f"node{node}" / "cpulist").write_text(text + "\n")
    return folder


def test_a_rank_moves_to_the_cores_of_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, moved = _nodes(tmp_path, {0: "0-3", 1: "4-7"}), list[set[int]]()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, own: moved.append(own), raising=False)
    assert bind(1, nodes) == {4, 5, 6, 7}
    assert moved == [{4, 5, 6, 7}]
    assert bind(-1, nodes) == set()  # the system does not say which node it is
    assert bind(2, nodes) == set()
    # The launcher has chosen cores already.
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    assert bind(1, nodes) == set()
    assert len(moved) == 1


def test_a_container_that_forbids_the_move_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, own: set[int]) -> None:
        raise PermissionError("not here")

    nodes = _nodes(tmp_path, {0: "0-3"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)), raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", refuse, raising=False)
    assert bind(0, nodes) == set()


_PRINTS = """
import os, sys
from pathlib import Path
from terrace.launch.rank_log import rank_log, write_loud
print("before", flush=True)
try:
    with rank_log(Path(sys.argv[1])):
        print("python")
        os.write(1, b"library\\n")
        os.write(2, b"trouble\\n")
        write_loud("hang\\n")
        raise ValueError("of the rank")
except ValueError as error:
    print(error, file=sys.stderr)
write_loud("late\\n")
"""


def test_all_that_a_rank_prints_is_in_its_file_and_what_must_be_seen_on_both(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "rank-00001.log"
    command = [sys.executable, "-c", _PRINTS.replace("\\\\", "\\"), str(log)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == "before\n"
    assert run.stderr == "hang\nof the rank\nlate\n"
    assert sorted(log.read_text().split()) == ["hang", "library", "python", "trouble"]
