"""Roles in processes of this machine: rows from process to process, and whatever ends them."""

import os
import pickle
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from terrace.base.errors import ConfigError, DataError, HangError
from terrace.rl.calls.host import joined
from terrace.rl.calls.local import LocalRuntime
from terrace.rl.calls.processes import Processes
from terrace.rl.calls.runtime import Group
from terrace.rl.values.memory import SharedMemory
from terrace.rl.values.ragged import Ragged
from terrace.rl.values.rows import Rows
from tests.support.nightly import nightly
from tests.support.toy_roles import Paired, Scaler, Unmakeable, prompts_of

ENDED_S = 5.0  # within which all processes of a failed runtime end: half a second where nothing else runs


@pytest.fixture(scope="module")
def roles() -> Iterator[dict[str, Group]]:
    """An actor and a reward on three ranks, a critic on two others whose ranks share rows, and a judge alone."""
    with LocalRuntime(timeout_s=60.0) as runtime:
        found = runtime.pool(3).host(actor=(Scaler, {}), reward=(Scaler, {"factor": 2.0}))
        found |= runtime.pool(2).host(critic=(Paired, {}))
        yield found | runtime.pool(1).host(judge=(Scaler, {}))


def test_rows_go_from_process_to_process(roles: dict[str, Group]) -> None:
    rows = prompts_of(2, 2, 2, 2)
    responses = roles["actor"].generate.remote(rows, longer=2)
    assert responses.tokens == [4, 4, 4, 4]
    made_by = responses.get().tensor("made_by").tolist()
    assert len(set(made_by)) == 3
    assert made_by == sorted(made_by), "rows stay in order"
    expected = [0.0, 2.0, 4.0, 6.0]
    here = roles["reward"].score.remote(rows, responses)
    elsewhere = roles["critic"].score.remote(rows, responses)
    alone = roles["judge"].score.remote(rows, responses)
    assert here.get().tensor("scores").tolist() == [2 * each for each in expected]
    assert elsewhere.get().tensor("scores").tolist() == alone.get().tensor("scores").tolist() == expected
    pids = {name: roles[name].pid() for name in roles}
    assert pids["actor"] == pids["reward"], "colocated roles share processes"
    assert set(here.get().tensor("scored_by").tolist()) == set(pids["reward"])
    assert set(elsewhere.get().tensor("scored_by").tolist()) == {pids["critic"][1]}, "the second of a pair answers"
    # Over ranks that work together, and in one process.
    assert roles["reward"].update(rows, here) == {"mean": 6.0, "total": 24.0}
    assert roles["judge"].update(here) == {"mean": 6.0, "total": 24.0}


def test_a_share_may_have_no_rows(roles: dict[str, Group]) -> None:
    found = roles["actor"].generate(prompts_of(3))
    assert found.ragged("responses").rows()[0].tolist() == [0, 0, 0]
    empty = roles["actor"].generate.remote(prompts_of(3).part(0, 0))
    assert len(empty) == 0
    assert len(roles["critic"].score(prompts_of(3).part(0, 0), empty)) == 0


def test_whatever_rows_hold_arrives(roles: dict[str, Group]) -> None:
    half = torch.randn(3, 2).to(torch.bfloat16)
    given = Rows(
        {
            "prompts": Ragged.of([torch.tensor([1]), torch.tensor([2, 3]), torch.zeros(0, dtype=torch.int64)]),
            "half": half.T.contiguous().T,  # not contiguous
            "mask": torch.tensor([True, False, True]),
            "none": torch.zeros(3, 0),
            "texts": ("a", {"b": 1}, None),
        }
    )
    found = roles["judge"].echo(given)
    assert found.tensor("half").equal(half)
    assert found.tensor("mask").tolist() == [True, False, True]
    assert found.tensor("none").shape == (3, 0)
    assert found.objects("texts") == ("a", {"b": 1}, None)
    assert [row.tolist() for row in found.ragged("prompts").rows()] == [[1], [2, 3], []]


def test_tensors_do_not_pass_the_controller(roles: dict[str, Group]) -> None:
    large = Rows({"scores": torch.ones(4, 1_000_000)})
    echoed = roles["actor"].echo.remote(large)
    assert len(pickle.dumps(echoed.parts)) < 10_000


def test_a_rank_gets_the_objects_of_its_rows_alone(roles: dict[str, Group]) -> None:
    runtime = roles["actor"]._pool.runtime
    given = runtime.given(Rows({"prompts": prompts_of(1, 1, 1).ragged("prompts"), "texts": ("aaa", "bbb", "ccc")}))
    (piece,) = runtime.pieces(given.parts, 1, 2, ())
    assert [text in pickle.dumps(piece) for text in (b"aaa", b"bbb", b"ccc")] == [False, True, False]
    (read,) = runtime.pieces(given.parts, 1, 2, ("prompts",))
    assert b"bbb" not in pickle.dumps(read)
    found = joined(SharedMemory(), [piece])
    assert found.objects("texts") == ("bbb",)
    assert found.ragged("prompts").rows()[0].tolist() == [1]
    assert list(joined(SharedMemory(), [read]).columns) == ["prompts"]


def test_rows_changed_in_place_are_changed_for_nobody_else(roles: dict[str, Group]) -> None:
    made = roles["actor"].echo.remote(Rows({"scores": torch.ones(3)}))
    assert roles["reward"].change(made).tensor("zeros").tolist() == [0, 0, 0]
    made.get().tensor("scores").zero_()
    assert made.get().tensor("scores").tolist() == [1, 1, 1]


