"""Run the benchmarks one after the other, and write their claims to `docs/benchmarks/summary.md`.

    make bench                                 all of them: under 40 minutes on two idle cores, 50 with the lab
    make bench ARGS="--only planner,codecs"    some; the other rows of the page stay as they are

Each benchmark is a process of its own and leaves its claims in a file; a crash loses only its own rows, and the exit
code says that there was one. Figures that miss their goals do not fail: they are on the page, with their bounds.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.claims import read
from bench.lab.launch import child_environment, is_root
from bench.summary import page
from terrace.base.files import write_atomic

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = Path("docs/benchmarks/summary.md"), Path("runs/bench.jsonl")


@dataclass(frozen=True)
class Run:
    """A command of the record, `python -m bench.<words>`; it may be cut off after `limit_s` seconds."""

    name: str
    words: str
    limit_s: float = 900.0
    needs_root: bool = False
    extra: str = ""  # of Terrace, and the module that it installs

    @property
    def obstacle(self) -> str:
        """Why it cannot run here, or ""."""
        if self.extra and find_spec(self.extra) is None:
            return f"it needs the extra {self.extra}"
        return "it needs root, for network namespaces or cgroups" if self.needs_root and not is_root() else ""


RUNS = (
    Run("one-rank", "one_rank --rounds 20"),
    Run("one-rank-hf", "one_rank --rounds 20 --model transformers"),
    Run("fsdp-512", "against_fsdp --hidden 512 --rounds 6"),
    Run("fsdp-1024", "against_fsdp --hidden 1024 --micros 1 --rounds 4"),
    Run("tensor-512", "against_tensor --rounds 6"),
    Run("tensor-1024", "against_tensor --hidden 1024 --intermediate 2816 --ranks 4 --rounds 5"),
    Run("pipelining-512", "against_pipelining --hidden 512 --layers 8 --sequence 256 --micros 8 --ranks 4 --rounds 4"),
    Run(
        "pipelining-1024",
        "against_pipelining --hidden 1024 --layers 6 --micros 8 --ranks 4 --rounds 3 --only 1f1b zbv zero3",
    ),
    Run("attention", "attention --tokens 512 2048"),
    Run("context", "context --only one-rank"),
    Run("codecs", "codecs"),
    Run("experts", "experts"),
    Run("expert-chunks", "expert_chunks"),
    Run("checkpoint", "checkpoint --rounds 3"),
    Run("peer-copies", "peer_copies"),
    Run("members", "members", needs_root=True),
    Run(
        "members-pipeline",
        "members --pipeline --quotas 0.6 0.3 0.3 --layers 12 --sequence 128 --rounds 5",
        needs_root=True,
    ),
    Run("following", "following --rounds 2 --micros 6 --sequence 48 --steps 45", needs_root=True),
    Run("boundaries", "boundaries --rounds 2"),
    Run("assign", "assign --gpus 8 128"),
    Run("feeding", "feeding"),
    Run("generation", "generation"),
    Run("rollout", "rollout"),
    Run("trl", "against_trl --rounds 8", extra="trl"),
    Run("planner", "planner --rounds 5"),
    Run("simulator", "simulator"),
    # The contestants of the targets alone, in one round: `make bench-lab` measures all of them.
    Run(
        "lab",
        "lab --fresh --rounds 1 --minutes 10 --results runs/lab-targets.jsonl "
        "--only 'compute,hsdp,hsdp x4,zero3 x4,terrace three-level-compressed'",
        needs_root=True,
    ),
)


def run(what: Run, common: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """(records of a benchmark's claims, error in one line or \"\")."""
    with tempfile.TemporaryDirectory() as folder:
        claims = Path(folder) / "claims"
        module, *words = shlex.split(what.words)
        command = [sys.executable, "-m", f"bench.{module}", *words, "--claims", str(claims)]
        try:
            code = subprocess.run(
                command, cwd=ROOT, env=child_environment(), timeout=what.limit_s, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return [], f"did not end within {what.limit_s:g} s"
        lines = claims.read_text(encoding="utf-8").splitlines() if claims.exists() else []
    records = [{**common, "run": what.name, "claim": json.loads(line)} for line in lines]
    return records, f"exit {code}" if code else "" if records else "no claim was made"


def commit() -> str:
    """The commit that is measured, marked when files differ from it, or \"\" outside a repository."""
    words = ["git", "describe", "--always", "--dirty", "--abbrev=9", "--exclude=*"]
    found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else ""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options. Exits with 2 for a name that is none of the runs'."""
    names = [each.name for each in RUNS]
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help=f"names separated by commas, of: {', '.join(names)}")
    parser.add_argument("--results", type=Path, default=ROOT / RESULTS, help=f"default: {RESULTS}")
    parser.add_argument("--page", type=Path, default=ROOT / PAGE, help=f"default: {PAGE}")
    options = parser.parse_args(arguments)
    options.names = options.only.split(",") if options.only else names
    if unknown := [name for name in options.names if name not in names]:
        parser.error(f"unknown: {', '.join(unknown)}; benchmarks are {', '.join(names)}")
    return options


def main() -> int:
    """Run the chosen benchmarks, keep the records, write the page; 1 when a benchmark failed."""
    options, failed = parse(), []
    for what in RUNS:
        if what.name not in options.names:
            continue
        if what.obstacle:
            print(f"\n== {what.name}: skipped: {what.obstacle}", flush=True)
            continue
        print(f"\n== {what.name}: python -m bench.{what.words}", flush=True)
        common = {"date": datetime.now(UTC).date().isoformat(), "commit": commit()}
        begin_s = time.monotonic()
        records, error = run(what, common)
        print(f"== {what.name}: {time.monotonic() - begin_s:.0f} s{error and f', FAILED: {error}'}", flush=True)
        failed += [what.name] if error else []
        if records:
            kept = [record for record in read(options.results) if record["run"] != what.name]
            options.results.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(options.results, "".join(json.dumps(record) + "\n" for record in [*kept, *records]))
    order = {each.name: number for number, each in enumerate(RUNS)}
    found = sorted(read(options.results), key=lambda record: order.get(record["run"], len(order)))
    write_atomic(options.page, page(found))
    print(f"\n{options.page}: {len(found)} claims" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
