"""One case of the campaign: a run that is struck, resumed until it is whole, and compared with the undisturbed run."""

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from terrace.base.errors import TerraceError
from terrace.checkpoint.layout import complete
from terrace.checkpoint.reading import Checkpoint
from terrace.train.recorder import EVENTS
from tests.chaos.plans import STEPS, TIMEOUT_S, Case, write_case
from tests.chaos.scene import Scene
from tests.chaos.strikes import Clock, Markers, Strike, Struck, strike
from tests.chaos.torchrun import LEAVE_S, Torchrun, judged, of_terrace
from tests.support import warm
from tests.support.folders import bytes_of
from tests.support.tiny_runs import environment, metrics

LIMIT_S = 150.0
GRACE_S = 10.0  # of `launch_local`: a stopped rank is ended after it
NAMED_S = TIMEOUT_S + GRACE_S + 6.0  # and a few seconds of a busy machine
RESUMES = 3
WORDS = ("train", "--config", "run.toml", "--folder", "run", "--resume", "auto")
REHEARSE = ("rehearse", "run", "--paced", "--scale", "1000", "--", "terrace")
EXPORT = ("export", "run", "exported")


@dataclass
class End:
    """How a command ended; `struck` is None where no process was left to strike."""

    code: int
    errors: str
    took_s: float
    struck: Struck | None = None
    orphans: int = 0


@dataclass
class Result:
    """Outcome of a case: how its struck runs ended, and everything that is wrong."""

    case: Case
    strikes: Sequence[Strike]
    ends: list[str] = field(default_factory=list)
    named_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    is_whole: bool = False  # every step made, with the numbers of the undisturbed run


def reference(folder: Path, case: Case) -> Clock:
    """Makes the undisturbed run of a case in `folder`, and returns how long its phases took."""
    write_case(folder, case)
    command, begin_s = warm.Command(WORDS, folder, environment()), time.monotonic()
    markers, passed = Markers(folder, command.pid, case.num_ranks, STEPS), dict[str, float]()
    tests: dict[str, Callable[[], bool]] = {
        "ranks": markers.ranks_exist,
        "measured": markers.is_measured,
        "first": lambda: markers.num_lines() >= 1,
        "last": lambda: markers.num_lines() >= STEPS,
    }
    with ThreadPoolExecutor(1) as reader:
        said = reader.submit(command.communicate, LIMIT_S)
        while not said.done():
            for name, come in tests.items():
                if name not in passed and come():
                    passed[name] = time.monotonic() - begin_s
            time.sleep(0.005)
        _, errors = said.result()
    end_s = time.monotonic() - begin_s
    if command.returncode != 0 or len(passed) < len(tests):
        raise RuntimeError(f"the undisturbed run of {case.name} failed: {errors or passed}")
    begin_s = time.monotonic()
    warm.run(EXPORT, folder, environment(), LIMIT_S)
    return Clock(
        exporting=time.monotonic() - begin_s,
        starting=passed["ranks"],
        calibrating=passed["measured"] - passed["ranks"],
        step=(passed["last"] - passed["first"]) / (STEPS - 1),
        ending=end_s - passed["last"],
    )


def play(scene: Scene, case: Case, whole: Path, clock: Clock, strikes: Sequence[Strike]) -> Result:
    """Strike a run and its resumes in turn, resume it until it is whole, and compare it with that in `whole`."""
    result, folder = Result(case, strikes), scene.folder / "case"
    shutil.rmtree(folder, ignore_errors=True)
    write_case(folder, case)
    if strikes[0].phase == "exporting":
        shutil.copytree(whole / "run", folder / "run")
    if not any(each.phase == "tokenising" for each in strikes):
        shutil.copytree(whole / "cache", folder / "cache")
    for each in strikes:
        words = {"exporting": EXPORT, "rehearsing": (*REHEARSE, *WORDS)}.get(each.phase, WORDS)
        end = _attempt(scene, folder, case, each, clock, words)
        _judge_struck(end, each, result)
        _look(folder, scene, result, resumes=True)
    exports = any(each.phase == "exporting" for each in strikes)
    # A killed export leaves its remains to the next.
    wanted = [WORDS] * (strikes[0].phase != "exporting") + [EXPORT] * exports
    if not all(_is_completed(scene, folder, case, clock, words, result) for words in wanted):
        return result
    _look(folder, scene, result, resumes=False)
    different = differences(whole / "run", folder / "run")
    # Later in a case, what is exported may be an earlier checkpoint.
    if strikes[0].phase == "exporting" and (ours := bytes_of(folder / "exported")) != (
        there := bytes_of(whole / "exported")
    ):
        different.append(f"exported {sorted(ours)}, not {sorted(there)}, or with other contents")
    result.is_whole = not different
    result.wrong += different + _left_in(folder)
    return result


def differences(whole: Path, run: Path) -> list[str]:
    """What two run folders of the same plan differ in: lines of metrics, names and values of tensors."""
    found = []
    keys = ("step", "loss", "grad_norm", "learning_rate")
    ours, theirs = ([tuple(line[key] for key in keys) for line in metrics(each)] for each in (run, whole))
    if ours != theirs:
        first = next((a for a, b in zip(ours, theirs, strict=False) if a != b), (len(ours),))[0]
        found.append(f"metrics differ from step {first} on ({len(ours)} of {len(theirs)} steps)")
    mine, other = (Checkpoint(each / "checkpoints" / f"step-{STEPS:08d}") for each in (run, whole))
    for block in other.layout:
        values, there = mine.read(block), other.read(block)
        for name, kinds in there.items():
            for kind, value in kinds.items():
                if not torch.equal(values[name][kind], value):
                    found.append(f"{block}.{name}/{kind} differs")
    return found[:3]


