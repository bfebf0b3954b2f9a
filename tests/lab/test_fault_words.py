"""The words of faults, and a run that knows of none; rehearsals are in test_fault_rehearsals.py."""

import signal
from pathlib import Path

import pytest

from terrace.base.errors import ConfigError
from terrace.cli.main import main
from terrace.lab.faults.findings import Rows
from terrace.lab.faults.grammar import Where, check_faults, parse_fault
from terrace.lab.faults.islands import Ran, Seen
from terrace.lab.faults.orders import Event, Happening, Lines, Orders, event_of, read_orders
from terrace.lab.faults.picture import LEGEND, picture
from terrace.lab.faults.within import Injected
from terrace.program.instruction import Instruction, Op
from terrace.roster.entries import Dealt, Gone
from terrace.train.injected import BEGINS, NO_FAULTS, Faults
from tests.support.tiny_runs import one_line


@pytest.mark.parametrize("who", ["island 2", "island 2 rank 1"])
@pytest.mark.parametrize("what", ["kill", "freeze", "freeze for 2.5 s", "slow x3", "cut", "cut for 3 s"])
@pytest.mark.parametrize(
    ("where", "found"),
    [
        ("at step 3", Where(kind="step", number=3)),
        ("at exchange 0", Where(kind="exchange", number=0)),
        ("within exchange 12", Where(kind="within", number=12)),
        ("at instruction backward of step 1", Where(kind="instruction", number=1, name="BACKWARD")),
        ("while healing", Where(kind="healing")),
    ],
)
def test_every_right_form_is_read(who: str, what: str, where: str, found: Where) -> None:
    fault = parse_fault(f"  {who}  {what} {where} ")
    assert (fault.island, fault.rank) == (2, 1 if "rank" in who else -1)
    assert (fault.what, fault.where) == (what.split()[0], found)
    assert fault.factor == (3 if "slow" in what else 1)
    assert fault.seconds == {"freeze for 2.5 s": 2.5, "cut for 3 s": 3}.get(what, float("inf"))


