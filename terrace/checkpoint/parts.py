"""The state of a rank as boxes of whole parameters (`terrace.plan.holdings`) with their tensors.

Used by writing, reading and resharding.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from terrace.base.boxes import Box, numel, sizes, whole, within
from terrace.checkpoint.islands import HEARD, MARKS, NUMBERS, NUMBERS_BLOCK, TOLD, own_name
from terrace.model.base_formats import BASE_FORMATS
from terrace.plan.holdings import Slices, flat_boxes
from terrace.plan.mesh import Mesh
from terrace.plan.slices import rank_slices
from terrace.program.program import Program
from terrace.runtime.elementwise import StatePart
from terrace.runtime.outer_numbers import OuterNumbers
from terrace.runtime.outer_state import OuterState
from terrace.runtime.projected import WholeState, whole_states
from terrace.runtime.states import CONSTANTS, FROZEN, PROJECTION, constants_name, kinds_of

if TYPE_CHECKING:
    from terrace.runtime.flat_param import FlatParam

CHOICES, COUNTS = "mlp.router.choices", "counts"  # of routers in the last step, beside the parameters


@dataclass(frozen=True, kw_only=True)
class Held:
    """A rank's range of one flat buffer: by kind, 1-D tensors of its elements from `start` on, padding included.

    Of frozen matrices held in codes these are bytes of records.
    """

    flat: "FlatParam"
    start: int
    values: Mapping[str, Tensor]
    is_first: bool  # of the ranks that hold the same: the one that writes
    island: int | None = None  # the island whose own state this is; None: the model's state


@dataclass(frozen=True, kw_only=True)
class BoxValues:
    """A box of a whole parameter, with this rank's values by kind: views in the box's shape."""

    parameter: str
    box: Box
    values: dict[str, Tensor]


def slices_of(mesh: Mesh, rank: int) -> Slices:
    return partial(rank_slices, mesh=mesh, rank=rank)


def held(flat: "FlatParam", *, own: bool = True) -> Iterator[Held]:
    """State of a flat parameter that a checkpoint stores: the optimizer's slice, or the frozen values.

    Of rows that are kept below the device one part is in memory at a time.

    Under a plan with islands the model's value is the anchor (terrace.checkpoint.islands). If islands' `own` state is
    not included, each island's inner optimizer state counts as the model's, as when every island starts from the
    anchor.
    """
    tier = flat.layout.optimizer if flat.spec.trainable else flat.layout.params
    start, island = flat.part(tier).start, flat.layout.island_of(flat.coordinates)
    is_first = flat.is_first(tier) and not island
    if not flat.spec.trainable:
        # Frozen parameters stay on the parameters' tier. The optimizer has no state of them but those below the device.
        (kind,) = kinds_of(flat.layout.code or FROZEN)
        start = flat.stored_start(tier)
        for state in flat.optimizer.states:
            for elements in state.windows(flat.padded):
                at = start + elements.start
                yield Held(flat=flat, start=at, values={kind: state.tensor}, is_first=is_first)
        if not flat.optimizer.states:
            yield Held(flat=flat, start=start, values={kind: flat.shard}, is_first=is_first)
        return
    for part in flat.optimizer.parts:
        at, model = start + part.elements.start, dict(part.values)
        for outer in flat.outer_states:
            model, of_island = _anchored(outer, part, at_anchor=not own or not island)
            if own:
                yield Held(flat=flat, start=at, values=of_island, is_first=flat.is_first(tier), island=island)
        yield Held(flat=flat, start=at, values=model, is_first=is_first)


def is_in_blocks(flat: "FlatParam") -> bool:
    """Whether states of a flat parameter are in 8-bit blocks, so that parts of it hold decoded copies."""
    return any(state.is_coded for state in flat.optimizer.states)


def _anchored(outer: OuterState, part: StatePart, *, at_anchor: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """State of a part by kind: the model's, with the inner optimizer's if `at_anchor`, and this island's."""
    inner = dict(part.values)
    value = next(iter(inner))
    model = {value: outer.anchor[part.elements]}
    own = {value: inner.pop(value)}
    (model if at_anchor else own).update(inner)
    for values, more in ((model, outer.shared), (own, outer.own)):
        values.update({kind: slices[part.elements] for kind, slices in more.items()})
    return model, own


