"""Run the contestants on the slow link and on a link without limit, each in processes of its own, and write the page.

On the slow link steps are timed; their loss depends on no link, so it is learned on the fast one, where the same steps
are timed as well. Every finished launch is appended to the results file as one line of JSON, and a second call runs the
missing ones; a line of other plans or settings counts for nothing. The rehearsal cluster needs root, for network
namespaces.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.claims import judge, options_for_claims, read
from bench.keys import key_of
from bench.lab.launch import is_root
from bench.lab.launches import machine, run
from bench.lab.links import PRESET, overrides
from bench.slow.contestants import CONTESTANTS, FREE, JOB, RATES, SLOW, Entry, contestant
from bench.slow.page import claims, page, summarise
from terrace.base.files import write_atomic

TIMEOUT_S = 1200.0  # of one launch
Launch = tuple[int, str, Entry]  # round, links, contestant


def command(entry: Entry, links: str, num_spans: int) -> list[str]:
    """The command line that runs a contestant on these links."""
    rehearse = ["-m", "terrace", "rehearse", "run", "--cluster", PRESET, *overrides({"system": RATES[links]})]
    rank = ["-m", "bench.slow.rank", entry.name, "--spans", str(num_spans)]
    return [sys.executable, *rehearse, "--", sys.executable, *rank]


def num_spans(launch: Launch, options: argparse.Namespace) -> int:
    """Timed spans of a launch: in the first round on free links so many that --steps are taken at least."""
    number, links, entry = launch
    spans: int = options.spans
    return max(spans, -(-(options.steps - entry.warmup) // entry.span)) if (number, links) == (0, FREE) else spans


def launches(names: Sequence[str], rounds: int) -> list[Launch]:
    """All launches; the order of contestants flips from round to round."""
    found = list[Launch]()
    for number in range(rounds):
        order = names if number % 2 == 0 else names[::-1]
        found += [(number, links, contestant(name)) for links in (SLOW, FREE) for name in order]
    return found


def key(launch: Launch, options: argparse.Namespace) -> str:
    """The key of a line in the results file: contestant, job, links and length of a launch."""
    number, links, entry = launch
    return key_of(number, links, RATES[links], JOB, replace(entry, label=""), num_spans(launch, options))


def of_settings(records: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> list[Mapping[str, Any]]:
    """The records of launches with these settings, of all contestants."""
    wanted = {key(launch, options) for launch in launches([each.name for each in CONTESTANTS], options.rounds)}
    return [each for each in records if each.get("key") in wanted]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    names = [entry.name for entry in CONTESTANTS]
    parser = argparse.ArgumentParser(
        prog="python -m bench.slow", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="contestants to run")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--spans", type=int, default=2, help="timed spans on the slow link: cycles, or a few steps")
    parser.add_argument("--steps", type=int, default=200, help="steps learned, in round one on free links")
    parser.add_argument("--results", type=Path, default=Path("runs/slow.jsonl"))
    parser.add_argument("--page", type=Path, default=Path("docs/benchmarks/slow.md"))
    parser.add_argument("--fresh", action="store_true", help="put the results file aside first")
    options_for_claims(parser)
    return parser.parse_args(arguments)


def main() -> int:
    """Run the launches missing in the results file, and write the page from all of them."""
    options = parse()
    if not is_root():
        print("the rehearsal cluster needs root, for network namespaces")
        return 1
    if options.fresh and options.results.exists():
        options.results.rename(options.results.with_suffix(".old.jsonl"))
    options.results.parent.mkdir(parents=True, exist_ok=True)
    for launch in launches(options.only, options.rounds):
        number, links, entry = launch
        if any(each.get("key") == key(launch, options) for each in read(options.results)):
            continue
        begin_s, load = time.monotonic(), os.getloadavg()[0]
        error, found = entry.absence(), list[dict[str, Any]]()
        if not error:
            found, error = run(command(entry, links, num_spans(launch, options)), TIMEOUT_S)
        record = found[0] if found else {"contestant": entry.name, "error": error or "no result"}
        line = {"key": key(launch, options), **machine(), "links": links, "round": number, "load": load, **record}
        with options.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        words = f"{min(record['steps_s']):.2f} s a step" if found else record["error"]
        print(f"{links}, round {number + 1}, {entry.name}: {words} ({time.monotonic() - begin_s:.0f} s)", flush=True)
    records = of_settings(read(options.results), options)
    write_atomic(options.page, page(records))
    print(f"{options.page}: {len(records)} launches")
    return judge(claims(summarise(records)), options)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that links are taken down then, too
    sys.exit(main())
