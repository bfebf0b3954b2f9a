"""Prunes a trained model: measures its units in an evaluation, keeps the most important, and evaluates the result."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from terrace.model.blocks import block_specs
from terrace.model.importance import Meter
from terrace.model.prune import Kept, Shares, pruned_values
from terrace.train.evaluate import Evaluation
from terrace.train.trained import Trained, with_values


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """A smaller model, the units of the whole one that it keeps, and the losses of both on the same tokens."""

    model: Trained
    kept: Kept
    num_tokens: int
    before: float  # nats a token, of the whole model
    after: float  # nats a token, of the smaller model

    def value(self, block: str, param: str) -> Tensor:
        """The whole parameter, in the dtype of the evaluation, on the CPU."""
        return value_of(self.model, block, param)


def prune(
    model: Trained, shares: Shares, evaluations: Callable[[Trained], Iterable[Evaluation]], folder: Path
) -> Pruned:
    """Prunes `model`, which was read from `folder`, by the importance of its units in `evaluations`.

    Raises `ModelError` for shares that the model or its family cannot have: before the evaluation, except where it
    depends on which layers stay.
    """
    shares.num_layers(model.config)
    shares.narrowed(model.config)
    meter = Meter(model.config)
    with meter.attached(model.blocks):
        before = list(evaluations(model))
    kept = shares.chosen(model.config, meter.importance)
    config = shares.config_of(model.config, kept.layers)
    value = pruned_values(model.config, kept, lambda block, param: value_of(model, block, param))
    values = (
        (block.name, param.name, value(block.name, param.name))
        for block in block_specs(config)
        for param in block.params
    )
    first = next(model.blocks[0].parameters())
    smaller = replace(model, config=config, blocks=with_values(config, values, first.device, first.dtype, folder))
    after = list(evaluations(smaller))
    num_tokens = sum(each.num_tokens for each in before)
    losses = [sum(each.nats for each in found) / num_tokens for found in (before, after)]
    return Pruned(model=smaller, kept=kept, num_tokens=num_tokens, before=losses[0], after=losses[1])


def value_of(model: Trained, block: str, param: str) -> Tensor:
    names = [spec.name for spec in block_specs(model.config)]
    return model.blocks[names.index(block)].get_parameter(param).detach().cpu()
