"""Specs of a decoder's blocks, derived from its configuration. Needs no torch.

The blocks are "embedding", "layers.0" ... and "head", in this order; the last layers may predict further tokens. Each
has its operations (terrace.model.block_operations) and the parameters that follow from them, with the names and shapes
of the modules of `terrace.model.decoder`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from terrace.base.errors import ModelError
from terrace.model.block_operations import (
    embedding_operations,
    further_token_operations,
    head_operations,
    layer_operations,
)
from terrace.model.config import ModelConfig
from terrace.model.operation_folds import params_of
from terrace.model.operations import Loss, Operations
from terrace.model.spec import BlockSpec


def block_specs(config: ModelConfig) -> tuple[BlockSpec, ...]:
    """Specs of all blocks in order, with parameters in the order of `named_parameters`.

    With tied embeddings the head is tied to block 0 and does not list the output matrix. A scalar head is never tied.
    """
    layers = [config.of_layer(index) for index in range(config.num_layers)]
    further = range(config.num_mtp_layers)
    tied_to = (0,) if config.tied_embeddings and not config.scalar_head else ()
    # Equal blocks share the same Operations and parameter objects, so that caches can compare them by identity.
    return (
        _spec("embedding", embedding_operations(config)),
        *(_spec(f"layers.{index}", layer_operations(layer)) for index, layer in enumerate(layers)),
        *(_spec(f"layers.{len(layers) + k}", further_token_operations(config, 1 + k), (0,)) for k in further),
        _spec("head", head_operations(config), tied_to),
    )


def _spec(name: str, operations: Operations, tied_to: tuple[int, ...] = ()) -> BlockSpec:
    return BlockSpec(name=name, params=params_of(operations), tied_to=tied_to, declared=operations)


def with_loss_beside(blocks: Sequence[BlockSpec], other: ModelConfig, num_labels: int = 1) -> tuple[BlockSpec, ...]:
    """`blocks` whose loss also computes the logits of another model, from its hidden states."""
    return _with_loss(blocks, beside=other.hidden_size, num_labels=num_labels)


def reading_hidden(blocks: Sequence[BlockSpec]) -> tuple[BlockSpec, ...]:
    """`blocks` of a model whose hidden states are read before its output matrix, and which has no loss."""
    return _with_loss(blocks, only_reads=True)


def _with_loss(blocks: Sequence[BlockSpec], **changes: Any) -> tuple[BlockSpec, ...]:
    *others, last = blocks
    each = [replace(each, **changes) if isinstance(each, Loss) else each for each in last.declared]
    return (*others, replace(last, declared=Operations(tuple(each))))


def operations_of(blocks: Sequence[BlockSpec]) -> Operations:
    """Operations of a representative block: the first layer with experts, else the first layer, else the first block.

    Raises `ModelError` if no block declares operations.
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
    """Number of parameters active for one token: of a mixture's experts, only the chosen ones count."""
    return sum(block.active(param) for block in block_specs(config) for param in block.params)


def model_flops(model: ModelConfig, sequence: int, batch: int) -> int:
    """Model FLOPs of a step on `batch` sequences: three times the products of the forward, with full S x S attention.

    For GPT this is 72 B S L H^2 (1 + S / 6H + V / 12LH): Korthikanti et al. 2205.05198, section 6, from which they take
    the model FLOPs utilization (MFU).
    """
    return 3 * sum(block.forward_flops(batch, sequence) for block in block_specs(model))


def hardware_flops(model: ModelConfig, sequence: int, batch: int) -> int:
    """FLOPs executed for `batch` sequences with full recomputation of the layers.

    For GPT, 96 B S L H^2 (1 + S / 6H + V / 16LH): Narayanan et al. 2104.04473, equation 3, as used in their Table 1.
    Recomputation inside a flash kernel is not counted.
    """
    # Recomputation runs the forward of every layer twice.
    again = sum(block.forward_flops(batch, sequence) for block in block_specs(model) if block.attends)
    return model_flops(model, sequence, batch) + again
