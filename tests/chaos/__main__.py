"""Kills and stalls at random instants, each run resumed and compared bit by bit: `python -m tests.chaos`.

Seeded: case N of a seed strikes the same plan in the same way, at an instant that depends on the machine's load. A
failure is one line with the command that repeats it. `--only TEXT` keeps the cases whose plan or strike has the text.
"""

import argparse
import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.chaos.plans import CASES, Case
from tests.chaos.play import Result, play, reference
from tests.chaos.scene import Scene, private_mounts
from tests.chaos.strikes import Clock, Strike, drawn
from tests.chaos.torchrun import MOST_RANKS, SHARE, drawn_under

_SECOND = 0.2  # of the cases: their first resume is struck, too


def case_of(seed: int, number: int) -> tuple[Case, list[Strike]]:
    """The plan and the strikes of a case. Plans take turns, so that a few cases in a row share none."""
    generator = random.Random(f"{seed} {number}")
    order = random.Random(seed).sample(CASES, len(CASES))
    case = order[number % len(order)]
    strikes = [drawn(generator, case.num_ranks)]
    # A generator of its own, so that the other cases stay what they were.
    under = random.Random(f"{seed} {number} torchrun")
    if case.num_ranks <= MOST_RANKS and under.random() < SHARE:
        return case, [drawn_under(under, case.num_ranks)]
    if generator.random() < _SECOND and strikes[0].phase != "exporting":
        strikes.append(drawn(generator, case.num_ranks))
    return case, strikes


def campaign(seed: int, numbers: Sequence[int], only: str, folder: Path, undisturbed: Path, kept: Path) -> None:
    """Play the cases one after the other and add a line for each to `kept`; undisturbed runs are made once a plan."""
    scene, clocks = Scene(folder / "scene"), dict[str, Clock]()
    for number in numbers:
        case, strikes = case_of(seed, number)
        if only not in f"{case.name} {'; '.join(map(str, strikes))}":
            continue
        whole = undisturbed / case.name
        if case.name not in clocks:
            clocks[case.name] = _clock_of(whole, case)
        result = play(scene, case, whole, clocks[case.name], strikes)
        what = f"case {number}, {case.name}: {'; then '.join(map(str, strikes))}: {', '.join(result.ends)}"
        named = "".join(f", named after {each:.1f} s" for each in result.named_s)
        print(f"{what}{named}", flush=True)
        for wrong in result.wrong:
            again = f"python -m tests.chaos --seed {seed} --first {number} --cases 1"
            print(f"FAILED {what}: {wrong}; repeat: {again}", flush=True)
        with kept.open("a") as file:
            file.write(json.dumps(_record(seed, number, result)) + "\n")


def _clock_of(whole: Path, case: Case) -> Clock:
    timed = whole / "clock.json"
    if not timed.exists():
        # Made elsewhere and renamed, since another campaign may share the folder.
        making = whole.with_name(f".{os.getpid()} {whole.name}")
        clock = reference(making, case)
        (making / timed.name).write_text(json.dumps(asdict(clock)))
        if not timed.exists():
            making.rename(whole)
    return Clock(**json.loads(timed.read_text()))


def _record(seed: int, number: int, result: Result) -> dict[str, Any]:
    first = result.strikes[0]
    return {
        "seed": seed,
        "case": number,
        "plan": result.case.name,
        "signal": f"{first.signal} to {first.victim}" + ", torchrun" * (first.restarts is not None),
        "phase": first.phase,
        "strikes": len(result.strikes),
        "ends": result.ends,
        "named_s": result.named_s,
        "is_whole": result.is_whole,
        "wrong": result.wrong,
    }


_ENDS = ("named", "stopped in order", "killed", "went on", "missed", "other")


def tables(records: Sequence[dict[str, Any]]) -> str:
    """Counts of cases by plan, by signal and by phase; ends are those of struck runs, of which a case may have two."""
    lines = []
    for key in ("plan", "signal", "phase", "all"):
        lines.append(f"\n{key:32}{'cases':>6}{'whole':>6}{'wrong':>6}" + "".join(f"{end:>18}" for end in _ENDS))
        for group in sorted({record.get(key, key) for record in records}):
            lines.append(f"{group:32}{_counts([record for record in records if record.get(key, key) == group])}")
    named_s = sorted(each for record in records for each in record["named_s"])
    if named_s:
        middle, last = named_s[len(named_s) // 2], named_s[-1]
        lines.append(f"culprits named: {len(named_s)}, after {middle:.1f} s (median), {last:.1f} s at most")
    return "\n".join(lines)


def _counts(records: Sequence[dict[str, Any]]) -> str:
    ends = Counter(end for record in records for end in record["ends"])
    num_whole, num_wrong = (sum(map(bool, (record[key] for record in records))) for key in ("is_whole", "wrong"))
    return f"{len(records):6}{num_whole:6}{num_wrong:6}" + "".join(f"{ends[end]:18}" for end in _ENDS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first case")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--results", type=Path, metavar="FILE", help="add a line for each case, and show all of them")
    parser.add_argument("--undisturbed", type=Path, metavar="FOLDER", help="keep undisturbed runs for later campaigns")
    options = parser.parse_args()
    if not private_mounts():
        print("/dev/shm is shared with other processes, whose files would count as left over", flush=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="terrace-chaos-") as folder:
        kept = options.results or Path(folder) / "results.jsonl"
        numbers = range(options.first, options.first + options.cases)
        undisturbed = options.undisturbed or Path(folder) / "undisturbed"
        campaign(options.seed, numbers, options.only, Path(folder), undisturbed, kept)
        records = [json.loads(line) for line in kept.read_text().splitlines()]
    print(tables(records), flush=True)
    return int(any(record["wrong"] for record in records))


if __name__ == "__main__":
    sys.exit(main())
