"""Models whose blocks are not one embedding, equal layers and one head."""

from dataclasses import replace

from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig
from terrace.model.spec import BlockSpec


def differing(model: ModelConfig) -> list[tuple[BlockSpec, ...]]:
    """A first layer with a wider MLP; two kinds in turn; no logits; two look-ups."""
    blocks = block_specs(model)
    wide = block_specs(replace(model, intermediate_size=2 * model.intermediate_size))
    return [
        (blocks[0], wide[1], *blocks[2:]),
        tuple((wide if index % 2 else blocks)[index] for index in range(len(blocks))),
        blocks[:-1],
        (blocks[0], replace(blocks[0], name="second"), *blocks[1:]),
    ]


def undeclared(model: ModelConfig) -> list[tuple[BlockSpec, ...]]:
    """Blocks as users give them, shapes and the hidden size of vectors; and one such block among declared ones."""
    blocks = block_specs(model)
    bare = tuple(map(_bare, blocks))
    return [bare, (*blocks[:-1], replace(bare[1], name="adapter"), blocks[-1])]


def _bare(block: BlockSpec) -> BlockSpec:
    params = tuple(replace(param, dims=() if len(param.shape) > 1 else param.dims) for param in block.params)
    return BlockSpec(name=block.name, params=params, tied_to=block.tied_to)
