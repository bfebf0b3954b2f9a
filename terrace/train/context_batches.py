"""Local micro-batches of a rank on the context axis: its tokens of each micro-batch, and its token layout.

Made on the host before the step, as a function of the step, the plan and the attention cost. Every rank computes the
same assignment and reads only the rows of its own tokens. Under `balance = "tokens"` a micro-batch consists of the data
rank's own rows, always cut the same way (terrace.sequence.static). Under `balance = "cost"` the rows of all data ranks
form one set of documents: rows are distributed to the micro-batches of the step, then the documents of each to ring
ranks (terrace.sequence.balanced). Padding and documents without a label are left out.

Shape legend: B rows of a micro-batch of a data rank, S tokens of a row, T local tokens of a rank.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from terrace.cluster.cluster import Cluster
from terrace.data.batches import Arrays, Batches, micros_of_rank
from terrace.data.eval_batches import EvalBatches
from terrace.data.samples import IGNORED, Parts
from terrace.plan.context import CHUNKS_PER_RING_RANK, ContextGroup, chunk_tokens, local_tokens
from terrace.plan.layout import Layout
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.runtime.batch import places_of, shares_of
from terrace.runtime.further_tokens import further_tokens
from terrace.sequence.balanced import balanced_group_layout, micro_steps
from terrace.sequence.build import build_token_layout
from terrace.sequence.cost import WorkCost
from terrace.sequence.segments import Segment
from terrace.sequence.static import static_token_layouts
from terrace.sequence.token_layout import Run, TokenLayout

Ids = npt.NDArray[np.int64]
ReadRows = Callable[[Ids], Arrays]


@dataclass(frozen=True, kw_only=True)
class LocalMicro:
    """A rank's part of a micro-batch: int64 arrays of shape (1, T), padded with token 0 at position 0 without a label.

    `places` and `shares` are as in terrace.runtime.batch; None if not requested.
    """

    inputs: Ids
    labels: Ids
    positions: Ids
    places: Ids | None
    shares: npt.NDArray[np.float64] | None
    further: tuple[Ids, ...]  # tokens at each further depth, then their labels (terrace.runtime.further_tokens)
    token_layout: TokenLayout


@dataclass(frozen=True, kw_only=True)
class LocalStep:
    """A rank's micro-batches of one step, and the step's balance (`StepRecord.balance`)."""

    micros: list[LocalMicro]
    balance: float


class ContextBatches:
    """Makes the micro-batches of a rank under a plan with a context axis or `balance = "cost"`."""

    def __init__(
        self, batches: Batches | EvalBatches, cluster: Cluster, plan: Plan, num_micros: int, rank: int, cost: WorkCost
    ) -> None:
        self._batches, self._plan, self._num_micros, self._cost = batches, plan, num_micros, cost
        self._mesh, layout = Mesh.of(cluster, plan), Layout.of(cluster, plan)
        # The micro-batches of every data rank, in the order of terrace.data.batches.
        num_micros_of_all, degree = batches.batch // plan.micro_batch, layout.data_degree
        self._dealt = [micros_of_rank(num_micros_of_all, each, degree, plan.shares).tolist() for each in range(degree)]
        self._data_rank = layout.data_rank(rank)
        self._group = ContextGroup.of(cluster, plan, rank)
        # Token layouts are built for one member of the context group.
        self._member = self._group.members.index(rank)
        self._num_local_tokens = local_tokens(plan, self._mesh, batches.sequence)
        # An equal token layout comes back as the same object, so that the engine reuses its device layout.
        self._static_token_layout = static_token_layouts(
            plan, self._mesh, batches.sequence, cost.window, self._member, cost.other_windows
        )

    def step(self, step: int, with_places: bool = False, depths: int = 0) -> LocalStep:
        self._depths = depths
        first_row = step * self._batches.batch if with_places else None
        parts = self._batches.parts(step)
        if self._plan.balance == "cost":
            # Rows are distributed to micro-batches by attention seconds, so that each micro-batch can be balanced. A
            # row's cost is the attention within its documents.
            costs = [sum(self._cost.whole_s(stop - start) for start, stop in row) for row in parts]
            made = [self._assigned(step, parts, rows, first_row) for rows in micro_steps(costs, self._num_micros)]
        else:
            made = [self._static(step, parts, micro, first_row) for micro in range(self._num_micros)]
        alike_s = self._num_local_tokens * self._cost.token_s
        return LocalStep(micros=[micro for micro, _ in made], balance=evenness([each_s for _, each_s in made], alike_s))

    def _assigned(
        self, step: int, parts: Sequence[Parts], rows: Sequence[int], first_row: int | None
    ) -> tuple[LocalMicro, Sequence[float]]:
        sequence = self._batches.sequence
        runs = [(row * sequence + start, row * sequence + stop) for row in rows for start, stop in parts[row]]
        lengths = [stop - start for start, stop in runs]
        layout = balanced_group_layout(
            lengths, self._group.ring_degrees, self._group.ulysses, self._num_local_tokens, self._cost
        )
        made = build_token_layout(layout, self._member)
        # The balancer numbered tokens through the documents; the data loader counts them in the global batch.
        made = replace(made, tokens=placed(made.tokens, runs))
        micro = local_micro(made, sequence, first_row, partial(self._batches.rows, step), self._depths)
        return micro, assigned_seconds(layout.segments, self._group.num_ring_ranks, self._cost)

    def _static(
        self, step: int, parts: Sequence[Parts], micro: int, first_row: int | None
    ) -> tuple[LocalMicro, Sequence[float]]:
        size, sequence = self._plan.micro_batch, self._batches.sequence
        # All axes train on the same batch.
        first = self._dealt[self._data_rank][micro] * size
        whole = self._batches.rows(step, np.arange(first, first + size))
        begins = tuple(np.flatnonzero(document_begins(whole, sequence)).tolist())
        # Token layouts are cached by the document starts, which are all that they depend on.
        local = local_micro(
            self._static_token_layout(begins),
            sequence,
            None if first_row is None else first_row + first,
            lambda wanted: tuple(array[wanted] for array in whole),
            self._depths,
        )
        # Every rank predicts the seconds of all data ranks, to report the balance of the whole step.
        ring, seconds = self._mesh.total("ring"), []
        for micros in self._dealt:
            if micro >= len(micros):  # of a member with fewer
                continue
            first_there = micros[micro] * size
            there = range(first_there, first_there + size)
            rows = [ring_seconds(parts[row], sequence, ring, self._cost) for row in there]
            seconds += np.sum(rows, axis=0).tolist()
        return local, seconds


def document_begins(rows: Arrays, sequence: int) -> npt.NDArray[np.bool_]:
    """Whether a document begins at each token, as a flat array over all rows; the same rule as in
    terrace.model.attention.
    """
    begins = np.zeros((len(rows[0]), sequence), dtype=bool)
    begins[:, 0] = True
    if len(rows) == 3:
        # Inside a document positions rise by one; anything else starts a document.
        begins[:, 1:] = rows[2][:, 1:] != rows[2][:, :-1] + 1
    return begins.reshape(-1)


def local_micro(
    token_layout: TokenLayout, sequence: int, first_row: int | None, read: ReadRows, depths: int = 0
) -> LocalMicro:
    """The local tokens of a token layout. `read` gets the indices of the rows that contain them, ascending.

    `first_row` is the run-wide index of row 0; without it, `places` is None.
    """
    rows = rows_of(token_layout.tokens, sequence)
    inputs, labels, *given = read(rows)
    positions = given[0] if given else np.broadcast_to(np.arange(sequence), inputs.shape)
    # Padding: token 0 at position 0, without a label, a place and a share.
    arrays: list[npt.NDArray[Any]] = [inputs, labels, positions]
    paddings = [0, IGNORED, 0]
    if first_row is not None:
        told, *rest = map(torch.from_numpy, (labels, *given))
        arrays += [places_of(torch.from_numpy(first_row + rows), told, *rest).numpy(), shares_of(told, *rest).numpy()]
        paddings += [-1, 0]
    if depths:
        told, tokens, *rest = map(torch.from_numpy, (labels, inputs, *given))
        for found, padding in zip(
            further_tokens(tokens, told, rest[0] if rest else None, depths), (0, IGNORED), strict=True
        ):
            arrays += [each.contiguous().numpy() for each in found.unbind(-1)]
            paddings += [padding] * depths
    held: list[npt.NDArray[Any]] = [
        np.full((1, token_layout.num_local_tokens), padding, np.float64 if array.dtype == np.float64 else np.int64)
        for array, padding in zip(arrays, paddings, strict=True)
    ]
    end = 0
    for start, stop in token_layout.tokens:
        # All rows between the first and the last of a run are present, so it stays one run.
        first = int(np.searchsorted(rows, start // sequence)) * sequence + start % sequence
        for target, source in zip(held, arrays, strict=True):
            target[0, end : end + stop - start] = source.reshape(-1)[first : first + stop - start]
        end += stop - start
    places, shares = held[3:5] if first_row is not None else (None, None)
    return LocalMicro(
        inputs=held[0],
        labels=held[1],
        positions=held[2],
        places=places,
        shares=shares,
        further=tuple(held[len(held) - 2 * depths :]),
        token_layout=token_layout,
    )


def rows_of(runs: Sequence[Run], sequence: int) -> Ids:
    """Indices of the rows that contain the tokens of `runs`, ascending. Tokens are numbered row after row."""
    touched = [np.arange(start // sequence, -(-stop // sequence)) for start, stop in runs]
    return np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *touched]))


def placed(tokens: Sequence[Run], runs: Sequence[Run]) -> tuple[Run, ...]:
    """Maps token ranges numbered within the concatenation of `runs` to token ranges in the global batch."""
    firsts = [0, *accumulate(stop - start for start, stop in runs)]
    found: list[Run] = []
    for start, stop in tokens:
        index = bisect_right(firsts, start) - 1
        # A run of tokens may cross several documents, which lie apart in the global batch.
        while start < stop:
            end = min(stop, firsts[index + 1])
            shift = runs[index][0] - firsts[index]
            found.append((start + shift, end + shift))
            start, index = end, index + 1
    return tuple(found)


def ring_seconds(parts: Parts, sequence: int, ring: int, cost: WorkCost) -> list[float]:
    """Attention seconds of one row on each ring rank. Gaps between documents count as documents."""
    # Cut the row at document and chunk boundaries. Each piece belongs to the ring rank of its chunk; its pairs are the
    # document's pairs up to the piece's end minus those up to its start.
    chunk = chunk_tokens(sequence, ring)
    bounds = sorted({0, sequence, *(bound for part in parts for bound in part)})
    edges = np.unique([*bounds, *range(0, sequence, chunk)])
    starts = np.array(bounds)[np.searchsorted(bounds, edges[:-1], side="right") - 1]
    pairs = [
        cost.area(last) - cost.area(first) for first, last in zip(edges[:-1] - starts, edges[1:] - starts, strict=True)
    ]
    chunks = edges[:-1] // chunk
    ring_ranks = np.minimum(chunks, CHUNKS_PER_RING_RANK * ring - 1 - chunks) if ring > 1 else chunks
    sums: list[float] = (cost.whole_pair_s * np.bincount(ring_ranks, pairs, ring)).tolist()
    return sums


def assigned_seconds(segments: Sequence[Segment], num_ring_ranks: int, cost: WorkCost) -> list[float]:
    """Attention seconds of each ring rank. The ranks of a ring share its segment equally."""
    seconds = [0.0] * num_ring_ranks
    for segment in segments:
        # A ring divides the pairs of its segment evenly.
        part_s = cost.whole_s(segment.stop - segment.start) / len(segment.ring_ranks)
        for ring_rank in segment.ring_ranks:
            seconds[ring_rank] += part_s
    return seconds


def evenness(seconds: Sequence[Sequence[float]], alike_s: float) -> float:
    """Time of the busiest ring rank over the mean ring rank, summed over micro-batches; 1.0 is perfectly even.

    `alike_s` is the time of all other work, which is equal on every ring rank.
    """
    mean_s = sum(alike_s + sum(each_s) / len(each_s) for each_s in seconds)
    return sum(alike_s + max(each_s) for each_s in seconds) / mean_s if mean_s else 1.0
