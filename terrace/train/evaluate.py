"""Evaluates a model on held-out text.

Every token of a text is predicted exactly once, in windows of `context` tokens, given the preceding tokens of its
window. The first token is predicted from the beginning-of-text token, or else the end-of-text token
(`TextTokens.context`); if the tokenizer has neither, it is skipped. Windows do not overlap, except that the last one
has full length and predicts only the remaining tokens. This is the rolling log-likelihood of lm-eval. Short windows of
several documents share a row, with attention kept within each (terrace.model.attention), for speed.

In conversations only the tokens that training would train are predicted, each from all tokens before it.

With L the sum of -ln p over the predicted tokens, n their number and b the UTF-8 bytes of all texts: loss L / n,
perplexity exp(L / n), bits per byte L / (b ln 2). Only bits per byte can be compared between models with different
tokenizers.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from terrace.base.errors import ConfigError, DataError
from terrace.data.chat import Mask
from terrace.data.chat_encoder import Ids
from terrace.data.tokens import encode_whole
from terrace.model.decoder import IGNORE_INDEX, token_loss
from terrace.model.facts import longest_row, refuse_non_causal, rope_limit, vocabulary_size
from terrace.train.trained import Trained

_ROW_TOKENS = 2048  # most tokens of windows that run together
_HEAD_TOKENS = 256  # tokens whose logits are made at a time: for a large vocabulary, logits dominate memory


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Result of an evaluation: `nats` is the sum of -ln p over `num_tokens` predicted tokens. `num_bytes` is 0 if only
    part of the tokens are predicted.
    """

    nats: float
    num_tokens: int
    num_documents: int
    num_bytes: int

    @property
    def loss(self) -> float:
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
    context, counted = _checked_context(model, context), _Counted()
    return _summed(model, counted, counted.windows(model, texts, context), context, progress)


def evaluate_chats(
    model: Trained,
    chats: Iterable[tuple[Ids, Mask, str]],
    *,
    context: int | None = None,
    progress: Callable[[Evaluation], None] | None = None,
) -> Evaluation:
    """Like `evaluate`, on conversations as `terrace.data.chat_tokens.read_chats` yields them.

    Only the tokens that training would train are predicted, each from its own conversation. Raises `DataError` for a
    conversation longer than `context`.
    """
    context, counted = _checked_context(model, context), _Counted()
    return _summed(model, counted, counted.chats(model, chats, context), context, progress)


def _checked_context(model: Trained, context: int | None) -> int:
    refuse_non_causal(model.config)
    context = model.context if context is None else context
    if context < 1:
        raise ConfigError(f"context = {context} must be at least 1")
    if 0 < (most := longest_row(model.config)) < context:
        raise ConfigError(f"context = {context} is longer than the {most} positions of the model")
    return context


def _summed(
    model: Trained,
    counted: "_Counted",
    windows: Iterable["_Window"],
    context: int,
    progress: Callable[[Evaluation], None] | None,
) -> Evaluation:
    nats, num_tokens = 0.0, 0

    def found() -> Evaluation:
        return Evaluation(
            nats=nats, num_tokens=num_tokens, num_documents=counted.num_documents, num_bytes=counted.num_bytes
        )

    # RoPE beyond `rope_limit` depends on the length of the row, so windows that may be longer share none.
    alone = 0 < rope_limit(model.config) < context
    # Texts are streamed: counts are accumulated, and no window is kept.
    for row in _rows(windows, 1 if alone else max(context, _ROW_TOKENS)):
        nats += _nats(model, row)
        num_tokens += sum(window.num_predicted for window in row)
        if progress is not None:
            progress(found())
    if not num_tokens:
        raise DataError("the data has no token to predict: its documents are empty, or one token each; give others")
    return found()


class _Window(NamedTuple):
    tokens: list[int]
    labels: list[int]  # the next tokens, or `IGNORE_INDEX`

    @property
    def size(self) -> int:
        return len(self.labels)

    @property
    def num_predicted(self) -> int:
        return self.size - self.labels.count(IGNORE_INDEX)


class _Counted:
    def __init__(self) -> None:
        self.num_documents = 0
        self.num_bytes = 0

    def windows(self, model: Trained, texts: Iterable[str], context: int) -> Iterator[_Window]:
        before, vocabulary = model.tokenizer.text_tokens.context, vocabulary_size(model.config)
        for text in texts:
            ids = [*([] if before is None else [before]), *encode_whole(model.tokenizer, text)]
            _check_vocabulary(ids, vocabulary)
            self.num_documents += 1
            self.num_bytes += len(text.encode())
            for start in range(0, len(ids) - 1, context):
                end = min(start + context, len(ids) - 1)
                # The last window reaches back for a whole context.
                begin = max(0, end - context)
                yield _Window(ids[begin:end], [IGNORE_INDEX] * (start - begin) + ids[start + 1 : end + 1])

    def chats(self, model: Trained, chats: Iterable[tuple[Ids, Mask, str]], context: int) -> Iterator[_Window]:
        for ids, mask, where in chats:
            tokens = ids.tolist()
            _check_vocabulary(tokens, vocabulary_size(model.config))
            # If a conversation were cut, an answer might not see its question.
            if len(tokens) - 1 > context:
                raise DataError(
                    f"{where}: the conversation has {len(tokens)} tokens, and {context + 1} at most are evaluated: "
                    "raise --context, or leave it out"
                )
            self.num_documents += 1
            labels = [token if counts else IGNORE_INDEX for token, counts in zip(tokens[1:], mask[1:], strict=True)]
            yield _Window(tokens[:-1], labels)


def _check_vocabulary(ids: list[int], vocabulary: int) -> None:
    # Without this check the embedding would fail with an index error, or on a GPU later.
    if max(ids, default=0) >= vocabulary:
        raise DataError(f"the data has token {max(ids)}, but the model has {vocabulary} only")


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


def _nats(model: Trained, row: list[_Window]) -> float:
    device = next(model.blocks[0].parameters()).device
    tokens, labels, positions = (
        # Positions restart in every window, which isolates them from each other.
        torch.tensor([[part for window in row for part in taken(window)]], device=device)
        for taken in (lambda w: w.tokens, lambda w: w.labels, lambda w: range(w.size))
    )
    return nats_of(model, tokens, labels, None if len(row) == 1 else positions)


@torch.no_grad()
def nats_of(model: Trained, tokens: Tensor, labels: Tensor, positions: Tensor | None) -> float:
    """Sum of -ln p of `labels` (B, S), aligned with the inputs `tokens` (B, S); labels equal to IGNORE_INDEX are
    skipped.

    `positions` (B, S) count within documents; None if every row is one document.
    """
    x = tokens
    for block in model.blocks[:-1]:
        x = block(x, positions)
    total = 0.0
    # The head runs on a part of the row at a time: logits are the largest tensor.
    for start in range(0, labels.shape[1], _HEAD_TOKENS):
        part = slice(start, start + _HEAD_TOKENS)
        places = None if positions is None else positions[:, part]
        total += float(token_loss(model.blocks[-1](x[:, part], places), labels[:, part]))
    return total