def unsound(folder: Path) -> list[str]:
    """Damage of the checkpoints of the run in `folder`."""
    found = []
    for path in complete(folder / "run" / "checkpoints"):
        try:
            Checkpoint(path).verify()
        except TerraceError as error:
            found.append(f"damaged: {error}")
    return found


def _attempt(scene: Scene, folder: Path, case: Case, what: Strike | None, clock: Clock, words: Sequence[str]) -> End:
    command: warm.Command | Torchrun
    if what is not None and what.restarts is not None:
        command = Torchrun(words, folder, environment(), case.num_ranks, what.restarts)
    else:
        command = warm.Command(words, folder, environment())
    markers, struck = Markers(folder, command.pid, case.num_ranks, STEPS), None
    with ThreadPoolExecutor(1) as reader:
        said = reader.submit(command.communicate, LIMIT_S)
        if what is not None and markers.wait(what, clock):
            struck = strike(what, command.pid, TIMEOUT_S)
        begin_s = time.monotonic() if struck is None else struck.at_s
        try:
            _, errors = said.result()
        except subprocess.TimeoutExpired:
            errors = f"did not end within {LIMIT_S:g} s"
    took_s = time.monotonic() - begin_s
    code = command.returncode
    if isinstance(command, Torchrun):
        orphans = len(scene.orphans(LEAVE_S))
        errors = command.errors()  # of ranks that ended after torchrun, too
    else:
        orphans = len(scene.orphans())
    return End(-1000 if code is None else code, errors, took_s, struck, orphans)


def _is_completed(scene: Scene, folder: Path, case: Case, clock: Clock, words: Sequence[str], result: Result) -> bool:
    if words == EXPORT and (folder / EXPORT[-1]).exists():
        return True  # renamed when it was whole; its contents are compared
    for _ in range(RESUMES):
        end = _attempt(scene, folder, case, None, clock, words)
        if end.code == 0:
            if end.errors.strip():
                result.wrong.append(f"a resume said: {end.errors.strip()[-400:]}")
            return True
        result.wrong.append(f"a resume ended with {end.code}: {end.errors.strip()[-400:]}")
    return False


def _judge_struck(end: End, what: Strike, result: Result) -> None:
    """Note how a struck run ended, and what should not have been so."""
    said = end.errors.strip()
    wrong, lines = result.wrong, said.splitlines() if what.restarts is None else of_terrace(said)
    if end.orphans:
        wrong.append(f"{end.orphans} processes were left over")
    if end.struck is None:
        result.ends.append("missed")
    elif what.restarts is not None:
        how, fault = judged(what, end.code, end.took_s, end.errors, end.struck.pids, NAMED_S)
        result.ends.append(how)
        result.named_s += [end.took_s] * (how == "named")
        wrong += [fault] * bool(fault)
        return
    elif end.code == 0:
        result.ends.append("went on")
        if what.victim == "worker" and what.signal in ("SIGKILL", "SIGSTOP") and what.phase != "ending":
            wrong.append("a run without one of its ranks ended well")
    elif what.victim != "worker" and end.code == -signal.SIGKILL:
        result.ends.append("killed")
        return
    elif end.code in (143, 130, -signal.SIGTERM, -signal.SIGINT) and what.signal in ("SIGTERM", "SIGINT"):
        result.ends.append("stopped in order")
    elif end.code == 1 and what.victim == "fork server" and "the fork server of the ranks ended" in end.errors:
        result.ends.append("named")
        result.named_s.append(end.took_s)
    elif end.code == 1 and what.victim == "worker" and _names(end, what):
        result.ends.append("named")
        result.named_s.append(end.took_s)
        if end.took_s > NAMED_S:
            wrong.append(f"the culprit was named after {end.took_s:.1f} s")
    else:
        result.ends.append("other")
        wrong.append(f"ended with {end.code}: {end.errors.strip()[-400:]}")
    if len(lines) > 1 or "Traceback" in end.errors:
        wrong.append(f"{len(lines)} lines on stderr: {end.errors.strip()[-400:]}")


def _names(end: End, what: Strike) -> bool:
    assert end.struck is not None
    first = re.search(r"rank (\d+)", end.errors)
    return f"pid {end.struck.pids[0]}" in end.errors or (first is not None and int(first[1]) == what.rank)


def _look(folder: Path, scene: Scene, result: Result, *, resumes: bool) -> None:
    result.wrong += unsound(folder)
    if left := scene.leftovers(resumes=resumes):
        result.wrong.append(f"left over: {', '.join(left)}")


def _left_in(folder: Path) -> list[str]:
    """Hidden files in the folders of a run that has ended well, but its lock; and lines of events that are torn."""
    hidden = [path for path in (*folder.rglob(".*"),) if path.name != ".lock"]
    found = [f"left over: {path.relative_to(folder)}" for path in hidden]
    found += [
        f"{EVENTS} has a damaged line"
        for line in (folder / "run" / EVENTS).read_text().splitlines()
        if line and not line.endswith("}")
    ][:1]
    return found
