"""How well a model predicts texts that it was not trained on.

Every token of a text is predicted exactly once, in windows of `context` tokens, and sees the tokens before it in its
window. The first token of a text sees the one that begins texts, or else the one that ends them (`TextTokens.context`);
with a tokenizer that has neither it is not predicted. Windows do not overlap, except that the last one is as long as
the others and predicts only the tokens that are left. This is the rolling log-likelihood of lm-eval. Windows of several
documents share a row, each isolated (terrace.model.attention), so that short ones are no slower.

With L the sum of -ln p over the predicted tokens, n their number and b the UTF-8 bytes of all texts: loss L / n,
perplexity exp(L / n), bits per byte L / (b ln 2). The last can be compared between models with different tokenizers.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from terrace.base.errors import ConfigError, DataError
from terrace.model.decoder import IGNORE_INDEX, token_loss
from terrace.model.experts.config import refuse_looking_ahead
from terrace.train.trained import Trained

_ROW_TOKENS = 2048  # most tokens of windows that run together
_HEAD_TOKENS = 256  # tokens whose logits are made at a time: for a large vocabulary, logits dominate memory


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """`nats` is the sum of -ln p over `num_tokens` predicted tokens."""

    nats: float
    num_tokens: int
    num_documents: int
    num_bytes: int

    @property
    def loss(self) -> float:
        """Mean nats per predicted token."""
        return self.nats / self.num_tokens

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite beyond the range of a float."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.num_bytes


def evaluate(
    model: Trained,
    texts: Iterable[str],
    *,
    context: int | None = None,
    progress: Callable[[Evaluation], None] | None = None,
) -> Evaluation:
    """Evaluates `model` on `texts`, in windows of `context` tokens (default: the length it was trained with).

    `progress` receives the running result after each row. Raises `ConfigError` for a context that the model does not
    support, and `DataError` for texts with tokens outside its vocabulary or with nothing to predict.
    """
    refuse_looking_ahead(model.config.experts)
    context = model.context if context is None else context
    if context < 1:
        raise ConfigError(f"context = {context} must be at least 1")
    if model.config.learned_positions and context > model.config.max_positions:
        raise ConfigError(f"context = {context} is longer than the {model.config.max_positions} positions of the model")
    counted = _Counted()
    nats, num_tokens = 0.0, 0

    def found() -> Evaluation:
        return Evaluation(
            nats=nats, num_tokens=num_tokens, num_documents=counted.num_documents, num_bytes=counted.num_bytes
        )

    # Where RoPE follows the length of a row, a window that is long enough for that has a row of its own.
    alone = 0 < model.config.rope_limit < context
    # Texts are a stream: counts are running, and no window is kept.
    for row in _rows(counted.windows(model, texts, context), 1 if alone else max(context, _ROW_TOKENS)):
        nats += _nats(model, row)
        num_tokens += sum(window.num_predicted for window in row)
        if progress is not None:
            progress(found())
    if not num_tokens:
        raise DataError("the data has no token to predict: its documents are empty, or one token each; give others")
    return found()


class _Window(NamedTuple):
    tokens: list[int]  # each predicts the next
    num_predicted: int  # the last ones

    @property
    def size(self) -> int:
        return len(self.tokens) - 1

    @property
    def labels(self) -> list[int]:
        num_seen = self.size - self.num_predicted
        return [IGNORE_INDEX] * num_seen + self.tokens[1 + num_seen :]


class _Counted:
    def __init__(self) -> None:
        self.num_documents = 0
        self.num_bytes = 0

    def windows(self, model: Trained, texts: Iterable[str], context: int) -> Iterator[_Window]:
        before, vocabulary = model.tokenizer.text_tokens.context, model.config.vocab_size
        for text in texts:
            ids = [*([] if before is None else [before]), *model.tokenizer.encode(text).tolist()]
            # Without this check the embedding would fail with an index error, or on a GPU later.
            if max(ids, default=0) >= vocabulary:
                raise DataError(f"the data has token {max(ids)}, but the model has {vocabulary} only")
            self.num_documents += 1
            self.num_bytes += len(text.encode())
            for start in range(0, len(ids) - 1, context):
                end = min(start + context, len(ids) - 1)
                # The last window reaches back for a whole context.
                yield _Window(ids[max(0, end - context) : end + 1], end - start)


def _rows(windows: Iterable[_Window], limit: int) -> Iterator[list[_Window]]:
    row: list[_Window] = []
    size = 0
    for window in windows:
        if row and size + window.size > limit:
            yield row
            row, size = [], 0
        row.append(window)
        size += window.size
    if row:
        yield row


@torch.no_grad()
def _nats(model: Trained, row: list[_Window]) -> float:
    device = next(model.blocks[0].parameters()).device
    tokens, labels, positions = (
        # Positions restart in every window, which isolates them from each other.
        torch.tensor([[part for window in row for part in taken(window)]], device=device)
        for taken in (lambda w: w.tokens[:-1], lambda w: w.labels, lambda w: range(w.size))
    )
    x, is_alone = tokens, len(row) == 1
    for block in model.blocks[:-1]:
        x = block(x, None if is_alone else positions)
    total = 0.0
    # The head runs on a part of the row at a time: logits are the largest tensor.
    for start in range(0, labels.shape[1], _HEAD_TOKENS):
        part = slice(start, start + _HEAD_TOKENS)
        total += float(token_loss(model.blocks[-1](x[:, part], positions[:, part]), labels[:, part]))
    return total
