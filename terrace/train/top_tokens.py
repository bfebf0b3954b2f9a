"""Kept tokens of a teacher, found once for each sample of a run: the most probable ones, and draws from the others.

The file `teacher.ids.npy` has the ids of k next tokens of every position, (samples, S, k), and `teacher.log_probs.npy`
their log-probabilities at the temperature, in fp32. The last ones are drawn from all that are not the most probable
(terrace.runtime.distilled), equally spaced in their cumulative probability. The place of the first draw depends on
sample and position alone, so any number of ranks finds the same tokens. `teacher.json` says of which teacher and
data they are, and is written last. A run that is resumed reads them; files that do not fit are made anew.

Rank 0 writes the rows of all ranks, pass by pass, and every rank maps the files: a run folder is on a file system that
all machines share.
"""

import json
import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from terrace.base.errors import CheckpointError, TrainingError
from terrace.base.files import write_atomic
from terrace.base.words import counted, quantity
from terrace.data.batches import Batches, Ids
from terrace.model.facts import vocabulary_size
from terrace.model.loss_chunks import chunk_rows, slices
from terrace.plan.dims import has_routers
from terrace.plan.handed_rows import Held
from terrace.runtime.batch import Batch
from terrace.runtime.distilled import num_drawn
from terrace.runtime.head import cap_
from terrace.runtime.hidden import OutputMatrix
from terrace.train.config import RunConfig
from terrace.train.job import RunJob

if TYPE_CHECKING:
    from terrace.runtime.engine import Engine

IDS, LOG_PROBS, FACTS = "teacher.ids.npy", "teacher.log_probs.npy", "teacher.json"

Array = npt.NDArray[Any]
_GOLDEN = 2654435769  # 2^32 / golden ratio (Knuth, The Art of Computer Programming, volume 3, section 6.4)


class TopTokens:
    """The most probable tokens of samples, from mapped files. `sources` and `samples` are in ascending order."""

    def __init__(self, folder: Path, sources: Ids, samples: Ids) -> None:
        """Raises `CheckpointError` for a file that cannot be read or has another shape."""
        self._keys = _keys(sources, samples)
        try:
            self._ids, self._log_probs = (np.load(folder / name, mmap_mode="r") for name in (IDS, LOG_PROBS))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read the teacher's tokens in {folder}: {error}") from error
        if len(self._ids) != len(samples) or self._ids.shape != self._log_probs.shape:
            raise CheckpointError(f"{folder / IDS} is of other samples: remove it, and it is made again")

    def of(self, sources: Ids, samples: Ids) -> tuple[Tensor, Tensor]:
        """Ids, int32, and log-probabilities, fp32, of the rows (n): (n, S, k) each."""
        at = np.searchsorted(self._keys, _keys(sources, samples))
        return torch.from_numpy(self._ids[at].astype(np.int32)), torch.from_numpy(np.array(self._log_probs[at]))


def top_tokens_of(
    run: RunConfig,
    batches: Batches,
    job: RunJob,
    teacher: Callable[[], "Engine"],
    note: Callable[[str], None],
    idle: Callable[[str], None],
    engine: "Engine",
    keeps: bool,
) -> TopTokens:
    """The most probable tokens of all samples of a run: from its folder, or else found by `teacher` and kept there.

    Every rank calls this. `note` gets lines for the user, `idle` the progress. Raises `TrainingError` if they cannot be
    written, or if they are not there and the run only looks (not `keeps`).
    """
    sources, samples = batches.used(run.train.steps)
    # Only rank 0 reads and writes them.
    facts = _facts(run, batches, sources, samples) if engine.rank == 0 else {}
    is_there = engine.comm.exchange(_kept_facts(job.folder) == facts if engine.rank == 0 else False)[0]
    if not is_there:
        if not keeps:
            raise TrainingError(f"{job.folder} has no tokens of the teacher: let the run make them first")
        each = 2 if _fits_16_bits(run) else 4
        k = run.teacher.top_k
        size = len(samples) * run.train.sequence * k * (each + 4)
        note(
            f"the teacher finds its {k - num_drawn(k)} most probable tokens at each position of "
            f"{counted(len(samples), 'sequence')}, and draws {num_drawn(k)} of the others: {quantity(size, 'B')} in "
            "the run folder"
        )
        made = teacher()
        _Writer(run, batches, job.folder, made, idle).write(sources, samples, facts)
        made.close()
        engine.comm.exchange(True)  # all ranks, before any reads what rank 0 has written
    return TopTokens(job.folder, sources, samples)


