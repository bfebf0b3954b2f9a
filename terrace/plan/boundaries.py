"""Boundary activations that are kept below the device (`Keep.activations`): the inputs of chosen blocks.

The input of a block is kept from its forward to its backward, whether the block is recomputed or not. Below the device
it leaves after the forward and comes back ahead of the backward (EVICT and FETCH, terrace.program.boundaries). The
first block of a model reads tokens, which are small, so its input stays.

For n elements of an input on a rank, in the dtype of `compute`, a micro-batch and block has the pieces of a state that
is kept whole (terrace.plan.kept), and all of them pass through a buffer of one piece each way.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from terrace.base.errors import PlanError
from terrace.plan.dims import is_layer
from terrace.plan.keep import NUM_WAYS, Keep
from terrace.plan.pieces import Piece, whole_pieces
from terrace.plan.plan import Plan
from terrace.plan.recompute import WHOLE, Recomputation, meant, parse_recomputation
from terrace.plan.wire import FORMATS

if TYPE_CHECKING:
    from terrace.model.spec import BlockSpec

MOST_LEAVING = 1  # inputs being written while the next blocks run forward
MOST_AHEAD = 1  # inputs fetched ahead of the one that a backward reads; in a pipeline, also that of the next task


def leaving(keep: Keep, blocks: "Sequence[BlockSpec]") -> frozenset[int]:
    """Indexes of the blocks whose inputs leave the device; by default of all layers.

    Raises `PlanError` for an entry of `keep.blocks` that names no such block.
    """
    if not keep.activations_below:
        return frozenset()
    names, are_layers = [block.name for block in blocks], [is_layer(blocks, index) for index in range(len(blocks))]
    found = set[int]() if keep.blocks else {index for index in range(1, len(blocks)) if are_layers[index]}
    for entry in keep.blocks:
        selected = _parsed(entry).selects(names, are_layers)
        if not selected:
            raise PlanError(f"keep.blocks {entry!r} matches no block{meant(entry, names)}")
        found.update(selected)
    wide = [index for index in found if blocks[index].operations.widths[0] > 1]
    if wide and keep.blocks:
        raise PlanError(
            f"keep.blocks {keep.blocks[0]!r} names {blocks[wide[0]].name}, whose input has several representations of "
            "a token, which no ring holds: name the layers before it"
        )
    found -= {*wide}
    if not found - {0}:
        named = f"keep.blocks = {list(keep.blocks)} names" if keep.blocks else "the model has"
        raise PlanError(
            f"keep.activations = {keep.activations!r} has no effect: {named} no block behind the first one, which "
            "reads tokens; leave it out"
        )
    return frozenset(found - {0})


def _parsed(entry: str) -> Recomputation:
    try:
        found = parse_recomputation(entry)
    except PlanError as error:
        raise PlanError(str(error).replace("recompute ", "keep.blocks ", 1)) from error
    if found.operations != WHOLE:
        raise PlanError(f"keep.blocks {entry!r}: the inputs of blocks leave, not of operations; leave out the colon")
    return found


def input_pieces(plan: Plan, numel: int) -> tuple[Piece, ...]:
    return whole_pieces(plan.keep.piece, numel, FORMATS[plan.compute].element_bytes)


def input_bytes(plan: Plan, numel: int) -> int:
    return sum(piece.num_bytes for piece in input_pieces(plan, numel))


def passing_bytes(plan: Plan, numel: int) -> int:
    """Bytes of the buffers through which inputs of `numel` elements pass: a piece each way; 0 if none leaves."""
    if not plan.keep.activations_below:
        return 0
    return NUM_WAYS * max(piece.num_bytes for piece in input_pieces(plan, numel))