def test_rows_that_nobody_refers_to_are_dropped(roles: dict[str, Group]) -> None:
    actor, rows = roles["actor"], prompts_of(1, 1, 1)
    before = (actor.num_files(), len(os.listdir("/proc/self/fd")))
    for _ in range(5):
        roles["critic"].score(rows, actor.generate.remote(rows))
    roles["critic"].pid()  # rows stay until all ranks have answered, this one's too
    assert (actor.num_files(), len(os.listdir("/proc/self/fd"))) == before
    held = actor.generate.remote(rows)
    assert len(held) == 3
    assert actor.num_files() == [1 + each for each in before[0]]


def test_roles_on_different_pools_run_at_the_same_time(roles: dict[str, Group], tmp_path: Path) -> None:
    there = str(tmp_path / "there")
    waiting = roles["actor"].wait_for.remote(path=there)
    assert not waiting.is_ready()
    roles["critic"].touch(path=there)
    assert waiting.get() == [True, True, True]


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        (
            "bug",
            RuntimeError,
            [r"rank 1 failed", "actor.fail: KeyError: 'a reward of the user'", "toy_roles.py", "_fail"],
        ),
        ("input", DataError, ["actor.fail: row 3 has no prompt (reported by rank 1)"]),
        ("killed", HangError, ["rank 1 was killed by SIGKILL", "the pool of actor, reward was running actor.fail"]),
        ("stalled", HangError, ["actor.fail: ranks 0-1 did not answer within 2 s", "stacks are on stderr"]),
    ],
)
def test_a_failure_has_one_error_and_ends_all(how: str, error: type[Exception], words: list[str]) -> None:
    with LocalRuntime(timeout_s=2.0 if how == "stalled" else 60.0) as runtime:
        roles = runtime.pool(2).host(actor=(Scaler, {}), reward=(Scaler, {}))
        roles |= runtime.pool(1).host(critic=(Scaler, {}))
        pids = [*roles["actor"].pid(), *roles["critic"].pid()]
        before_s = time.monotonic()
        with pytest.raises(error) as caught:
            roles["actor"].fail(rank=1, how=how)
        took_s = time.monotonic() - before_s
        assert all(word in str(caught.value) for word in words), str(caught.value)
        assert len(str(caught.value).splitlines()) == 1 or how == "bug"
        assert not any(map(is_alive, pids))
        assert took_s < ENDED_S + (2.0 if how == "stalled" else 0.0)
        with pytest.raises(error):
            roles["critic"].pid()


@pytest.mark.parametrize("pool", [1, *nightly(0)])
def test_a_rank_that_stands_still_is_the_one_that_is_named(pool: int, capfd: pytest.CaptureFixture[str]) -> None:
    """The other rank of its pool waits for it in a collective, and is not to blame; nor is a pool that is at work."""
    with LocalRuntime(timeout_s=2.0) as runtime:
        roles = [runtime.pool(2).host(**{name: (Scaler, {})})[name] for name in ("actor", "critic")]
        stopped = roles[pool].pid()[1]
        os.kill(stopped, signal.SIGSTOP)
        calls = [role.update.remote(Rows({"scores": torch.ones(2)})) for role in roles]
        with pytest.raises(HangError) as caught:
            calls[pool].get()
    said = str(caught.value)
    assert said.startswith("rank 1 stopped at ")
    assert "the process is gone or frozen" in said
    assert f"pid {stopped}" in said
    assert "; waiting for it: rank 0 (rank 0 at" in said
    assert f"the pool of {('actor', 'critic')[pool]} was running {('actor', 'critic')[pool]}.update" in said
    assert "likewise" not in said
    assert capfd.readouterr().err == ""


def test_a_call_that_is_overdue_before_anybody_waits_is_named() -> None:
    with LocalRuntime(timeout_s=2.0) as runtime:
        actor = runtime.pool(1).host(actor=(Scaler, {}))["actor"]
        late = actor.fail.remote(rank=0, how="stalled")
        time.sleep(2.2)
        with pytest.raises(HangError, match=r"actor\.fail: rank 0 did not answer within 2 s"):
            late.get()


def test_a_rank_that_is_stuck_at_its_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("terrace.rl.calls.processes.serve", stuck)
    failures = list[BaseException]()
    with pytest.raises(HangError, match=r"ranks 0-1 of a new pool did not start within 3 s; stacks are on stderr"):
        Processes(2, failures.append, start_s=3.0)
    assert len(failures) == 1, "its processes have ended"


def stuck(*_: object) -> None:
    time.sleep(600.0)


def test_a_failure_that_nobody_waits_for_ends_all() -> None:
    with LocalRuntime() as runtime:
        roles = runtime.pool(1).host(actor=(Scaler, {})) | runtime.pool(1).host(critic=(Scaler, {}))
        pids = [*roles["actor"].pid(), *roles["critic"].pid()]
        roles["actor"].fail.remote(rank=0, how="input")
        deadline_s = time.monotonic() + 10.0
        while any(map(is_alive, pids)) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert not any(map(is_alive, pids))
        with pytest.raises(DataError, match=r"actor\.fail: row 3 has no prompt"):
            roles["critic"].pid()


def test_a_role_that_cannot_be_made_is_named() -> None:
    with LocalRuntime() as runtime, pytest.raises(DataError, match=r"critic\.__init__: no folder 'models/none'"):
        runtime.pool(2).host(critic=(Unmakeable, {}))


def test_a_runtime_that_is_closed_or_has_no_time_is_refused() -> None:
    with pytest.raises(ConfigError, match="more than 0 seconds"):
        LocalRuntime(timeout_s=0.0)
    with LocalRuntime() as runtime:
        actor = runtime.pool(1).host(actor=(Scaler, {}))["actor"]
        pids = actor.pid()
    assert not any(map(is_alive, pids))
    with pytest.raises(ConfigError, match="the runtime is closed"):
        actor.pid()


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False
