"""The page of the benchmarks: a row for each claim, and the bounds of figures that miss their goals."""

import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from bench.claims import Claim

_HEADER = ("claim", "found (quartiles)", "goal", "", "rival", "load", "run", "commit")


def page(records: Sequence[Mapping[str, Any]]) -> str:
    """The page in Markdown, from the records of the results file."""
    claims = [claim_of(record) for record in records]
    rows = [
        (
            claim.name,
            claim.found_words,
            claim.goal_words,
            "met" if claim.is_met else "**missed**",
            claim.rival or "-",
            f"{record['claim']['load']:.1f}",
            record["run"],
            f"{record['commit'] or '-'}, {record['date']}",
        )
        for record, claim in zip(records, claims, strict=True)
    ]
    missed = [claim for claim in claims if not claim.is_met]
    parts = [
        "# Benchmarks: every claim and its figure",
        f"`make bench` measures and writes this page: {len(claims)} claims, {len(missed)} missed. {_machine()}",
        _METHOD,
        table(_HEADER, rows),
        "## What bounds the missed ones",
        "\n".join(f"- {claim.name}: {claim.bound or 'not known yet'}" for claim in missed) or "None is missed.",
    ]
    return "\n\n".join(parts) + "\n"


def claim_of(record: Mapping[str, Any]) -> Claim:
    names = {field.name for field in fields(Claim)}
    return Claim(**{name: value for name, value in record["claim"].items() if name in names})


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows))


def _machine() -> str:
    try:
        names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        names = []
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{names[0] if names else platform.machine()}, {cores} cores, Python {platform.python_version()}."


_METHOD = """A figure without a unit is a ratio to the rival: contestants take turns, each in processes of its own
where it has ranks, and the figure is the median over rounds of the ratio within a round. Load is the load average when
a benchmark ended, its own ranks included. What each benchmark runs is in [bench](../../bench/README.md)."""
