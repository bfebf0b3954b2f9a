"""Resharding: copies from the boxes stored under one layout to the boxes wanted under another.

Layouts appear here only as boxes of whole parameters, so any plan can load the state of any other. Reading a
checkpoint copies from files, `hand_over` from tensors in memory; both follow the same list of copies.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from terrace.base.boxes import Box, overlap, uncovered, within
from terrace.checkpoint.parts import BoxValues


@dataclass(frozen=True)
class Copy:
    """Elements `box` of an array, to be copied from the stored box with index `source` to the wanted box `target`."""

    source: int
    target: int
    box: Box


class MissingElements(ValueError):  # noqa: N818  (names what is wrong)
    """No stored box has the elements in `box`."""

    def __init__(self, box: Box) -> None:
        super().__init__(f"no stored box has the elements {box}")
        self.box = box


def reshard(stored: Sequence[Box], wanted: Sequence[Box]) -> list[Copy]:
    """The copies that fill the boxes `wanted` of one array from its boxes `stored`, in the order of `wanted`.

    Overlapping stored boxes, such as replicas, are all copied. Raises `MissingElements` for wanted elements that are
    not stored. Fastest if `stored` is sorted (`uncovered`).
    """
    copies = []
    for target, box in enumerate(wanted):
        found = [(source, common) for source, each in enumerate(stored) if (common := overlap(each, box)) is not None]
        # Checked before any copy, so that missing elements never leave stale values unnoticed.
        missing = uncovered(box, [stored[source] for source, _ in found])
        if missing is not None:
            raise MissingElements(missing)
        copies += [Copy(source, target, common) for source, common in found]
    return copies


def hand_over(stored: Iterable[BoxValues], wanted: Iterable[BoxValues]) -> None:
    """Fill the values of `wanted`, parts of one block, from `stored`, parts of the same block under another layout.

    Copies every kind of state of a wanted part, cast to its dtype and device. Raises `MissingElements`, and
    `KeyError` if a stored part lacks a kind.
    """
    sources, targets = defaultdict[str, list[BoxValues]](list), defaultdict[str, list[BoxValues]](list)
    for found, given in ((sources, stored), (targets, wanted)):
        for part in given:
            found[part.parameter].append(part)
    for name, parts in targets.items():
        # `uncovered` halves its candidates per split only in sorted order.
        have = sorted(sources[name], key=lambda part: part.box)
        for copy in reshard([part.box for part in have], [part.box for part in parts]):
            source, target = have[copy.source], parts[copy.target]
            for kind, values in target.values.items():
                values[within(copy.box, target.box)].copy_(source.values[kind][within(copy.box, source.box)])
