"""Measures how much layers, groups of heads and channels matter, while a model is evaluated.

A unit of attention or of an MLP adds x W^T to the residual stream for each token, with its activations x and its
columns W of the output projection. Its importance is the root mean square, over tokens, of the norm of this addition:
it is measured from activations, as in Minitron (Muralidharan et al., 2407.14679, section 2.2), weighted with the matrix
that reads them, as in Wanda (Sun et al., 2306.11695, section 3). A layer's importance is its block influence: 1 minus
the mean cosine similarity of its input and its output (ShortGPT, Men et al., 2403.03853, section 2.2).

Norms on the output of a sublayer and the gate of a shared expert are applied later, so importance leaves them out.

Shape legend: N tokens or rows, H hidden, U units, F features of a unit, E experts.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig
from terrace.model.grouped import Order
from terrace.model.prune import HEADS, Importance, readers


class Meter:
    """Sums over the tokens that blocks compute while the meter is `attached`."""

    def __init__(self, config: ModelConfig) -> None:
        self._layers = [block.operations for block in block_specs(config) if block.attends]
        self._groups = config.num_kv_heads
        self._units: list[dict[str, Tensor]] = [{} for _ in self._layers]
        self._turns = torch.zeros(len(self._layers), dtype=torch.float64)
        self._num_tokens = 0

    @contextmanager
    def attached(self, blocks: Sequence[nn.Module]) -> Iterator[None]:
        """Measure all forward passes of the model's blocks inside."""
        hooks = []
        for layer, (block, operations) in enumerate(zip(blocks[1:-1], self._layers, strict=True)):
            hooks.append(block.register_forward_hook(self._turn(layer)))
            for counts, product in readers(operations).items():
                units = self._groups if counts == HEADS else product.inputs.units
                module = block.get_submodule(product.weight)
                hooks.append(module.register_forward_pre_hook(self._addition(layer, counts, units)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def importance(self) -> Importance:
        """What was measured so far, per token."""
        tokens = max(1, self._num_tokens)
        units = [{counts: (total / tokens).sqrt() for counts, total in each.items()} for each in self._units]
        return Importance(layers=self._turns / tokens, units=tuple(units))

    def _turn(self, layer: int) -> Callable[..., None]:
        def add(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            x, y = (each.detach().flatten(0, -2) for each in (inputs[0], output))
            wide = torch.promote_types(x.dtype, torch.float32)
            cosines = F.cosine_similarity(x.to(wide), y.to(wide), dim=-1)
            self._turns[layer] += (1.0 - cosines).sum(dtype=torch.float64).cpu()
            self._num_tokens += len(x) if layer == 0 else 0

        return add

    def _addition(self, layer: int, counts: str, units: int) -> Callable[..., None]:
        def add(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            x, weight = inputs[0].detach(), module.get_parameter("weight").detach()
            if weight.dim() == 3:  # of experts, with rows sorted by expert
                order: Order = inputs[1]
                parts = torch.split(x, list(order.counts))
                found = torch.stack([additions(*each, units) for each in zip(parts, weight, strict=True)])
            else:
                found = additions(x.flatten(0, -2), weight, units)
            known = self._units[layer]
            known[counts] = known.get(counts, torch.zeros_like(found)) + found

        return add


def additions(x: Tensor, weight: Tensor, units: int) -> Tensor:
    """Sums over tokens of the squared norm of what each unit adds, (U) in fp64, from x (N, U F) and weight (H, U F)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x, weight = x.to(wide).contiguous(), weight.to(wide)
    if x.shape[1] == units:
        # Of one feature, the norm is a product of two.
        return (x.square().sum(0, dtype=torch.float64) * weight.square().sum(0, dtype=torch.float64)).cpu()
    rows, columns = x.view(len(x), units, -1), weight.reshape(len(weight), units, -1)
    added = (rows[:, unit] @ columns[:, unit].t() for unit in range(units))
    return torch.stack([each.square().sum(dtype=torch.float64) for each in added]).cpu()
