"""Share of a block's weight gradients that is computed if some of its matrices are frozen."""

from collections.abc import Sequence
from dataclasses import replace

from terrace.model.params import ParamSpec
from terrace.model.spec import BlockSpec


def trained_part(block: BlockSpec, blocks: Sequence[BlockSpec]) -> float:
    """Share of trainable elements among the matrices that a token uses in a block, tied ones included.

    `blocks` are the blocks of its model. Sizes are those of whole matrices, also for a rank's slices, since the planner
    prices a block once for all shapes.
    """
    owners = () if block.operations.reads_ahead else block.tied_to  # a look-up has no product
    tied = [param for owner in owners for param in blocks[owner].params if _is_multiplied(param)]
    matrices = [param for param in (*block.params, *tied) if param.decays]
    sizes = [(block.active(replace(param, shape=param.whole or param.shape)), param.trainable) for param in matrices]
    total = sum(size for size, _ in sizes)
    if not total:
        return 1.0 if block.num_trainable else 0.0
    return sum(size for size, is_trained in sizes if is_trained) / total


def _is_multiplied(param: ParamSpec) -> bool:
    # A tied head has no product with the learned positions of its embedding.
    return not param.dims or param.dims[0][0] != "positions"
