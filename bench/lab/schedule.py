"""The order of a run of the lab, the trials it takes, and the seconds it will need."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bench.lab.contest import model_of
from bench.lab.entries import CONTESTANTS, TRIED_ACCUM, Entry, Trial
from bench.lab.job import BF16_BYTES, MEMORY_LIMIT_BYTES, TRIAL_STEPS, WARMUP_STEPS, Job, floor
from bench.lab.links import FRONTIER
from terrace.model.blocks import num_params

DROPPED_AT = 2.0  # a trial is given up after its first step when that took so many times the fastest trial's step

# Guesses for the estimate, from runs on two idle cores: processes and links until the first step, a sequence computed
# by all ranks, and what messages inside a node and of eight busy processes add to each sequence.
_LAUNCH_S, _SEQUENCE_S, _MESSAGES_S = 15.0, 0.4, 0.5

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Task:
    """One launch of a contestant: all of its trials, or its measured cases in a round."""

    kind: Literal["trials", "cases"]
    links: str
    entry: Entry
    round: int = 0


def tasks(names: Sequence[str], links: Sequence[str], rounds: int) -> list[Task]:
    """All launches of a run. Central contestants are measured on all links and in every round, others once."""
    found = [Task("trials", links[0], CONTESTANTS[0])]  # the proportion of Frontier needs the seconds of `compute`
    for number in range(rounds):
        for where in links:
            is_all = number == 0 and where != FRONTIER
            entries = [entry for entry in CONTESTANTS if entry.name in names and (entry.is_central or is_all)]
            for entry in entries if number % 2 == 0 else reversed(entries):
                trials = Task("trials", where, entry)
                if len(entry.trials) > 1 and trials not in found:
                    found.append(trials)
                found.append(Task("cases", where, entry, number))
    return found


def missing(task: Task, records: Sequence[Record], accums: Sequence[int], retry: bool = False) -> list[Any]:
    """Names of trials, or accumulations, of a task without a record; with `retry`, a failure is none."""
    key, wanted = ("trial", [trial.name for trial in task.entry.trials]) if task.kind == "trials" else ("accum", accums)
    done = {
        record[key]
        for record in _own(records, task.kind, task.links, task.entry)
        if (not retry if "error" in record else task.kind == "trials" or record["round"] == task.round)
    }
    return [each for each in wanted if each not in done and (key == "trial" or each in task.entry.accums)]


def taken(records: Sequence[Record], links: str, entry: Entry) -> Trial | None:
    """The fastest trial within the memory limit, or else the one that needs least; None when all of them failed."""
    if len(entry.trials) == 1:
        return entry.trials[0]
    own = _own(records, "trials", links, entry)
    good = [record for record in own if "error" not in record and not record["dropped"]]
    if not good:
        return None
    fitting = [record for record in good if record["peak_growth_bytes"] <= MEMORY_LIMIT_BYTES]
    best = (
        min(fitting, key=lambda record: min(record["steps_s"]))
        if fitting
        else min(good, key=lambda record: record["peak_growth_bytes"])
    )
    return entry.trial(best["trial"])


def micro_batch_s(records: Sequence[Record]) -> float | None:
    """Seconds in which all ranks at once compute one sequence each, from the first trials of `compute`, or None."""
    own = [record for record in records if (record["kind"], record["contestant"]) == ("trials", CONTESTANTS[0].name)]
    first = [record for record in own if record["links"] == own[0]["links"] and "error" not in record]
    return min(min(record["steps_s"]) for record in first) / TRIED_ACCUM if first else None


def estimate_s(task: Task, rates: Mapping[str, float], scale: float, steps: int, job: Job) -> float:
    """Seconds that a task takes on two idle cores, roughly."""
    node_rate = list(rates.values())[-1] * scale * job.ranks_per_node
    model_bytes = BF16_BYTES * num_params(model_of(job))
    total = _LAUNCH_S
    for trial, accum, repeats in _measured(task, steps):
        kind = trial.inter_node or task.entry.inter_node
        crossing_s = floor(kind, accum // trial.cut(accum), job) * model_bytes / (job.num_nodes * node_rate)
        messages_s = 0.0 if kind == "none" else _MESSAGES_S
        total += repeats * (crossing_s + accum * (_SEQUENCE_S + messages_s))
    return total


def _measured(task: Task, steps: int) -> Iterator[tuple[Trial, int, int]]:
    if task.kind == "trials":
        for trial in task.entry.trials:
            yield trial, TRIED_ACCUM, WARMUP_STEPS + TRIAL_STEPS
    else:
        for accum in task.entry.accums:
            yield task.entry.trials[0], accum, WARMUP_STEPS + steps


def _own(records: Sequence[Record], kind: str, links: str, entry: Entry) -> list[Record]:
    wanted = (kind, links, entry.name)
    return [record for record in records if (record["kind"], record["links"], record["contestant"]) == wanted]
