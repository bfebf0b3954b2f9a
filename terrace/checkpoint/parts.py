"""The state of a rank as boxes of whole parameters.

A rank keeps a range of a flat buffer, and the buffer holds slices of parameters, padded where a dim does not divide:

    range of the buffer -> for each parameter, a range of its slice -> boxes of the slice -> without padding, and
    moved to where the slice begins: boxes of the whole parameter

The last form no longer depends on the plan. Writing, reading and resharding work on it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from terrace.base.errors import CheckpointError
from terrace.checkpoint.boxes import Box, cut, numel, overlap, shifted, sizes, whole, within
from terrace.model.spec import ParamSpec
from terrace.plan.mesh import Mesh
from terrace.plan.slices import rank_slices
from terrace.program.program import Program
from terrace.runtime.flat_param import FlatParam
from terrace.runtime.states import FROZEN, KINDS

CHOICES, COUNTS = "mlp.router.choices", "counts"  # the tokens of each expert in the last step, beside the parameters
Slices = Callable[[ParamSpec], tuple[slice, ...]]  # the slice of a whole parameter that a rank holds


@dataclass(frozen=True, kw_only=True)
class Held:
    """A rank's range of one flat buffer: by kind, 1-D tensors of its elements from `start` on, padding included."""

    flat: FlatParam
    start: int
    values: Mapping[str, Tensor]
    is_first: bool  # of the ranks that hold the same: the one that writes


@dataclass(frozen=True, kw_only=True)
class BoxValues:
    """A box of a whole parameter, and by kind this rank's values of it: views of the box's shape."""

    parameter: str
    box: Box
    values: dict[str, Tensor]


def slices_of(mesh: Mesh, rank: int) -> Slices:
    """Slice of each whole parameter held by `rank`."""
    return partial(rank_slices, mesh=mesh, rank=rank)


def held(flat: FlatParam) -> list[Held]:
    """State of a flat parameter that a checkpoint stores: from the optimizer tier, or the frozen values.

    Raises `CheckpointError` for a plan with islands.
    """
    # Islands have states of their own, and one file for all would hold the first one's.
    if flat.layout.num_islands > 1:
        raise CheckpointError("a plan with islands has no checkpoints yet: leave plan.outer out")
    tier = flat.layout.optimizer if flat.spec.trainable else flat.layout.params
    start, is_first = flat.part(tier).start, flat.is_first(tier)
    if not flat.spec.trainable:
        # Frozen parameters have no optimizer state and stay on the parameters' tier.
        values = dict(zip(KINDS[FROZEN], (flat.shard,), strict=True))
        return [Held(flat=flat, start=start, values=values, is_first=is_first)]
    assert flat.optimizer is not None, f"block {flat.name} is not initialised"
    return [
        Held(flat=flat, start=start + part.elements.start, values=part.values, is_first=is_first)
        for part in flat.optimizer.parts
    ]


def parts_of(flats: Iterable[FlatParam], slices: Slices, *, first: bool = False) -> Iterator[tuple[str, BoxValues]]:
    """(block, part) for every box of whole parameters that a rank holds in `flats`.

    With `first`, only boxes that no earlier rank holds, so that all ranks together write each element once.
    """
    for flat in flats:
        for own in held(flat):
            if own.is_first or not first:
                yield from ((flat.name, part) for part in _parts(own, slices))


def choices_of(program: Program, choices: Mapping[int, Tensor]) -> Iterator[tuple[str, BoxValues]]:
    """(block, part) of `choices`: by block the tokens of each expert (E) in the last step, on all ranks of a stage."""
    for block, counts in choices.items():
        part = BoxValues(parameter=CHOICES, box=whole([len(counts)]), values={COUNTS: counts})
        yield program.blocks[block].name, part


def _parts(own: Held, slices: Slices) -> Iterator[BoxValues]:
    stop = own.start + next(iter(own.values.values())).numel()
    for spec, first, last in own.flat.extents:
        place = slices(spec)
        # The slice without padding; elements outside belong to no whole parameter.
        real = tuple((0, part.stop - part.start) for part in place)
        # Elements of the buffer from here on are covered by the boxes in turn.
        at = max(own.start, first)
        for box in cut(spec.shape, at - first, min(stop, last) - first):
            elements = slice(at - own.start, at - own.start + numel(box))
            at += numel(box)
            clipped = overlap(box, real)
            if clipped is not None:
                yield BoxValues(
                    parameter=spec.name,
                    box=shifted(clipped, [part.start for part in place]),
                    values={
                        # A view, so that loading writes straight into the rank's state.
                        kind: values[elements].view(sizes(box))[within(clipped, box)]
                        for kind, values in own.values.items()
                    },
                )