def test_every_instruction_is_a_place() -> None:
    assert {parse_fault(f"rank 0 kill at instruction {op} of step 1").where.name for op in Op} == set(Op)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("isle 2 kill at exchange 3", "does not say who: use island N, rank N, island N rank M or meet"),
        ("isle 2 kill at exchange 3", "the nearest right form is 'island 2 kill at exchange 3'"),
        ("island 2 kil at exchange 3", "the nearest right form is 'island 2 kill at exchange 3'"),
        ("island 2 kill in exchange 3", "'in exchange 3' does not say where: use at step N"),
        ("island 2 kill at exchange 3 please", "'please' is left over"),
        ("island 2 freeze 3 s at step 4", "the nearest right form is 'island 2 freeze for 3 s at step 4'"),
        ("island 2 kill", "'' does not say where"),
        ("", "the nearest right form is"),
        ("island 2 kill at step 0", "steps count from 1"),
        (
            "island 2 kill at instruction BACKWORD of step 1",
            "'BACKWORD' is no instruction: use the name of one",
        ),
        ("island 2 slow x1 at step 1", "x1 slows nothing down: use a factor above 1"),
        ("island 2 slow x1000000000 at step 1", "x1e+09 is a stop: use a factor of at most 1e+06, or freeze"),
        ("island 2 kill for 3 s at step 1", "kill has no duration here: leave out for 3 s"),
        ("island 2 freeze for 0 s at step 1", "freeze has no duration here"),
        ("meet leave at step 1", "the meeting place is killed or frozen, and leave is for islands"),
        ("island 0 rank 1 leave at step 1", "a rank does not leave alone: use island N leave"),
        ("rank 1 kill at exchange 1", "a run without islands has no exchanges"),
        ("rank 1 cut at step 1", "a run without islands has no exchanges"),
    ],
)
def test_a_wrong_fault_is_named_with_its_rule_and_the_nearest_right_form(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_fault(text)
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"--fault {text!r}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("texts", "num_islands", "words"),
    [
        (["island 1 kill at step 2"], 0, "the run has no islands: say how many start (--islands 3), or use rank N"),
        (["rank 1 kill at step 2"], 3, "name the island too, as in island 0 rank 1"),
        (["island 3 kill at step 2"], 3, "island 3 is not there (islands: 0, 1, 2)"),
        (["island 1 join at step 2"], 3, "island 1 is there already"),
        (["island 1 kill at step 2", "island 1 freeze at step 3"], 2, "island 1 is not there (islands: 0)"),
    ],
)
def test_a_fault_that_this_run_cannot_have_is_refused(texts: list[str], num_islands: int, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_faults([parse_fault(text) for text in texts], num_islands)
    assert words in str(caught.value)


def test_an_island_that_was_killed_may_join_and_be_struck_again() -> None:
    texts = ("island 1 kill at step 2", "island 1 join at step 4", "island 1 cut at step 6", "island 7 join at step 1")
    check_faults([parse_fault(text) for text in texts], 2)


RUN = ("rehearse", "run", "--fault", "island 1 kill at step 2")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*RUN, "--islands", "0", "--", "terrace", "train"), "--islands 0: islands are processes of this machine"),
        (
            (*RUN, "--islands", "2", "--", "ls"),
            "write terrace train ... after --, not 'ls'",
        ),
        (
            (*RUN, "--islands", "2", "--cluster", "lab", "--", "terrace", "train"),
            "leave out --cluster",
        ),
        ((*RUN, "--islands", "2", "--paced", "--", "terrace", "train"), "leave out --paced"),
        ((*RUN, "--islands", "2", "--", "terrace", "train", "--island", "a"), "--island is given by the rehearsal"),
        ((*RUN, "--islands", "2", "--", "terrace", "train", "--folder=x"), "--folder=x is given by the rehearsal"),
        (
            (*RUN, "--islands", "2", "--folder", "/", "--", "terrace", "train"),
            "cannot be made (File exists)",
        ),
        ((*RUN, "--", "terrace", "train"), "the run has no islands"),
        (
            ("rehearse", "run", "--folder", "x", "--cluster", "lab", "--", "ls"),
            "--folder is of a rehearsal",
        ),
    ],
    ids=lambda value: " ".join(value[4:]) if isinstance(value, tuple) else "",
)
def test_a_bad_command_is_one_line(capfd: pytest.CaptureFixture[str], words: tuple[str, ...], said: str) -> None:
    assert main(words) == 2
    assert said in one_line(capfd.readouterr().err)


def test_a_run_without_faults_keeps_its_own_callbacks() -> None:
    """Nothing is added between a run and its instructions, or between an island and its exchanges."""

    def progress(counter: int, instruction: object, waiting_on: tuple[int, ...]) -> None: ...

    state = object()
    assert type(NO_FAULTS) is Faults
    assert NO_FAULTS.watched(progress, lambda: 0) is progress
    assert NO_FAULTS.kept(state) is state  # type: ignore[arg-type]  # whatever it is
    NO_FAULTS.joins()
    NO_FAULTS.meets(0)


def test_orders_go_through_the_environment_and_events_through_a_file(tmp_path: Path) -> None:
    orders = Orders(events=str(tmp_path / "e"), island=1, faults={"0": "island 1 kill at step 2"}, reported={}, joins=3)
    assert read_orders(orders.text) == orders
    for wrong in ("kill everyone", '{"events": "e", "faults": {"first": "rank 0 kill at step 2"}, "reported": {}}'):
        with pytest.raises(ConfigError, match="TERRACE_FAULTS is set by terrace rehearse alone"):
            read_orders(wrong)
    elsewhere = Orders(events=str(tmp_path / "gone" / "e"), faults={}, reported={})
    with pytest.raises(ConfigError, match=r"cannot be opened \(No such file or directory\): unset it"):
        Injected(elsewhere.text, 0, 1)
    lines = Lines(tmp_path / "e")
    assert lines.new() == []
    (tmp_path / "e").write_text("one\ntwo\nthr")
    assert lines.new() == ["one", "two"]
    (tmp_path / "e").write_text("one\ntwo\nthree\n")
    assert lines.new() == ["three"]
    assert lines.new() == []


