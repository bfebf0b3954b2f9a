"""Random damage of every kind of file that a run leaves: `python -m tests.chaos.damage [--flips 1000 --seed 0]`.

A case damages one file, most often by one bit, and runs a command that reads it. It must be refused in one line,
repaired (the same bits, and a line that says so), without effect (the same bits), or said: the result differs, and a
line names the file or the setting, which a user may also have changed. Anything else is wrong: a traceback, a hang, a
result that differs silently. A file that `KINDS` does not know fails the campaign. `--only TEXT` keeps kinds with it.
"""

import argparse
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from terrace.launch.fork_server import start_fork_server
from terrace.launch.start import LocalPool
from tests.chaos.left import READERS, Ended, Scene

_TRAIN = ("train --resume", "train --resume auto")
_RESTART = ("restart from memory",)
_USE = ("eval", "generate", "export", "replay")
_EXPORT = ("eval of an export", "generate --chat of an export")
_RUN_REPORT = ("report of a killed run",)

# kind -> pattern of paths in the scene -> the commands that read such a file
KINDS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "config.toml": {
        r"run/config\.toml": (*_TRAIN, *_RUN_REPORT),
        r"finished/config\.toml": ("report", *_USE),
        r"copied/config\.toml": _RESTART,
    },
    "metrics.jsonl": {
        r"run/metrics\.jsonl": (*_TRAIN, *_RUN_REPORT),
        r"finished/metrics\.jsonl": ("report",),
        r"copied/metrics\.jsonl": _RESTART,
    },
    "events.jsonl": {
        r"run/events\.jsonl": (*_TRAIN, *_RUN_REPORT),
        r"finished/events\.jsonl": ("report",),
        r"copied/events\.jsonl": _RESTART,
    },
    "prediction.json": {
        r"run/prediction\.json": (_TRAIN[0], *_RUN_REPORT),
        r"finished/prediction\.json": ("report",),
        r"copied/prediction\.json": _RESTART,
    },
    "profile/": {r"run/profile/step-.*": _RUN_REPORT, r"finished/profile/step-.*": ("report",)},
    "report.json, loss.svg, report.html": {r"finished/(report\.json|loss\.svg|report\.html)": ("report",)},
    "sample.txt": {r"finished/sample\.txt": ("report",)},
    ".lock": {r"(run)/\.lock": _TRAIN, r"finished/\.lock": ("report", *_USE), r"copied/\.lock": _RESTART},
    "source/": {r"(run|copied)/source/.*": _TRAIN[:1], r"finished/source/.*": ("export", "eval", "generate")},
    "checkpoint: manifest": {
        r"run/checkpoints/step-0*4/manifest\.json": _TRAIN,
        r"finished/checkpoints/step-0*6/manifest\.json": _USE[:3],
        r"finished/checkpoints/step-0*4/manifest\.json": _USE[3:],
        r"copied/checkpoints/step-\d+/manifest\.json": _RESTART,
    },
    **{
        f"checkpoint: {part}": {
            r"run/checkpoints/step-0*4/rank-\d+\.safetensors": _TRAIN,
            r"finished/checkpoints/step-0*6/rank-\d+\.safetensors": _USE[:3],
            r"finished/checkpoints/step-0*4/rank-\d+\.safetensors": _USE[3:],
            r"copied/checkpoints/step-\d+/rank-\d+\.safetensors": _RESTART,
        }
        for part in ("header of tensors", "parameters", "optimizer state", "residuals")
    },
    "checkpoint before the newest": {r"run/checkpoints/step-0*2/.*": _TRAIN},
    "cache: tokens": {r"cache/.*\.tokens": (*_TRAIN, "replay")},
    "cache: mask of chats": {r"cache/.*\.mask": (*_TRAIN, "replay")},
    "cache: starts of documents": {r"cache/.*\.starts": (*_TRAIN, "replay")},
    "cache: checksums": {r"cache/.*\.sums": (*_TRAIN, "replay")},
    "cache: description": {r"cache/.*\.json": (*_TRAIN, "replay")},
    "cache: packing": {r"cache/.*\.packing\.npy": (*_TRAIN, "replay")},
    "killed tokeniser: journal": {r"torn/\..*\.journal\.json": ("tokenising again",)},
    "killed tokeniser: tokens, starts": {r"torn/\..*\.partial": ("tokenising again",)},
    "export: weights": {r"exported/model-.*\.safetensors": _EXPORT},
    "export: index": {r"exported/model\.safetensors\.index\.json": _EXPORT},
    "export: config.json": {r"exported/config\.json": _EXPORT},
    "export: tokenizer": {r"exported/tokenizer.*\.json": _EXPORT},
    "plan file": {r"plan/plan\.toml": ("simulate --plan",)},
    "cluster file": {r"probed/cluster\.toml": ("simulate --cluster",)},
    ".memory": {r"copied/\.memory": _RESTART},
    "copies in memory: tensors": {r"copies.*/.*/rank-\d+\.safetensors": _RESTART},
    "copies in memory: lists": {r"copies.*/.*/rank-\d+\.json": _RESTART},
}
OUTCOMES = ("refused", "repaired", "without effect", "said", "wrong")
_SAYS = re.compile(r"damaged|is not as it was written|is not valid|cannot read|lacks \d+ of the first|from disk")
_LATE = re.compile(r"HangError|TooLate|did not finish within|stopped at or before|no heartbeat")
_CHANGED = re.compile(r"\S+ .* -> .* since step \d+")  # a setting of a resumed run


