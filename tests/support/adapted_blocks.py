"""Blocks of decoders with adapters, in fp64."""

import torch
from torch import Tensor, nn

from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig
from terrace.model.decoder import build_blocks
from terrace.model.lora.config import LoraConfig, with_adapters
from terrace.model.lora.modules import Value, add_adapters
from terrace.model.spec import BlockSpec


def values_of(config: ModelConfig, lora: LoraConfig) -> dict[tuple[str, str], Tensor]:
    """Values in fp64, with adapters that do something."""
    generator = torch.Generator().manual_seed(1)
    return {
        (block.name, param.name): torch.randn(param.shape, generator=generator, dtype=torch.float64) * 0.3
        for block in with_adapters(block_specs(config), lora)
        for param in block.params
    }


def blocks_with(config: ModelConfig, lora: LoraConfig | None, value: Value) -> list[nn.Module]:
    """Blocks on the CPU in fp64, with adapters or without."""
    blocks = build_blocks(config, "cpu", torch.float64)
    specs: tuple[BlockSpec, ...] = block_specs(config)
    if lora is not None:
        add_adapters(blocks, config, lora)
        specs = with_adapters(specs, lora)
    with torch.no_grad():
        for spec, block in zip(specs, blocks, strict=True):
            for param in spec.params:
                block.get_parameter(param.name).copy_(value(spec.name, param.name))
    return blocks
