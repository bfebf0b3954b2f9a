"""Between `Rows` and the runtime's micro-batches, whose rows are a prompt and its response: padded, or joined.

Blocks need a rectangle, and messages of one size rows of one length: this is the one place with padding, and labels of
it do not count. Where nothing needs that length, rows stand end to end. Losses see valid tokens alone again. Rows are
whole, so a context axis, which cuts them, cannot have these batches.

`rows` have the ragged columns `prompts` and `responses`, int64 tokens. Where `responses` hold tokens that the sampler
did not emit, the ragged column `emitted`, bool, says which it did; all other ragged columns are of valid tokens.

Shape legend: R rows, S tokens of a row of the batch, N valid tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from terrace.base.errors import DataError, PlanError
from terrace.model.decoder import IGNORE_INDEX
from terrace.rl.aggregation import Aggregation
from terrace.rl.ragged import Ragged, check_rows, offsets_of, row_of_each
from terrace.rl.rows import Rows
from terrace.rl.shared_prompts import LONGEST_SHARED, run_begins
from terrace.runtime.batch import Batch
from terrace.runtime.objective import TokenObjective, ValueObjective
from terrace.runtime.token_numbers import TokenNumbers

WEIGHTS = "loss_weights"  # the column with the aggregation's weights

# (log-probabilities of valid tokens, their entropies where there are some, columns (N) by name) -> sum
TokenLoss = Callable[[Ragged, Tensor | None, Mapping[str, Tensor]], Tensor]
ValueLoss = Callable[[Ragged, Mapping[str, Tensor]], Tensor]  # (values of valid tokens, columns (N) by name) -> sum


def batch_of(
    rows: Rows, columns: Sequence[str], aggregation: Aggregation, *, sequence: int, is_joined: bool = False
) -> Batch:
    """One micro-batch of all `rows`, labels (R, `sequence`): responses at the places that predict them.

    If `is_joined`, the rows stand end to end in one, labels (1, T), as `terrace.rl.shared_prompts` says: without
    padding, and a row whose prompt is that of the row before it begins with the prompt's last token.

    Its columns are those named, of valid tokens, and `WEIGHTS`; its `weights` what tokens add to the divisor. No router
    sees its padding: `places` count from the first row, or from another's with `Batch.with_places`.
    Raises `DataError` for an empty prompt, a row that is too long, and a column of other lengths.
    """
    prompts, responses = rows.ragged("prompts"), rows.ragged("responses")
    layout = _layout_of(rows, sequence, is_joined)
    inputs = prompts.values.new_zeros(layout.num_places)
    positions = torch.zeros_like(inputs)
    for column, starts in ((prompts, torch.zeros_like(prompts.lengths)), (responses, prompts.lengths)):
        position = _place_in_row(column) + column.spread(starts).values
        row = row_of_each(column.offsets)
        # The last token of a row predicts nothing, and is no input.
        kept = (position >= layout.skipped[row]) & (position < layout.ends[row])
        place = (layout.starts[row] + position)[kept]
        inputs[place], positions[place] = column.values[kept], position[kept]
    places = label_places(rows, sequence, is_joined)
    valid = _valid(rows, responses)
    labels = torch.full_like(inputs, IGNORE_INDEX)
    labels[places.values] = valid.values
    shape = (1, -1) if is_joined else (len(rows), sequence)

    def laid_out(values: Tensor) -> Tensor:
        flat = values.new_zeros(len(labels))
        flat[places.values] = values
        return flat.view(shape)

    given = {name: rows.ragged(name) for name in columns}
    check_rows(responses=valid, **given)
    laid = {name: laid_out(column.values) for name, column in given.items()}
    weights = aggregation.weights(valid.lengths, torch.float64)
    batch = Batch(
        inputs.view(shape),
        labels.view(shape),
        positions=positions.view(shape) if is_joined else None,
        columns={**laid, WEIGHTS: laid_out(weights)},
        weights=laid_out(aggregation.counts(valid.lengths)),
    )
    return batch if is_joined else batch.with_places(0, lengths=layout.ends)


def label_places(rows: Rows, sequence: int, is_joined: bool = False) -> Ragged:
    """Where the valid tokens of responses are labels: places in labels of `batch_of(rows)` laid out flat, int64."""
    prompts, responses = rows.ragged("prompts"), rows.ragged("responses")
    starts = _layout_of(rows, sequence, is_joined).starts + prompts.lengths - 1
    places = responses.with_values(responses.spread(starts).values + _place_in_row(responses))
    return _valid(rows, places)


@dataclass(frozen=True)
class _Layout:
    """Row i has inputs at positions `skipped[i]` ... `ends[i]` - 1; that at position p is at place `starts[i]` + p."""

    starts: Tensor
    skipped: Tensor
    ends: Tensor
    num_places: int


def _layout_of(rows: Rows, sequence: int, is_joined: bool) -> _Layout:
    prompts, responses = rows.ragged("prompts"), rows.ragged("responses")
    total = prompts.lengths + responses.lengths - 1
    for wrong, reason in ((prompts.lengths == 0, "has no prompt"), (total > sequence, "is too long")):
        if wrong.any():
            row = int(wrong.nonzero()[0])
            raise DataError(
                f"row {row} {reason}: prompts of 1 token or more, and with their response at most {sequence + 1}; it "
                f"has {int(prompts.lengths[row])} and {int(responses.lengths[row])}"
            )
    if not is_joined:
        starts = torch.arange(len(rows), device=total.device) * sequence
        return _Layout(starts, torch.zeros_like(total), total, len(rows) * sequence)
    skipped = torch.where(_continues(prompts, total), prompts.lengths - 1, 0)
    offsets = offsets_of(total - skipped)
    # A micro-batch has a token, if need be one that nobody has written.
    return _Layout(offsets[:-1] - skipped, skipped, total, max(1, int(offsets[-1])))


def _continues(prompts: Ragged, total: Tensor) -> Tensor:
    """Whether each row shares the prompt of the row before it, bool (R)."""
    texts = prompts.rows()
    alike = [torch.equal(text, before) for before, text in pairwise(texts)]
    found = torch.tensor([False, *alike][: len(texts)], device=total.device)
    # Of long rows the masks would be large.
    return found & (total <= LONGEST_SHARED)


def at_valid_tokens(numbers: Tensor, rows: Rows, is_joined: bool = False) -> Ragged:
    """Numbers (R, S), or (1, T) if `is_joined`, by label of `batch_of(rows)`, at the valid tokens of responses."""
    places = label_places(rows, numbers.shape[1], is_joined)
    return places.with_values(numbers.flatten()[places.values])


def objective_of(loss: TokenLoss) -> TokenObjective:
    """Objective of an engine: `loss` of the valid tokens of micro-batches from `batch_of`.

    Raises `PlanError` in the first step of a plan that gives ranks parts of rows.
    """

    def of_batch(numbers: TokenNumbers, batch: Batch) -> Tensor:
        counted, columns, offsets = _counted(batch)
        logprobs = Ragged(numbers.log_probs[counted], offsets)
        entropies = None if numbers.entropies is None else numbers.entropies[counted]
        return loss(logprobs, entropies, columns)

    return TokenObjective(of_batch)


def values_objective_of(loss: ValueLoss) -> ValueObjective:
    """Objective of a critic's engine, else as `objective_of`: the value of a token is of the state before it."""

    def of_batch(values: Tensor, batch: Batch) -> Tensor:
        counted, columns, offsets = _counted(batch)
        return loss(Ragged(values[counted], offsets), columns)

    return ValueObjective(of_batch)


def _counted(batch: Batch) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Where labels count; columns there; offsets of the responses among them."""
    if batch.token_layout is not None:
        raise PlanError(
            "losses of responses need whole rows, but this plan gives ranks parts of rows: leave out the context "
            "axis and balance"
        )
    counted = batch.labels != IGNORE_INDEX
    lengths = counted.sum(1)
    if batch.positions is not None:
        runs = run_begins(batch.positions[0]).cumsum(0) - 1
        lengths = runs.new_zeros(int(runs[-1]) + 1).index_add_(0, runs, counted[0].long())
    return counted, {name: column[counted] for name, column in batch.columns.items()}, offsets_of(lengths)


def _valid(rows: Rows, column: Ragged) -> Ragged:
    return column.kept(rows.ragged("emitted")) if "emitted" in rows.columns else column


def _place_in_row(column: Ragged) -> Tensor:
    # 0, 1, ... in each row, (N).
    return torch.arange(len(column.values), device=column.offsets.device) - column.spread(column.offsets[:-1]).values