class _Writer:
    """Runs the teacher over samples, and writes what it finds on rank 0."""

    def __init__(
        self, run: RunConfig, batches: Batches, folder: Path, teacher: "Engine", idle: Callable[[str], None]
    ) -> None:
        self._run, self._batches, self._folder, self._teacher, self._idle = run, batches, folder, teacher, idle

    def write(self, sources: Ids, samples: Ids, facts: dict[str, Any]) -> None:
        teacher, run, num = self._teacher, self._run, len(samples)
        program = teacher.program
        # A pass has the rows of a step, divided as the teacher's plan divides them.
        held, per_pass = Held(run.cluster, program.plan, run.rows), run.rows
        shape = (num, run.train.sequence, run.teacher.top_k)
        files = self._files(shape) if teacher.rank == 0 else None
        for first in range(0, num, per_pass):
            # The last pass is filled up with the first samples.
            rows = np.arange(first, first + per_pass) % num
            found = self._pass(sources[rows], samples[rows], first)
            self._idle(f"the teacher's tokens of {min(first + per_pass, num)} of {num} sequences")
            for rank, parts in enumerate(teacher.comm.exchange_tensors(found)):
                if files is None or not parts:
                    continue
                at = first + np.array(held.rows(rank))
                for file, values in zip(files, parts, strict=True):
                    file[at[at < num]] = values.numpy()[at < num]
        if files is not None:
            self._end(files, facts)

    def _files(self, shape: tuple[int, ...]) -> list[Array]:
        kinds = {IDS: np.uint16 if _fits_16_bits(self._run) else np.int32, LOG_PROBS: np.float32}
        try:
            (self._folder / FACTS).unlink(missing_ok=True)
            return [
                np.lib.format.open_memmap(self._folder / name, "w+", dtype=kind, shape=shape)
                for name, kind in kinds.items()
            ]
        except OSError as error:
            raise TrainingError(f"cannot write to {self._folder}: {error.strerror}; make room there") from error

    def _end(self, files: list[Array], facts: dict[str, Any]) -> None:
        for file in files:
            if not np.isfinite(file).all():
                raise TrainingError(
                    f"teacher.model = {self._run.teacher.model!r} gives a probability that is inf or nan: name another"
                )
            file.flush()  # type: ignore[attr-defined]  # a mapped array
        for name in (IDS, LOG_PROBS):
            descriptor = os.open(self._folder / name, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        write_atomic(self._folder / FACTS, json.dumps(facts, indent=2).encode())

    def _pass(self, sources: Ids, samples: Ids, first: int) -> list[Tensor]:
        """Ids and log-probabilities of this rank's rows of a pass; nothing before the last stage."""
        teacher, run = self._teacher, self._run
        layout, size = teacher.program.layout, teacher.program.plan.micro_batch
        micros, offsets = [], []
        for micro in range(teacher.program.num_micros):
            begin = (micro * layout.data_degree + layout.data_rank(teacher.rank)) * size
            own = slice(begin, begin + size)
            batch = Batch(*map(torch.from_numpy, self._batches.gather(sources[own], samples[own])))
            if has_routers(teacher.program.blocks):
                batch = batch.with_places(first + begin)
            micros.append(batch.to(teacher.device))
            offsets.append(first_draws(samples[own], run.train.sequence).to(teacher.device))
        hidden, matrix = teacher.hidden(micros)
        k, temperature = run.teacher.top_k, run.teacher.temperature
        # Nothing is found before the last stage.
        found = [kept_tokens(each, matrix, temperature, k, own) for each, own in zip(hidden, offsets, strict=False)]
        return [torch.cat(parts).cpu() for parts in zip(*found, strict=True)]


def first_draws(samples: Ids, sequence: int) -> Tensor:
    """Offsets in [0, 1), (n, S) in fp64, by sample and position: fractions of multiples of the golden ratio."""
    numbers = (samples[:, None] * sequence + np.arange(sequence)) % (1 << 30)
    return torch.from_numpy((numbers * _GOLDEN % (1 << 32)) / float(1 << 32))


@torch.no_grad()
def kept_tokens(
    hidden: Tensor, matrix: OutputMatrix, temperature: float, k: int, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """Ids, int32, and log-probabilities, fp32, of k tokens after hidden states (B, S, H): (B, S, k) each.

    `offsets` (B, S), in [0, 1), place the first draw of each position, in the distance of two draws.
    """
    flat, begins, m, ids, log_probs = hidden.flatten(0, 1), offsets.flatten().unsqueeze(1), num_drawn(k), [], []
    steps = torch.arange(m, dtype=begins.dtype, device=begins.device)
    for rows in slices(len(flat), chunk_rows(len(matrix.weight), flat.device.type)):
        logits = cap_(flat[rows] @ matrix.weight.t(), matrix.cap)
        found = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature, -1)
        top = found.topk(k - m).indices
        rest = found.exp().scatter_(-1, top, 0.0).cumsum(-1, dtype=torch.float64)
        at = torch.searchsorted(rest, (steps + begins[rows]) / m * rest[:, -1:], right=True)
        chosen = torch.cat([top, at.clamp_(max=found.shape[1] - 1)], -1)
        ids.append(chosen.int())
        log_probs.append(found.gather(-1, chosen).float())
    return tuple(torch.cat(each).view(*hidden.shape[:2], k) for each in (ids, log_probs))  # type: ignore[return-value]


def _facts(run: RunConfig, batches: Batches, sources: Ids, samples: Ids) -> dict[str, Any]:
    teacher = run.teacher
    from terrace.train.weights import version_of  # here: the chain of imports at module level stays short

    return {
        "teacher": teacher.model,
        "version": version_of(teacher.model),
        "top_k": teacher.top_k,
        "drawn": num_drawn(teacher.top_k),
        "temperature": teacher.temperature,
        "sequence": run.train.sequence,
        "data": [source.facts() for source in batches.sources],
        "samples": sha256(_keys(sources, samples).tobytes()).hexdigest(),
    }


def _kept_facts(folder: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads((folder / FACTS).read_text())
    except (OSError, ValueError):
        return None
    return found


def _keys(sources: Ids, samples: Ids) -> Ids:
    # One number a sample, in the order of sources and samples.
    found: Ids = (sources << 40) + samples
    return found


def _fits_16_bits(run: RunConfig) -> bool:
    return vocabulary_size(run.model) <= 1 << 16
