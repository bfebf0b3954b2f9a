"""Converts `Rows` to the runtime's micro-batches, whose sequences are a prompt and its response: padded, or joined.

Blocks need rectangular inputs, and messages of a fixed size need sequences of one length. Padding exists only here, and
its labels are ignored. Where nothing needs a fixed length, sequences are joined without padding. Losses see only valid
tokens. Sequences are whole, so a context axis, which splits them, cannot use these batches.

`rows` have the ragged columns `prompts` and `responses`, int64 tokens. Where `responses` include tokens that the
sampler did not emit, the ragged bool column `emitted` marks those that it did; all other ragged columns hold valid
tokens only.

Shape legend: R rows, S tokens of a row of the batch, N valid tokens.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from terrace.base.errors import DataError, PlanError
from terrace.model.decoder import IGNORE_INDEX
from terrace.rl.algorithms.aggregation import Aggregation
from terrace.rl.algorithms.shared_prefixes import places_of
from terrace.rl.values.ragged import Ragged, check_rows, check_shapes, offsets_of, row_of_each
from terrace.rl.values.rows import ROUTES, Rows
from terrace.runtime.batch import Batch
from terrace.runtime.objective import TokenObjective, ValueObjective
from terrace.runtime.routing.passages import CHOSEN
from terrace.runtime.token_numbers import TokenNumbers

WEIGHTS = "loss_weights"  # the column with the aggregation's weights
_ROW = "row"  # the column with the row index of each label, in joined batches

# (log-probabilities of valid tokens, their entropies where there are some, columns (N) by name) -> sum
TokenLoss = Callable[[Ragged, Tensor | None, Mapping[str, Tensor]], Tensor]
ValueLoss = Callable[[Ragged, Mapping[str, Tensor]], Tensor]  # (values of valid tokens, columns (N) by name) -> sum


def batch_of(
    rows: Rows, columns: Sequence[str], aggregation: Aggregation, *, sequence: int, is_joined: bool = False
) -> Batch:
    """One micro-batch of all `rows`, with labels (R, `sequence`): response tokens at the positions that predict them.

    If `is_joined`, all sequences form one row without padding, with shared prefixes stored once (`shared_prefixes.py`).
    Labels (1, N) are then the valid tokens in the order of `rows`, or one ignored label if there are none.

    The batch's columns are the named ones, at valid tokens, and `WEIGHTS`; its `weights` are the tokens' contributions
    to the divisor. Padding is hidden from routers: `places` count from the first row, or from another with
    `Batch.with_places`. Raises `DataError` for an empty prompt, a row that is too long, and a column of other lengths.
    """
    texts = _texts(rows, sequence)
    valid = _valid(rows, rows.ragged("responses"))
    given = {name: rows.ragged(name) for name in columns}
    check_rows(responses=valid, **given)
    numbers = {name: column.values for name, column in given.items()}
    numbers[WEIGHTS] = aggregation.weights(valid.lengths, torch.float64)
    counts = aggregation.counts(valid.lengths)
    if is_joined:
        return _joined(rows, texts, numbers, counts)
    position = _place_in_row(texts)
    is_input = position < texts.spread(texts.lengths - 1).values
    inputs = position.new_zeros(len(rows) * sequence)
    inputs[(texts.spread(_starts(rows, sequence)).values + position)[is_input]] = texts.values[is_input]
    places = label_places(rows, sequence).values
    labels = torch.full_like(inputs, IGNORE_INDEX)
    labels[places] = valid.values
    shape = (len(rows), sequence)

    def laid_out(values: Tensor) -> Tensor:
        flat = values.new_zeros(len(labels))
        flat[places] = values
        return flat.view(shape)

    routes = {}
    if ROUTES in rows.columns:
        given_routes = rows.ragged(ROUTES)
        check_shapes(routes=given_routes.lengths, inputs=texts.lengths - 1)
        laid = given_routes.values.new_zeros(len(inputs), *given_routes.values.shape[1:])
        laid[(texts.spread(_starts(rows, sequence)).values + position)[is_input]] = given_routes.values
        routes = {CHOSEN: laid.view(*shape, -1)}
    return Batch(
        inputs.view(shape),
        labels.view(shape),
        columns={name: laid_out(values) for name, values in numbers.items()} | routes,
        weights=laid_out(counts),
    ).with_places(0, lengths=texts.lengths - 1)


def label_places(rows: Rows, sequence: int) -> Ragged:
    """Indices of the responses' valid tokens in the flattened padded labels of `batch_of(rows)`."""
    responses = rows.ragged("responses")
    return _valid(rows, _before_responses(rows, responses.spread(_starts(rows, sequence)).values))


def at_valid_tokens(numbers: Tensor, rows: Rows, is_joined: bool = False) -> Ragged:
    """Select the responses' valid tokens from `numbers`, (R, S), or (1, N) if `is_joined`, by label of `batch_of`."""
    if is_joined:
        valid = _valid(rows, rows.ragged("responses"))
        return valid.with_values(numbers.flatten()[: len(valid.values)])
    places = label_places(rows, numbers.shape[1])
    return places.with_values(numbers.flatten()[places.values])


