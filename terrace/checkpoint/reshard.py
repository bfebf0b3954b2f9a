"""Resharding: from the boxes that one layout holds of parameters to the boxes that another layout wants.

Layouts appear here only as boxes of whole parameters, so any plan can take over the state of any other. Reading a
checkpoint copies from files, `hand_over` from tensors in memory; both follow the same list of copies.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from terrace.checkpoint.boxes import Box, overlap, uncovered, within
from terrace.checkpoint.parts import Part


@dataclass(frozen=True)
class Copy:
    """The elements `box` of one array, copied from stored box number `source` to wanted box number `target`."""

    source: int
    target: int
    box: Box


class MissingElements(ValueError):  # noqa: N818  (names what is wrong)
    """No stored box has the elements in `box`."""

    def __init__(self, box: Box) -> None:
        super().__init__(f"no stored box has the elements {box}")
        self.box = box


def reshard(stored: Sequence[Box], wanted: Sequence[Box]) -> list[Copy]:
    """Copies that fill the boxes `wanted` of one array from the boxes `stored` of it, in the order of `wanted`.

    Where stored boxes overlap, as replicas do, each of them is copied. Raises `MissingElements` for elements of
    `wanted` that none of them has. Fastest when `stored` is sorted (`uncovered`).
    """
    copies = []
    for target, box in enumerate(wanted):
        found = [(source, common) for source, each in enumerate(stored) if (common := overlap(each, box)) is not None]
        missing = uncovered(box, [stored[source] for source, _ in found])
        if missing is not None:
            raise MissingElements(missing)
        copies += [Copy(source, target, common) for source, common in found]
    return copies


def hand_over(stored: Iterable[Part], wanted: Iterable[Part]) -> None:
    """Fill the values of `wanted`, parts of one block, from `stored`, parts of the same block in another layout.

    Every kind of state that a wanted part has is copied, cast to its dtype and device. Raises `MissingElements`, and
    `KeyError` for a kind that a stored part lacks.
    """
    sources, targets = defaultdict[str, list[Part]](list), defaultdict[str, list[Part]](list)
    for found, given in ((sources, stored), (targets, wanted)):
        for part in given:
            found[part.parameter].append(part)
    for name, parts in targets.items():
        have = sorted(sources[name], key=lambda part: part.box)
        for copy in reshard([part.box for part in have], [part.box for part in parts]):
            source, target = have[copy.source], parts[copy.target]
            for kind, values in target.values.items():
                values[within(copy.box, target.box)].copy_(source.values[kind][within(copy.box, source.box)])
