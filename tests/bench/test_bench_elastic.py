"""Figures of islands that are killed: kills are the same for all, tokens are counted as they are said to be."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from bench.elastic.__main__ import loss_gap, of_roster, of_torchft
from bench.elastic.job import Job
from bench.elastic.member import LOG, OWN, TORCHFT, faults
from terrace.roster.entries import Attempted, Brought, Committed, Entry, Gone, line_of


def job_of(folder: Path, contestant: str) -> Job:
    return Job(contestant=contestant, folder=str(folder), seed=3, seconds=180.0)


def test_kills_are_the_same_for_all_and_a_killed_island_is_back_before_the_next(tmp_path: Path) -> None:
    job = job_of(tmp_path, OWN)
    found = faults(job)
    assert found == faults(job_of(tmp_path, TORCHFT))
    assert [int(second // job.fault_s) for second, _ in found] == list(range(1, 9))
    ends = [second + job.restart_s for second, _ in found]
    assert all(end < second for end, (second, _) in zip(ends, [*found[1:], (job.seconds, 0)], strict=True))


def test_tokens_of_lost_windows_do_not_count(tmp_path: Path) -> None:
    job = job_of(tmp_path, TORCHFT)
    own = {"kind": "window", "rounds": 36, "version": 1, "participants": 3}
    lines = [
        {**own, "committed": True, "healed": False},
        {**own, "committed": True, "healed": True},
        {**own, "committed": False, "healed": False},
    ]
    for rank in range(job.islands):
        told = "".join(json.dumps({"time": float(rank), **line}) + "\n" for line in lines[: 3 - rank])
        (tmp_path / f"events-{rank}.jsonl").write_text(told)
    window = 36 * job.tokens_a_round
    assert of_torchft(job) == {"tokens": 3 * window, "lost_by_survivors": 1, "lost_by_newcomers": 2, "curve": []}


def test_tokens_of_a_roster_are_those_of_committed_attempts(tmp_path: Path) -> None:
    job = job_of(tmp_path, OWN)
    brought = {name: Brought(token=name, version=0, window=0, tokens=100) for name in "ab"}
    entries: list[Entry] = [
        Attempted(exchange=0, attempt=0, version=0, islands=brought),
        Gone(island="b", token="b", why="killed", share=2, first=0, last=17),
        Attempted(exchange=0, attempt=1, version=0, islands={"a": brought["a"]}),
        Committed(exchange=0, attempt=1),
    ]
    (tmp_path / LOG).write_text("".join(f"{line_of(each)}\n" for each in entries))
    for rank in range(job.islands):
        (tmp_path / f"events-{rank}.jsonl").write_text(json.dumps({"time": 0.0, **asdict(job), "kind": "begin"}) + "\n")
    lost = 2 * 18 * job.tokens_a_round
    assert of_roster(job) == {"tokens": 100, "lost_by_killed": lost, "lost_by_survivors": 0, "curve": []}


def test_losses_are_compared_at_equal_tokens() -> None:
    undisturbed = [(100, 4.0), (200, 3.0), (300, 2.5)]
    assert loss_gap([(150, 3.5)], undisturbed) == pytest.approx(0.0)
    assert loss_gap([(50, 9.0), (250, 2.2)], undisturbed) == pytest.approx(2.2 / 2.75 - 1)
    assert loss_gap([(900, 5.0)], undisturbed) == pytest.approx(1.0)
