"""The command lines of `terrace rehearse` and `terrace data lengths`."""

from pathlib import Path
from typing import Any, Literal

from terrace.cli.lines import CLUSTER_EPILOG
from terrace.cli.option import Line, flag, option


class Rehearse(Line):
    description = (
        "Emulate a cluster on this machine by network namespaces and rate limits. Needs Linux and root, except for run "
        "--paced and for faults (run --islands, run --fault)."
    )


class Emulated(Line):
    epilog = CLUSTER_EPILOG
    cluster: str | None = option("NAME|FILE", "cluster preset or TOML file to emulate, e.g. lab")
    scale: float = option(
        "F",
        "multiply every bandwidth and divide every latency by F (default: 1). Compute does not scale: choose F so that "
        "it stands to the network as on the real machine",
        1.0,
    )


class Run(Emulated):
    run = "terrace.lab.commands.rehearse:run"
    usage = (
        "terrace rehearse run --cluster NAME|FILE [--scale F] [--counters FILE] -- COMMAND ...\n"
        "       terrace rehearse run [--islands N] --fault 'WHO WHAT WHERE' ... -- terrace train ...\n"
        "       terrace rehearse run --paced [--scale F] -- terrace ..."
    )
    counters: Path | None = option("FILE", "write (or replace) the bytes every link carried, as JSON")
    paced: bool = flag(
        "build no network and need no root: the command, a `terrace` one, holds its own messages to the rates of the "
        "cluster it names"
    )
    islands: int | None = option(
        "N", "islands with which the run begins, numbered from 0: a roster of processes, without a network and root"
    )
    fault: list[str] | None = option(
        "FAULT",
        "a fault, such as 'island 2 kill at exchange 3', or 'rank 1 kill at step 5' in a run without islands; may be "
        "given several times",
    )
    folder: Path | None = option(
        "DIR", "run folder to make, with those of all islands, their output and the log (default: in runs/)"
    )


class Check(Emulated):
    run = "terrace.lab.commands.rehearse:check"


class Clean(Line):
    run = "terrace.lab.commands.rehearse:clean"


class Lengths(Line):
    run = "terrace.lab.commands.lengths:run"
    usage = "terrace data lengths [PATH] [options]"
    description = (
        "Print a histogram of the lengths of documents, and the cost of each balance policy for a batch of them on a "
        "cluster whose ranks all attend together. PATH is any source for data.path: text, JSONL, Parquet, a folder of "
        "them, a token file."
    )
    epilog = (
        "How the corpus is read can be set as for a run, e.g. --data.tokenizer FILE or --data.column NAME, and any "
        "figure of the cluster as --cluster.key VALUE."
    )
    data: str | None = option("PATH", "the same as PATH: any source for data.path")
    distribution: Literal["magiattention", "arxiv", "github", "bimodal", "one-huge"] | None = option(
        None, "a built-in distribution, in place of a path"
    )
    model: str | None = option("PATH", "Hugging Face config.json, or its folder (default: a small Llama-style decoder)")
    cluster: str | None = option("NAME|FILE", "cluster preset or TOML file (default: local)")
    sequence: int = option("S", "tokens of a sequence (default: %(default)s)", 8192)
    batch: int | None = option("B", "sequences of a batch (default: one a rank)")
    picture: Path | None = option("FILE", "write (or replace) a picture, an SVG file")
    out: Path | None = option(
        "FILE", "file of lengths to write (or replace), one a line and cut at a sequence, as --lengths reads it"
    )


def add_rehearse(commands: Any) -> None:
    actions = Rehearse.add_to(commands, "rehearse").add_subparsers(
        dest="action", required=True, metavar="run|check|clean"
    )
    Run.add_to(actions, "run", help="run a program as every rank of the cluster")
    Check.add_to(actions, "check", help="build the network and measure every tier of it")
    Clean.add_to(actions, "clean", help="remove leftovers of killed rehearsals")


def add_lengths(actions: Any) -> None:
    Lengths.add_to(actions, "lengths", help="lengths of documents, and costs of balance policies")
