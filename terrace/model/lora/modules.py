"""LoRA modules, and merging of adapters into weights."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig
from terrace.model.lora.config import LoraConfig, adapter_names, is_adapter, targets

Value = Callable[[str, str], Tensor]  # (block, parameter) -> the whole parameter


class LoraLinear(nn.Module):
    """A linear layer with an adapter, (..., I) to (..., O); weight and bias are those of `base`."""

    def __init__(self, base: nn.Linear, lora: LoraConfig) -> None:
        super().__init__()
        self.weight, self.bias = base.weight, base.bias
        where: dict[str, Any] = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.lora_a = nn.Parameter(torch.empty(lora.rank, base.in_features, **where))
        self.lora_b = nn.Parameter(torch.empty(base.out_features, lora.rank, **where))
        self.scale = lora.scale

    def forward(self, x: Tensor) -> Tensor:
        """Output of the layer plus that of the adapter, for x (..., I)."""
        y = F.linear(x, self.weight, self.bias)
        return torch.add(y, F.linear(F.linear(x, self.lora_a), self.lora_b), alpha=self.scale)


def add_adapters(blocks: Sequence[nn.Module], config: ModelConfig, lora: LoraConfig) -> None:
    """Freeze the blocks of a decoder and add uninitialised adapters to the target layers.

    Afterwards the parameters match `terrace.model.lora.config.with_adapters`.
    """
    specs = block_specs(config)
    for block in blocks:
        block.requires_grad_(False)
    modules = {spec.name: block for spec, block in zip(specs, blocks, strict=True)}
    for block_name, weight in targets(specs, lora):
        path = weight.rpartition(".")[0]
        parent = modules[block_name].get_submodule(path.rpartition(".")[0])
        base = modules[block_name].get_submodule(path)
        assert isinstance(base, nn.Linear), f"{block_name}.{path} is no linear layer"
        # The layer is replaced under its name, so the block's code does not change.
        setattr(parent, path.rpartition(".")[2], LoraLinear(base, lora))


def merged(config: ModelConfig, lora: LoraConfig, value: Value) -> Value:
    """Values of the model with adapters merged into their weights.

    Merging is computed in the wider dtype of weight and adapter, at least fp32, which is also the dtype of the result.
    """
    chosen = targets(block_specs(config), lora)

    def folded(block: str, param: str) -> Tensor:
        base = value(block, param)
        if (block, param) not in chosen:
            return base
        down, up = (value(block, name) for name in adapter_names(param))
        dtype = torch.promote_types(torch.promote_types(base.dtype, up.dtype), torch.float32)
        return torch.addmm(base.to(dtype), up.to(dtype), down.to(dtype), alpha=lora.scale)

    return folded


def merged_parameters(
    parameters: Iterable[tuple[str, str, Tensor]], config: ModelConfig, lora: LoraConfig | None
) -> Iterator[tuple[str, str, Tensor]]:
    """(block, parameter, value) of a model with merged adapters; unchanged if `lora` is None.

    `parameters` must be ordered by block; one block is in memory at a time.
    """
    if lora is None:
        yield from parameters
        return
    held: dict[str, dict[str, Tensor]] = defaultdict(dict)
    folded = merged(config, lora, lambda block, param: held[block][param])

    def finished(block: str) -> Iterator[tuple[str, str, Tensor]]:
        yield from ((block, param, folded(block, param)) for param in held[block] if not is_adapter(param))
        del held[block]

    for block, param, value in parameters:
        # A new block begins, so the previous one is complete.
        if held and block not in held:
            yield from finished(next(iter(held)))
        held[block][param] = value
    for block in list(held):
        yield from finished(block)