@dataclass(frozen=True)
class Case:
    """A damage: `file` is a path in the scene, `how` what was done to it."""

    number: int
    kind: str
    file: str
    reader: str
    how: str


@dataclass(frozen=True)
class Judged:
    case: Case
    outcome: str
    why: str
    took_s: float


def kinds_of(files: Sequence[str]) -> dict[str, list[tuple[str, Sequence[str]]]]:
    """Kind -> its files and their readers; raises `AssertionError` for a file of no kind and a kind without files."""
    found: dict[str, list[tuple[str, Sequence[str]]]] = {kind: [] for kind in KINDS}
    for file in files:
        known = False
        for kind, patterns in KINDS.items():
            for pattern, readers in patterns.items():
                if re.fullmatch(pattern, file):
                    found[kind].append((file, readers))
                    known = True
        assert known, f"{file} is of no kind that the campaign knows: give it a kind and its readers"
    empty = [kind for kind, members in found.items() if not members]
    assert not empty, f"no run leaves a file of kind {empty}"
    return found


def damaged(raw: bytes, draw: random.Random, within: Sequence[tuple[int, int]], is_text: bool) -> tuple[bytes, str]:
    """Other bytes than `raw`, and what was done; a flipped bit is in one of the ranges `within`."""
    how = draw.choices(("bit", "cut", "sector", "twice", "more"), (16, 1, 1, 1, 1))[0] if raw else "more"
    digits = [place for place, byte in enumerate(raw) if byte in b"0123456789"] if is_text else []
    if how == "bit" and digits and draw.random() < 0.5:
        # Another digit: the text stays sound, which no parser notices.
        place = draw.choice(digits)
        return raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :], f"bit 0 of the digit {place} flipped"
    if how == "bit":
        first, end = draw.choices(within, [end - first for first, end in within])[0]
        place, bit = draw.randrange(first, end), draw.randrange(8)
        return raw[:place] + bytes([raw[place] ^ 1 << bit]) + raw[place + 1 :], f"bit {bit} of byte {place} flipped"
    if how == "cut":
        size = draw.randrange(len(raw))
        return raw[:size], f"cut to {size} of {len(raw)} bytes"
    if how == "sector":
        place = draw.randrange(-(-len(raw) // 512)) * 512
        size = min(512, len(raw) - place)
        return raw[:place] + bytes(size) + raw[place + size :], f"{size} bytes from {place} on zeroed"
    if how == "twice":
        place = draw.randrange(len(raw))
        size = min(draw.choice((1, 16, 512)), len(raw) - place)
        return raw[: place + size] + raw[place:], f"{size} bytes from {place} on doubled"
    size = draw.choice((1, 7, 512))
    return raw + draw.randbytes(size), f"{size} random bytes appended"


def _ranges(kind: str, raw: bytes) -> list[tuple[int, int]]:
    """Bytes of a file that are of the kind: of a checkpoint's tensors, those of a state."""
    part = kind.removeprefix("checkpoint: ")
    if part == "manifest" or not kind.startswith("checkpoint: "):
        return [(0, len(raw))]
    begin = 8 + int.from_bytes(raw[:8], "little")
    if part == "header of tensors":
        return [(0, begin)]
    wanted = {"parameters": r".*/(master|frozen)", "optimizer state": ".*/exp_avg.*", "residuals": "feedback/.*"}[part]
    table = json.loads(raw[8:begin])
    places = [entry["data_offsets"] for name, entry in table.items() if re.fullmatch(wanted, name)]
    return [(begin + first, begin + end) for first, end in places if end > first]


def campaign(scene: Scene, flips: int, seed: int, first: int = 0, only: str = "") -> Iterator[Judged]:
    """Play `flips` cases of these kinds, one after the other."""
    members = kinds_of(scene.files())
    number, played = first, 0
    names = [kind for kind in KINDS if only in kind]
    assert names, f"no kind has {only!r} in its name: {', '.join(KINDS)}"
    while played < flips:
        kind = list(KINDS)[number % len(KINDS)]
        if kind in names:
            each = _played(scene, number, random.Random(f"{seed} {number}"), kind, members[kind])
            if each.outcome == "wrong" and _LATE.search(each.why):  # or the machine was busy
                each = _played(scene, number, random.Random(f"{seed} {number}"), kind, members[kind])
            yield each
            played += 1
        number += 1


def _played(
    scene: Scene, number: int, draw: random.Random, kind: str, members: Sequence[tuple[str, Sequence[str]]]
) -> Judged:
    begin_s = time.monotonic()
    file, readers = draw.choice(members)
    path = scene.folder / file
    scene.restore()
    raw = path.read_bytes()
    within = _ranges(kind, raw)
    while not within:  # no rank has every state
        file, readers = draw.choice(members)
        path = scene.folder / file
        raw = path.read_bytes()
        within = _ranges(kind, raw)
    changed, how = damaged(raw, draw, within, path.suffix in (".toml", ".json", ".jsonl"))
    reader = draw.choice(list(readers))
    sound = scene.undisturbed(reader)
    times = path.stat()
    path.write_bytes(changed)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    case = Case(number, kind, file, reader, how)
    ended = READERS[reader](scene)
    outcome, why = judged(case, ended, sound) if changed != raw else ("without effect", "")
    return Judged(case, outcome, why, time.monotonic() - begin_s)


def judged(case: Case, ended: Ended, sound: Ended) -> tuple[str, str]:
    """(outcome, the line that decides it)."""
    if ended.bug or "Traceback" in ended.error or _LATE.search(ended.error):
        return "wrong", ended.bug or ended.error[-300:]
    if ended.code != 0:
        # A note on a file that has changed may stand before the error.
        lines = [line for line in ended.error.splitlines() if " is not as it was written: " not in line]
        fits = ended.code in (1, 2) and len(lines) == 1 and lines[0].startswith("terrace: error: ")
        return ("refused" if fits else "wrong"), f"code {ended.code}: {ended.error[-300:].strip()}"
    before = {*sound.out.splitlines(), *sound.error.splitlines()}
    new = [line for line in (*ended.out.splitlines(), *ended.error.splitlines()) if line not in before]
    name = Path(case.file).stem
    saying = next((line for line in new if (_SAYS.search(line) and name in line) or _CHANGED.match(line)), "")
    if ended.results == sound.results:
        return ("repaired" if saying else "without effect"), saying
    differs = [
        name for name in {**ended.results, **sound.results} if ended.results.get(name) != sound.results.get(name)
    ]
    return ("said" if saying else "wrong"), saying or f"{', '.join(differs)} differ, and nothing is said"


def table(found: Sequence[Judged]) -> str:
    """Counts of cases by kind of file and outcome."""
    counts = Counter((each.case.kind, each.outcome) for each in found)
    lines = ["| file | " + " | ".join(OUTCOMES) + " |", "|---|" + "---|" * len(OUTCOMES)]
    for kind in KINDS:
        row = [counts[kind, outcome] for outcome in OUTCOMES]
        if any(row):
            lines.append(f"| {kind} | " + " | ".join(str(count) if count else "" for count in row) + " |")
    total = [sum(counts[kind, outcome] for kind in KINDS) for outcome in OUTCOMES]
    lines.append(f"| all {len(found)} | " + " | ".join(map(str, total)) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first case")
    parser.add_argument("--only", default="", metavar="TEXT", help="kinds of files whose name has the text")
    parser.add_argument("--all", action="store_true", help="print every case, not only those that are wrong")
    options = parser.parse_args()
    found = []
    with made_scene() as scene:
        for each in campaign(scene, options.flips, options.seed, options.first, options.only):
            found.append(each)
            if each.outcome == "wrong" or options.all:
                case = each.case
                again = f"python -m tests.chaos.damage --seed {options.seed} --first {case.number} --flips 1"
                print(f"{each.outcome}: {case.kind}, {case.file}, {case.how}, {case.reader} ({each.took_s:.1f} s)")
                print(f"    {each.why}\n    repeat: {again}", flush=True)
    print(table(found))
    return int(any(each.outcome == "wrong" for each in found))


@contextmanager
def made_scene() -> Iterator[Scene]:
    """A scene with its pool of two ranks, on a file system in memory where there is one."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    start_fork_server("tests.chaos.left")
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="terrace-damage-", dir=parent) as folder, LocalPool(2) as pool:
        scene = Scene(Path(folder), pool)
        try:
            scene.make()
            yield scene
        finally:
            scene.close()


if __name__ == "__main__":
    sys.exit(main())
