"""A model cut into the stages of a pipeline, as a price reads it."""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from terrace.planner.parts import Runs, Split
from terrace.planner.stages import placement_of, traits


class Cut(NamedTuple):
    """Blocks of the first stage's chunks, of all stages with their numbers, and of the distinct chunks of each round.

    `behind` are the blocks that follow a mixture on its virtual stage, over all virtual stages; `most_behind` those
    that follow one on its stage, whatever the chunk, of the stage with the most.
    """

    first: tuple[Runs, ...]
    stages: tuple[tuple[Runs, int], ...]
    rounds: tuple[frozenset[Runs], ...]
    behind: Runs
    most_behind: Runs


class Cuts:
    def __init__(self, split: Split, has_stacks: Sequence[bool]) -> None:
        self.split, self._has_stacks = split, has_stacks
        self._known: dict[tuple[object, ...], Cut] = {}
        self.serial = self._of(split.whole().chunks, ((0,),), ())

    def of(self, schedule: str, stages: int, chunks: int, counts: tuple[int, ...]) -> Cut:
        """The cut of a schedule whose virtual stages have `counts` of layers."""
        trait = traits()[schedule]
        key = counts, stages, trait.folded
        found = self._known.get(key)
        if found is None:
            starts = range(0, len(counts), stages) if chunks > 1 and trait.looped else ()
            contents, placement = self.split.contents(counts), placement_of(schedule, stages, chunks)
            found = self._known[key] = self._of(contents, placement, [(start, start + stages) for start in starts])
        return found

    def _of(
        self, contents: Sequence[Runs], placement: Sequence[Sequence[int]], rounds: Sequence[tuple[int, int]]
    ) -> Cut:
        behind = [self._behind(runs) for runs in contents]
        by_stage, behind_stages = list[Runs](), list[Runs]()
        for row in placement:
            by_stage.append(_joined([contents[virtual] for virtual in row]))
            behind_stages.append(self._behind(by_stage[-1]))
        return Cut(
            first=tuple([contents[virtual] for virtual in placement[0]]),
            stages=tuple(Counter(by_stage).items()),
            rounds=tuple([frozenset(contents[start:stop]) for start, stop in rounds]),
            behind=_joined(behind),
            most_behind=max(behind_stages, key=lambda runs: sum(count for _, count in runs)),
        )

    def _behind(self, runs: Runs) -> Runs:
        found, is_mixture = list[tuple[int, int]](), False
        for kind, count in runs:
            after = count - 1 + is_mixture if self._has_stacks[kind] else int(is_mixture)
            found += [(kind, after)] * (after > 0)
            is_mixture = self._has_stacks[kind]
        return tuple(found)


@lru_cache(maxsize=4096)
def windows(runs: Runs, *, wraps: bool) -> tuple[tuple[int, int, int, int], ...]:
    """Each block of `runs` between its neighbours: the times that it is there, and the kinds before, here and after.

    There is none (-1) before the first and after the last, which stay gathered where a step turns round; if it `wraps`,
    since other chunks are visited in between, they are each other's neighbours.
    """
    found, last = list[tuple[int, int, int, int]](), len(runs) - 1
    for index, (kind, count) in enumerate(runs):
        before = runs[index - 1][0] if index or wraps else -1
        after = runs[(index + 1) % len(runs)][0] if index < last or wraps else -1
        if count == 1:
            found.append((1, before, kind, after))
        else:
            found += [(1, before, kind, kind), (count - 2, kind, kind, kind), (1, kind, kind, after)]
    return tuple(found)


def _joined(each: Iterable[Runs]) -> Runs:
    blocks = Counter[int]()
    for runs in each:
        for kind, count in runs:
            blocks[kind] += count
    return tuple(sorted(blocks.items()))
