"""The blocks of a decoder, from its configuration. Pure: needs no torch.

They are "embedding", "layers.0" ... and "head", in this order. Their operations (terrace.model.block_operations) say
what they compute, and their parameters, which follow from these, are named and shaped exactly as the modules of
`terrace.model.decoder`.
"""

from collections.abc import Sequence

from terrace.base.errors import ModelError
from terrace.model.block_operations import embedding_operations, head_operations, layer_operations
from terrace.model.config import ModelConfig
from terrace.model.operation_folds import params_of
from terrace.model.operations import Operations
from terrace.model.spec import BlockSpec


def block_specs(config: ModelConfig) -> tuple[BlockSpec, ...]:
    """The blocks in order, their parameters in the order of `named_parameters`.

    With tied embeddings the head borrows block 0 and does not list the output matrix; a scalar head has its own.
    """
    layers = [config.of_layer(index) for index in range(config.num_layers)]
    borrows = (0,) if config.tied_embeddings and not config.scalar_head else ()
    # Blocks of a kind share one value of operations and one tuple of parameters: caches recognise them by identity.
    return (
        _spec("embedding", embedding_operations(config)),
        *(_spec(f"layers.{index}", layer_operations(layer)) for index, layer in enumerate(layers)),
        _spec("head", head_operations(config), borrows),
    )


def _spec(name: str, operations: Operations, borrows: tuple[int, ...] = ()) -> BlockSpec:
    return BlockSpec(name=name, params=params_of(operations), borrows=borrows, declared=operations)


def operations_of(blocks: Sequence[BlockSpec]) -> Operations:
    """The operations that a model's layers share: of its first layer with experts, else of its first layer, else any.

    Raises `ModelError` where no block declares any.
    """
    known = [block for block in blocks if block.declared.each]
    if not known:
        raise ModelError("no block declares what it computes: give specs of block_specs, or the seconds of each block")
    layers = [block.operations for block in known if block.attends]
    return next((each for each in layers if each.mixture.each), (layers or [known[0].operations])[0])


def forward_flops(config: ModelConfig, block_index: int, batch_size: int, sequence: int) -> int:
    """FLOPs of the matrix products in one forward pass of a block on (B, S) tokens (terrace.model.operation_folds).

    Raises `IndexError` for a block that does not exist.
    """
    if not 0 <= block_index < config.num_blocks:
        raise IndexError(f"block {block_index} of a model with {config.num_blocks} blocks")
    return block_specs(config)[block_index].forward_flops(batch_size, sequence)


def num_params(config: ModelConfig) -> int:
    """Number of parameters; a tied matrix counts once."""
    return sum(param.numel for block in block_specs(config) for param in block.params)


def num_active_params(config: ModelConfig) -> int:
    """Number of parameters that a token meets: of a mixture's experts, those that it passes."""
    return sum(block.active(param) for block in block_specs(config) for param in block.params)