def parts_of(
    flats: Iterable["FlatParam"], slices: Slices, *, first: bool = False, own: bool = True
) -> Iterator[tuple[str, BoxValues]]:
    """(block, part) for every box of whole parameters that a rank holds in `flats`; `own` as for `held`.

    With `first`, only boxes that no earlier rank holds, so that all ranks together write each element once.
    """
    for flat in flats:
        for each in held(flat, own=own):
            if each.is_first or not first:
                yield from ((flat.name, part) for part in _parts(each, slices))
        yield from ((flat.name, part) for part in _constants(flat) if flat.holds_first or not first)
        is_first = flat.is_first(flat.layout.optimizer)
        for state in whole_states(flat.optimizer):
            if (is_first and state.is_first) or not first:
                yield flat.name, _whole(flat, state)


def plain_values(
    layout: Mapping[str, tuple[str, list[int]]], found: Mapping[str, Mapping[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """(parameter, value) of a block's whole parameters, `found` by kind; those held in codes are decoded, to fp32."""
    for name, kinds in found.items():
        group, _ = layout[name]
        for value in kinds.values():
            if group in BASE_FORMATS:
                from terrace.runtime.base_codes import decoded  # few checkpoints have codes

                yield name, decoded(value, found[constants_name(name)][CONSTANTS], group)
            elif group != CONSTANTS:
                yield name, value


def _constants(flat: "FlatParam") -> Iterator[BoxValues]:
    for param, values in zip(flat.spec.params, flat.constants, strict=False):
        name = constants_name(param.name)
        yield BoxValues(parameter=name, box=whole(values.shape), values={CONSTANTS: values})


def _whole(flat: "FlatParam", state: WholeState) -> BoxValues:
    name = state.name.removeprefix(f"{flat.name}.")
    return BoxValues(parameter=name, box=whole(state.numbers.shape), values={PROJECTION: state.numbers})


def numbers_of(numbers: OuterNumbers) -> Iterator[tuple[str, BoxValues]]:
    """(block, part) of the outer loop's figures that this rank writes; none for a single island."""
    if not numbers.marks.numel():
        return
    place = ((numbers.island, numbers.island + 1), (numbers.island_rank, numbers.island_rank + 1))
    figures = numbers.own_figures[None, None]
    yield NUMBERS_BLOCK, BoxValues(parameter=TOLD, box=(*place, *whole(figures.shape[2:])), values={NUMBERS: figures})
    if not (numbers.island or numbers.island_rank):
        for name, values in ((HEARD, numbers.heard), (MARKS, numbers.marks)):
            yield NUMBERS_BLOCK, BoxValues(parameter=name, box=whole(values.shape), values={NUMBERS: values})


def choices_of(program: Program, choices: Mapping[int, Tensor]) -> Iterator[tuple[str, BoxValues]]:
    """(block, part) of `choices`: by block, tokens per router choice (E) in the last step, over the stage's ranks."""
    for block, counts in choices.items():
        part = BoxValues(parameter=CHOICES, box=whole([len(counts)]), values={COUNTS: counts})
        yield program.blocks[block].name, part


def _parts(own: Held, slices: Slices) -> Iterator[BoxValues]:
    stop = own.start + next(iter(own.values.values())).numel()
    stored = [param.stored for param in own.flat.spec.params]
    for part in flat_boxes(stored, own.start, stop, slices):
        first = part.start - own.start
        elements = slice(first, first + numel(part.padded))
        yield BoxValues(
            parameter=part.param.name if own.island is None else own_name(part.param.name, own.island),
            box=part.whole,
            values={
                # A view, so that loading writes straight into the rank's state.
                kind: values[elements].view(sizes(part.padded))[within(part.real, part.padded)]
                for kind, values in own.values.items()
            },
        )
