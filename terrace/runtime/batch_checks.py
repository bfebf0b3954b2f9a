"""Checks of a micro-batch before an engine steps on it."""

import inspect
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from terrace.base.errors import ModelError
from terrace.runtime.batch import Batch
from terrace.runtime.objective import TokenObjective, ValueObjective


def check_batches(batches: Sequence[Batch], modules: Iterable[nn.Module], objective: object) -> None:
    """Raise `ModelError` for tensors of the wrong shape, or that the blocks or the objective do not support."""
    _check_positions(batches, modules)
    _check_columns(batches)
    _check_reads(batches, objective)


def _check_positions(batches: Sequence[Batch], modules: Iterable[nn.Module]) -> None:
    """Raise `ModelError` if positions are not one per token, or a block of `modules` does not accept them."""
    # Inputs may be features; labels are one a token, unless `reads` says which tokens have some.
    given = [
        (batch.labels if batch.reads is None else batch.inputs, batch.positions)
        for batch in batches
        if batch.positions is not None
    ]
    if not given:
        return
    for tokens, positions in given:
        if positions.shape != tokens.shape or positions.is_floating_point():
            raise ModelError(
                f"positions {tuple(positions.shape)} of {positions.dtype} must be integers of the labels' shape "
                f"{tuple(tokens.shape)}"
            )
    for module in modules:
        reason = getattr(module, "refuses_positions", "")
        if reason:
            raise ModelError(f"{reason}: leave positions away, and give each row one document")
        try:
            # Two arguments: hidden states and positions.
            inspect.signature(module.forward).bind(None, None)
        except TypeError:
            raise ModelError(
                f"{type(module).__name__}.forward takes no positions, but the micro-batch has some: give it a second "
                "argument, or leave positions away"
            ) from None


def _check_columns(batches: Sequence[Batch]) -> None:
    """Raise `ModelError` if columns or weights do not have an entry for each label."""
    for batch in batches:
        weights = {} if batch.weights is None else {"weights": batch.weights}
        for name, column in {**batch.columns, **weights}.items():
            if column.shape[: batch.labels.dim()] != batch.labels.shape or (name == "weights" and column.dim() > 2):
                raise ModelError(
                    f"column {name} of a batch is {tuple(column.shape)}: give a number for each of its labels, "
                    f"{tuple(batch.labels.shape)}"
                )


def _check_reads(batches: Sequence[Batch], objective: object) -> None:
    """Raise `ModelError` if the loss does not support `reads`, or they have the wrong shape or dtype."""
    for batch in batches:
        if batch.reads is None:
            continue
        if not isinstance(objective, (TokenObjective, ValueObjective)):
            raise ModelError("only losses of token numbers or values know the reads of a batch: leave them out")
        if batch.reads.shape != batch.labels.shape or len(batch.inputs) != 1 or batch.reads.dtype != torch.int64:
            raise ModelError(
                f"reads {tuple(batch.reads.shape)} of {batch.reads.dtype} must be int64, one for each of the labels "
                f"{tuple(batch.labels.shape)}, and of one row of inputs, not {len(batch.inputs)}"
            )