def _joined(rows: Rows, texts: Ragged, numbers: Mapping[str, Tensor], counts: Tensor) -> Batch:
    responses = rows.ragged("responses")
    # The last token of a sequence predicts nothing, so it is no input.
    given = [text[:-1] for text in texts.lists()]
    places = Ragged(
        torch.tensor([x for each in places_of(given) for x in each], dtype=torch.int64), offsets_of(texts.lengths - 1)
    )
    inputs = texts.values.new_zeros(max(1, int(places.values.amax()) + 1 if len(places.values) else 0))
    positions = torch.zeros_like(inputs)
    inputs[places.values] = torch.tensor([x for each in given for x in each], dtype=torch.int64)
    positions[places.values] = _place_in_row(places)
    valid = _valid(rows, responses)
    reads = _valid(rows, _before_responses(rows, responses.spread(places.offsets[:-1]).values))
    numbers = {**numbers, _ROW: row_of_each(valid.offsets)}

    def laid_out(values: Tensor, padding: int = 0) -> Tensor:
        return values.unsqueeze(0) if len(values) else values.new_full((1, 1), padding)

    return Batch(
        inputs.unsqueeze(0),
        laid_out(valid.values, IGNORE_INDEX),
        positions=positions.unsqueeze(0),
        reads=laid_out(places.values[reads.values]),
        columns={name: laid_out(values) for name, values in numbers.items()},
        weights=laid_out(counts),
    )


def _texts(rows: Rows, sequence: int) -> Ragged:
    """Prompts with their responses; raises `DataError` for an empty prompt and a row that is too long."""
    prompts, responses = rows.ragged("prompts"), rows.ragged("responses")
    total = prompts.lengths + responses.lengths - 1
    for wrong, reason in ((prompts.lengths == 0, "has no prompt"), (total > sequence, "is too long")):
        if wrong.any():
            row = int(wrong.nonzero()[0])
            raise DataError(
                f"row {row} {reason}: prompts of 1 token or more, and with their response at most {sequence + 1}; it "
                f"has {int(prompts.lengths[row])} and {int(responses.lengths[row])}"
            )
    texts = Ragged(prompts.values.new_zeros(int(total.sum()) + len(rows)), offsets_of(total + 1))
    for column, first in ((prompts, texts.offsets[:-1]), (responses, texts.offsets[:-1] + prompts.lengths)):
        texts.values[column.spread(first).values + _place_in_row(column)] = column.values
    return texts


def _starts(rows: Rows, sequence: int) -> Tensor:
    return torch.arange(len(rows), device=rows.ragged("prompts").offsets.device) * sequence


def _before_responses(rows: Rows, starts: Tensor) -> Ragged:
    """For each response token, the index of the token that predicts it. `starts` (N): where its row's inputs begin."""
    responses = rows.ragged("responses")
    lengths = responses.spread(rows.ragged("prompts").lengths).values
    return responses.with_values(starts + lengths - 1 + _place_in_row(responses))


def objective_of(loss: TokenLoss) -> TokenObjective:
    """Engine objective that applies `loss` to the valid tokens of micro-batches from `batch_of`.

    Raises `PlanError` in the first step if the plan splits sequences over ranks.
    """

    def of_batch(numbers: TokenNumbers, batch: Batch) -> Tensor:
        counted, columns, offsets = _counted(batch)
        logprobs = Ragged(numbers.log_probs[counted], offsets)
        entropies = None if numbers.entropies is None else numbers.entropies[counted]
        return loss(logprobs, entropies, columns)

    return TokenObjective(of_batch)


def values_objective_of(loss: ValueLoss) -> ValueObjective:
    """As `objective_of`, for a critic's engine: a token's value is that of the state before it."""

    def of_batch(values: Tensor, batch: Batch) -> Tensor:
        counted, columns, offsets = _counted(batch)
        return loss(Ragged(values[counted], offsets), columns)

    return ValueObjective(of_batch)


def _counted(batch: Batch) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Mask of the labels that count, the columns there, and the offsets of responses among them."""
    if batch.token_layout is not None:
        raise PlanError(
            "losses of responses need whole rows, but this plan gives ranks parts of rows: leave out the context "
            "axis and balance"
        )
    counted = batch.labels != IGNORE_INDEX
    columns = {name: column[counted] for name, column in batch.columns.items() if name != CHOSEN}
    lengths = columns.pop(_ROW).bincount() if _ROW in columns else counted.sum(1)
    return counted, columns, offsets_of(lengths)


def _valid(rows: Rows, column: Ragged) -> Ragged:
    return column.kept(rows.ragged("emitted")) if "emitted" in rows.columns else column


def _place_in_row(column: Ragged) -> Tensor:
    # Position in its row, 0, 1, ..., (N).
    return torch.arange(len(column.values), device=column.offsets.device) - column.spread(column.offsets[:-1]).values
