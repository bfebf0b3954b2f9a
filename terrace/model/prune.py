"""Makes a smaller decoder from the most important units of a larger one (structured pruning in width and depth).

Units are layers, groups of heads (a key-value head with the query heads that share it), and channels: the inner
features of MLPs, of every expert and of shared experts. Every layer keeps the same number of groups and channels, those
that are most important in it (terrace.model.importance). The spec of a parameter
declares which of its dims count units, so all families are cut by the same rule.

A unit's output reaches the residual stream through its columns of one matrix, so the smaller model computes what the
larger one computes with these columns set to zero, and with the layers left out.

Shape legend: L layers, G groups of heads, C channels, E experts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from terrace.base.errors import ModelError
from terrace.base.words import counted
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig, to_table
from terrace.model.experts.config import ExpertsConfig
from terrace.model.hf.families import FAMILIES
from terrace.model.operations import Operations, Product
from terrace.model.windows import widest_window

HEADS, CHANNELS = "heads", ("intermediate", "expert_intermediate")  # dims of units; groups of heads count as "heads"
_NEAR = 0.1  # of a unit: how far a share of layers or groups may be from a whole number of them


@dataclass(frozen=True, kw_only=True)
class Importance:
    """The importance of units, higher for units that matter more.

    `layers` is (L). `units` has, for each layer, (G) under "heads", and under the dim of its channels (C), or (E, C) of
    experts.
    """

    layers: Tensor
    units: tuple[Mapping[str, Tensor], ...]


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Ascending indices of the units that stay: layers, and the units of each of these, as in `Importance.units`."""

    layers: tuple[int, ...]
    units: tuple[Mapping[str, Tensor], ...]


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Shares of the units that stay. Raises `ModelError` for values out of range."""

    layers: float = 1.0
    heads: float = 1.0
    intermediate: float = 1.0

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "intermediate"):
            if not 0 < getattr(self, name) <= 1:  # nan is not
                raise ModelError(f"--{name} {getattr(self, name)} must be above 0 and at most 1: the share that stays")
        if self.layers == self.heads == self.intermediate == 1:
            raise ModelError("nothing would be removed: give --layers, --heads or --intermediate below 1")

    def num_layers(self, whole: ModelConfig) -> int:
        """Layers that stay. Raises `ModelError` for a share that is no whole number of layers."""
        return _few("layers", self.layers, whole.num_layers, "layers")

    def narrowed(self, whole: ModelConfig) -> ModelConfig:
        """The model with all its layers and the heads and channels that stay.

        Raises `ModelError` for a share that is no whole number of groups, or that leaves no channel or all of them, and
        if the family cannot express the model.
        """
        if whole.whole_qk_norm and self.heads < 1:
            raise ModelError(
                f"--heads {self.heads}: {whole.family} normalises the queries of all heads as one, so no head can be "
                "removed alone: leave --heads out"
            )
        names = FAMILIES[whole.family].names
        if self.heads < 1 and "head_dim" not in names and not whole.latent.key_value_rank:
            raise ModelError(
                f"--heads {self.heads}: a {whole.family} config.json has no key for the size of a head, which follows "
                "from the number of heads, so none can be removed: leave --heads out"
            )
        if self.heads < 1 and (whole.is_linear or any(kind.is_linear for kind in whole.kinds)):
            raise ModelError(
                f"--heads {self.heads}: heads of linear layers have states of their own, and none can be removed yet: "
                "leave --heads out"
            )
        groups = _few("heads", self.heads, whole.num_kv_heads, "key-value heads")
        made = replace(
            whole,
            num_heads=groups * (whole.num_heads // whole.num_kv_heads),
            num_kv_heads=groups,
            intermediate_size=self._channels(whole.intermediate_size),
            experts=None if whole.experts is None else self._experts(whole.experts),
        )
        return _expressible(made)

    def config_of(self, whole: ModelConfig, layers: Sequence[int]) -> ModelConfig:
        """Configuration of the model with these layers. Raises `ModelError` as `narrowed` does."""
        made, changes = self.narrowed(whole), dict[str, Any]()
        if made.experts is not None:
            dense = tuple(new for new, old in enumerate(layers) if old in made.experts.dense_layers)
            changes["experts"] = replace(made.experts, dense_layers=dense)
        if made.kinds:
            kinds = tuple(made.kinds[layer] for layer in layers)
            widest = widest_window([kind.sliding_window for kind in kinds])
            # As `read_kinds` has it: the widest layer with RoPE, with attention if any has it.
            main = max(kinds, key=lambda kind: (not kind.is_linear, kind.rope_theta > 0, kind.sliding_window == widest))
            changes |= {
                "is_linear": main.is_linear,
                "rope_theta": main.rope_theta,
                "rope_scaling": main.rope_scaling,
                "sliding_window": widest,
            }
            changes |= {"kinds": kinds if len(set(kinds)) > 1 else (), "rotary_dim": made.rotary_dim}
            if not main.rope_theta:
                changes["rotary_dim"] = 0
        return _expressible(replace(made, num_layers=len(layers), **changes))

    def chosen(self, whole: ModelConfig, importance: Importance) -> Kept:
        layers = tuple(_best(importance.layers, self.num_layers(whole)).tolist())
        made = self.config_of(whole, layers)
        units = []
        for new, old in zip(_layers(made), layers, strict=True):
            numbers = {counts: each.inputs.units for counts, each in readers(new).items()} | {HEADS: made.num_kv_heads}
            units.append({counts: _best(scores, numbers[counts]) for counts, scores in importance.units[old].items()})
        return Kept(layers=layers, units=tuple(units))

    def _channels(self, size: int) -> int:
        number = int(size * self.intermediate + 0.5)
        if not number:
            raise ModelError(
                f"--intermediate {self.intermediate} of {size} inner features leaves none: give at least {1 / size:.2g}"
            )
        if number == size and self.intermediate < 1:
            raise ModelError(
                f"--intermediate {self.intermediate} of {size} inner features leaves all: give at most "
                f"{(size - 1) / size:.4g}, or leave --intermediate out"
            )
        return number

    def _experts(self, experts: ExpertsConfig) -> ExpertsConfig:
        size, shared = self._channels(experts.intermediate_size), experts.shared_size
        # Where several shared experts are one MLP, families give their number and the size of one.
        several, rest = divmod(shared, experts.intermediate_size)
        if shared:
            shared = self._channels(shared) if rest else several * size
        return replace(experts, intermediate_size=size, shared_size=shared)


def pruned_values(whole: ModelConfig, kept: Kept, value: Callable[[str, str], Tensor]) -> Callable[[str, str], Tensor]:
    """Values of the smaller model by (block, parameter), cut from those of the whole one."""
    specs = {(block.name, param.name): param for block in block_specs(whole) for param in block.params}
    places = {f"layers.{new}": (f"layers.{old}", kept.units[new]) for new, old in enumerate(kept.layers)}
    queries = whole.num_heads // whole.num_kv_heads

    def pruned(block: str, param: str) -> Tensor:
        source, units = places.get(block, (block, {}))
        found = value(source, param)
        for dim, (counts, number) in enumerate(specs[source, param].dims):
            if counts in CHANNELS and counts in units:
                found = _taken(found, dim, units[counts], number)
            elif HEADS not in units:
                continue
            elif counts == "kv_heads":
                found = _taken(found, dim, units[HEADS], number)
            elif counts == "heads":
                # The query heads of a group are consecutive.
                found = _taken(found, dim, units[HEADS], number // queries)
        return found

    return pruned


def readers(operations: Operations) -> dict[str, Product]:
    """The product through which the units of each dim reach the residual stream, by the dim's quantity.

    Heads of linear layers are not removed.
    """
    products = [each for each in (*operations.passed, *operations.mixture.each) if isinstance(each, Product)]
    removed = CHANNELS if operations.delta.heads else (HEADS, *CHANNELS)
    return {each.inputs.counts: each for each in products if each.inputs.counts in removed}


def sizes_words(config: ModelConfig) -> str:
    heads = f"{counted(config.num_heads, 'head')} on {counted(config.num_kv_heads, 'key-value head')}"
    inner = f"{config.intermediate_size} inner features"
    if config.experts is not None:
        inner = f"{config.experts.intermediate_size} inner features of an expert"
    return f"{counted(config.num_layers, 'layer')}, {heads}, {inner}"


def _layers(config: ModelConfig) -> list[Operations]:
    return [block.operations for block in block_specs(config) if block.attends]


def _few(option: str, share: float, number: int, words: str) -> int:
    """Whole number of a few units: rounding it away silently would remove much more or less than asked."""
    wanted = share * number
    found = int(wanted + 0.5)
    if share == 1 or (0 < found < number and abs(wanted - found) <= _NEAR):
        return found
    fitting = sorted({max(1, min(int(wanted), number - 1)), min(number, int(wanted) + 1)})
    named = " or ".join(f"{each / number:.4g} ({each})" for each in fitting)
    raise ModelError(f"--{option} {share} of {number} {words} is {wanted:.4g}, no whole number of them: give {named}")


def _expressible(made: ModelConfig) -> ModelConfig:
    try:
        to_table(made)
    except ModelError as error:
        raise ModelError(f"the {made.family} family has no model of these sizes: {error}") from error
    return made


def _best(scores: Tensor, number: int) -> Tensor:
    # Stable, so that equal scores keep the first units on every machine.
    return scores.argsort(dim=-1, descending=True, stable=True)[..., :number].sort(-1).values


def _taken(value: Tensor, dim: int, units: Tensor, number: int) -> Tensor:
    """The elements of `units` of a dim that has `number` of them; of a stack, `units` (E, C) are those of each part."""
    if units.dim() == 2:
        return torch.stack([_taken(part, dim - 1, own, number) for part, own in zip(value, units, strict=True)])
    size = value.shape[dim] // number
    return value.index_select(dim, (units.unsqueeze(1) * size + torch.arange(size)).flatten().to(value.device))
