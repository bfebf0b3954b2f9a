"""The input of every rank of `terrace train`, and its text for ranks that did not prepare it.

The text is parsed by a strict schema, never unpickled.
"""

import hashlib
import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from terrace.base.errors import ConfigError
from terrace.base.schema import dump, load
from terrace.checkpoint.layout import latest
from terrace.data.batches import Source
from terrace.data.eval_batches import EvalSource
from terrace.train.config import RunConfig, run_toml
from terrace.train.deals import Dealt
from terrace.train.rules import checked_run
from terrace.train.runs import again


@dataclass(frozen=True, kw_only=True)
class JobInputs:
    """Inputs of every rank besides the run: the folder, the data, and the checkpoint to resume from.

    `config` is the new content of config.toml, if the folder has one of an earlier start; rank 0 writes it once all
    ranks are ready and it holds the folder's lock. `changes` lists settings that differ from that file's. `memory` is
    the manifest of a checkpoint in the memory of machines, and `resume` is then its folder on this one. `eval_sources`
    are only evaluated. `deals` are the shares that the run had dealt by then, and deals in the steps that it repeats.
    """

    folder: Path
    sources: tuple[Source, ...]
    tokenizer_fingerprint: str
    resume: Path | None = None
    config: str = ""
    changes: tuple[str, ...] = ()
    memory: str = ""
    eval_sources: tuple[EvalSource, ...] = ()
    deals: tuple[Dealt, ...] = ()
    command: str = "terrace"  # as the user has called it


@dataclass(frozen=True, kw_only=True)
class RunJob(JobInputs):
    run: RunConfig

    def again(self) -> str:
        """The user's command to continue the run, with a note on the saved checkpoints."""
        return again(self.command, self.folder, "train", is_saved=latest(self.folder) is not None)


@dataclass(frozen=True, kw_only=True)
class _JobText(JobInputs):
    run: str  # TOML


@dataclass(frozen=True, kw_only=True)
class _Sources:
    sources: tuple[Source, ...]
    eval_sources: tuple[EvalSource, ...]


def job_text(job: RunJob) -> str:
    """The job as JSON; `read_job` restores an equal one."""
    return json.dumps(dump(_JobText(**vars(job) | {"run": run_toml(job.run)})))


def read_job(text: str) -> RunJob:
    """Inverse of `job_text`. Raises `ConfigError` for anything else."""
    try:
        table = load(_JobText, json.loads(text), "job")
        run = tomllib.loads(table.run)
    except ValueError as error:
        raise ConfigError(f"the job of rank 0 cannot be read ({error}): start the run again") from error
    return RunJob(**vars(table) | {"run": checked_run(run)})


def sources_text(sources: Sequence[Source], eval_sources: Sequence[EvalSource] = ()) -> str:
    """Prepared sources as JSON, for the ranks of this machine; `read_sources` restores equal ones."""
    return json.dumps(dump(_Sources(sources=tuple(sources), eval_sources=tuple(eval_sources))))


def read_sources(text: str) -> tuple[tuple[Source, ...], tuple[EvalSource, ...]]:
    found = load(_Sources, json.loads(text), "sources")
    return found.sources, found.eval_sources


def section_digests(run: RunConfig) -> dict[str, str]:
    """A digest of every section of a configuration, by which ranks detect differences."""
    table = tomllib.loads(run_toml(run))
    return {
        name: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]
        for name, value in table.items()
    }
