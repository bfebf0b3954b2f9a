"""Between `Rows` and the runtime's micro-batches, whose rows are a prompt and its response, padded at the end.

Blocks need a rectangle; this is the one place with padding, and labels of it do not count. Losses see valid tokens
alone again. Rows are whole, so a context axis, which cuts them, cannot have these batches.

`rows` have the ragged columns `prompts` and `responses`, int64 tokens. Where `responses` hold tokens that the sampler
did not emit, the ragged column `emitted`, bool, says which it did; all other ragged columns are of valid tokens.

Shape legend: R rows, S tokens of a row of the batch, N valid tokens.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from terrace.base.errors import DataError, PlanError
from terrace.model.decoder import IGNORE_INDEX
from terrace.rl.aggregation import Aggregation
from terrace.rl.ragged import Ragged, check_rows, offsets_of, row_of_each
from terrace.rl.rows import Rows
from terrace.runtime.batch import Batch
from terrace.runtime.objective import TokenObjective, ValueObjective
from terrace.runtime.token_numbers import TokenNumbers

WEIGHTS = "loss_weights"  # the column with the aggregation's weights

# (log-probabilities of valid tokens, their entropies where there are some, columns (N) by name) -> sum
TokenLoss = Callable[[Ragged, Tensor | None, Mapping[str, Tensor]], Tensor]
ValueLoss = Callable[[Ragged, Mapping[str, Tensor]], Tensor]  # (values of valid tokens, columns (N) by name) -> sum


def batch_of(rows: Rows, columns: Sequence[str], aggregation: Aggregation, *, sequence: int) -> Batch:
    """One micro-batch of all `rows`, labels (R, `sequence`): responses at the places that predict them.

    Its columns are those named, of valid tokens, and `WEIGHTS`; its `weights` what tokens add to the divisor. No router
    sees its padding: `places` count from the first row, or from another's with `Batch.with_places`.
    Raises `DataError` for an empty prompt, a row that is too long, and a column of other lengths.
    """
    prompts, responses = rows.ragged("prompts"), rows.ragged("responses")
    places = label_places(rows, sequence)
    tokens = prompts.values.new_zeros(len(rows), sequence + 1)
    # The last token of a row predicts nothing, the first is predicted by nothing.
    for column, starts in ((prompts, torch.zeros_like(prompts.lengths)), (responses, prompts.lengths)):
        row, place = row_of_each(column.offsets), _place_in_row(column) + column.spread(starts).values
        tokens[row, place] = column.values
    valid = _valid(rows, responses)
    labels = tokens.new_full((len(rows), sequence), IGNORE_INDEX)
    labels.view(-1)[places.values] = valid.values

    def laid_out(values: Tensor) -> Tensor:
        flat = values.new_zeros(labels.numel())
        flat[places.values] = values
        return flat.view(labels.shape)

    given = {name: rows.ragged(name) for name in columns}
    check_rows(responses=valid, **given)
    laid = {name: laid_out(column.values) for name, column in given.items()}
    weights = aggregation.weights(valid.lengths, torch.float64)
    batch = Batch(
        tokens[:, :-1],
        labels,
        columns={**laid, WEIGHTS: laid_out(weights)},
        weights=laid_out(aggregation.counts(valid.lengths)),
    )
    # The last token of a row is no input.
    return batch.with_places(0, lengths=prompts.lengths + responses.lengths - 1)


def label_places(rows: Rows, sequence: int) -> Ragged:
    """Where the valid tokens of responses are labels: places in labels (R, `sequence`) laid out flat, int64."""
    prompts, responses = rows.ragged("prompts"), rows.ragged("responses")
    total = prompts.lengths + responses.lengths - 1
    for wrong, reason in ((prompts.lengths == 0, "has no prompt"), (total > sequence, "is too long")):
        if wrong.any():
            row = int(wrong.nonzero()[0])
            raise DataError(
                f"row {row} {reason}: prompts of 1 token or more, and with their response at most {sequence + 1}; it "
                f"has {int(prompts.lengths[row])} and {int(responses.lengths[row])}"
            )
    starts = torch.arange(len(rows), device=total.device) * sequence + prompts.lengths - 1
    places = responses.with_values(responses.spread(starts).values + _place_in_row(responses))
    return _valid(rows, places)


def at_valid_tokens(numbers: Tensor, rows: Rows) -> Ragged:
    """Numbers (R, S) by label of `batch_of(rows)`, such as values, at the valid tokens of responses."""
    places = label_places(rows, numbers.shape[1])
    return places.with_values(numbers.flatten()[places.values])


def objective_of(loss: TokenLoss) -> TokenObjective:
    """Objective of an engine: `loss` of the valid tokens of micro-batches from `batch_of`.

    Raises `PlanError` in the first step of a plan that gives ranks parts of rows.
    """

    def of_batch(numbers: TokenNumbers, batch: Batch) -> Tensor:
        counted, columns = _counted(batch)
        logprobs = Ragged(numbers.log_probs[counted], offsets_of(counted.sum(1)))
        entropies = None if numbers.entropies is None else numbers.entropies[counted]
        return loss(logprobs, entropies, columns)

    return TokenObjective(of_batch)


def values_objective_of(loss: ValueLoss) -> ValueObjective:
    """Objective of a critic's engine, else as `objective_of`: the value of a token is of the state before it."""

    def of_batch(values: Tensor, batch: Batch) -> Tensor:
        counted, columns = _counted(batch)
        return loss(Ragged(values[counted], offsets_of(counted.sum(1))), columns)

    return ValueObjective(of_batch)


def _counted(batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    if batch.token_layout is not None:
        raise PlanError(
            "losses of responses need whole rows, but this plan gives ranks parts of rows: leave out the context "
            "axis and balance"
        )
    counted = batch.labels != IGNORE_INDEX
    return counted, {name: column[counted] for name, column in batch.columns.items()}


def _valid(rows: Rows, column: Ragged) -> Ragged:
    return column.kept(rows.ragged("emitted")) if "emitted" in rows.columns else column


def _place_in_row(column: Ragged) -> Tensor:
    # 0, 1, ... in each row, (N).
    return torch.arange(len(column.values), device=column.offsets.device) - column.spread(column.offsets[:-1]).values