def test_a_rank_carries_out_each_fault_once_at_its_place(tmp_path: Path) -> None:
    texts = {"0": "island 0 rank 1 slow x2 at instruction BACKWARD of step 2", "1": "island 0 rank 0 kill at step 1"}
    orders = Orders(events=str(tmp_path / "events"), island=0, faults=texts, reported={})
    told, steps = list[object](), [0]
    injected = Injected(orders.text, 1, 2)
    progress = injected.watched(lambda counter, instruction, waiting_on: told.append(instruction), lambda: steps[-1])
    backward, free = Instruction(Op.BACKWARD, block=0, micro=0), Instruction(Op.FREE, block=0)
    progress(0, backward, ())  # before the first step, where nothing is a place
    for step in range(3):
        steps.append(step)
        for instruction in (BEGINS, free, backward, backward):
            progress(0, instruction, ())
    injected.meets(0)
    progress(0, backward, ())  # between windows
    assert told == [backward, *(3 * [BEGINS, free, backward, backward]), backward]
    events = [event_of(line) for line in Lines(tmp_path / "events").new()]
    assert [(event.what, event.number) for event in events] == [("trains", 1), ("fault", 0), ("meets", 0)]
    with pytest.raises(ConfigError, match=r"rank 1 slow x2 at .*: it has 1 rank, counted from 0"):
        Injected(orders.text, 0, 1)


def test_an_island_that_leaves_within_an_exchange_does_not_hold_up_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, slept = list[int](), list[float]()
    monkeypatch.setattr("os.kill", lambda pid, number: sent.append(number))
    monkeypatch.setattr("time.sleep", slept.append)
    texts = {"0": "island 0 leave while healing", "1": "island 0 leave within exchange 2"}
    injected = Injected(Orders(events=str(tmp_path / "e"), island=0, faults=texts, reported={}).text, 0, 1)
    injected.reach(Where(kind="healing"))
    injected.reach(Where(kind="within", number=2))
    assert sent == 2 * [signal.SIGTERM]
    assert not slept


def test_the_sequences_in_hand_of_a_lost_island_are_named() -> None:
    """Islands of two ranks with shares of 2 and 1: rounds are dealt in turn, as docs/elastic.md says."""
    deal = Dealt(number=1, window=2, first=4, last=5, shares={"0": 2, "1": 1})
    rows = Rows([deal], rounds=3, batch=12, micro_batch=2)
    # Micro-batches 0 and 1 are of island 0's ranks, 2 and 3 of island 1's, 4 and 5 again of island 0's.
    assert rows.of(deal, "1") == [4, 5, 6, 7]
    assert rows.of(deal, "0") == [0, 1, 2, 3, 8, 9, 10, 11]
    lost = rows.lost(Gone(island="0", token="", why="", share=2, first=4, last=5))
    assert lost == "16 sequences: rows 0-3, 8-11 of steps 5 to 6"


def test_a_picture_has_a_row_for_each_island_and_a_sign_for_each_fault(tmp_path: Path) -> None:
    def event(what: Happening, at_s: float, island: int, number: int = 0) -> Event:
        return Event(what=what, at_s=at_s, island=island, rank=0, pid=1, group=1, number=number)

    faults = [parse_fault("island 1 freeze for 3 s at exchange 0"), parse_fault("meet kill at exchange 1")]
    seen = Seen(0.0, 2, faults, done={0: 4.0, 1: 8.0}, end_s=10.0)
    seen.ran = [Ran(island, tmp_path, tmp_path, NoProcess(), 0.0, 10.0, 0) for island in range(2)]
    seen.events = [
        event("trains", 0.0, 0, 1),
        event("trains", 1.0, 1, 1),
        event("meets", 3.9, 1),
        event("meets", 3.0, 0),
        event("exchanges", 7.0, 0),
        event("heals", 7.9, 0),
        event("holds", 8.0, 0),
        event("trains", 9.0, 0, 2),
        event("meets", 10.0, 0, 1),
    ]
    header, first, second, place, legend = picture(seen, width=10)
    assert header == "          0 s   10 s"
    assert first == "island 0  ===....hh."
    assert second == "island 1  .==.!zzz"
    assert place == "meet      ========!="
    assert legend == LEGEND


class NoProcess:
    """A process that has ended."""

    pid = 0

    def poll(self) -> int | None:
        return 0
