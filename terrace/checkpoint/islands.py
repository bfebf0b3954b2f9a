"""State of islands in a checkpoint: shared, each island's own, and when a run resumes both. No torch here.

A parameter's value, its `master`, is the anchor, so export, sampling and runs without islands read it like any other
checkpoint. It is stored with the outer momentum and island 0's inner optimizer state. Island i's own state is stored
under the parameter's name with `@i`: its `master`; except for island 0, its inner optimizer state; and with a delay
`outer_start` and `outer_message`, which is the mean of an exchange in flight, completed before the save. Figures
(terrace.runtime.outer_numbers) are pieces of a block of their own.

A run with the same number of islands and the same cycle resumes all of it. Any other starts from the anchor.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from terrace.plan.routes import OUTER_FIGURES
from terrace.program.program import Program

NUMBERS_BLOCK = "@islands"  # no module has this name
NUMBERS = "numbers"  # their kind
TOLD, HEARD, MARKS = "told", "heard", "marks"


def own_name(parameter: str, island: int) -> str:
    return f"{parameter}@{island}"


@dataclass(frozen=True, kw_only=True)
class Islands:
    """Islands of a checkpoint or a run: their number, the ranks of each, and their cycle."""

    num: int
    ranks: int
    every: int
    fragments: int  # 0: a single island, without state of its own
    delay: int
    momentum: bool  # whether the outer optimizer has one

    @staticmethod
    def of(program: Program) -> "Islands":
        world, outer = program.model.world_layout, program.plan.outer
        num = world.num_islands
        return Islands(
            num=num,
            ranks=world.degree // num,
            every=outer.every,
            fragments=outer.fragments,
            delay=outer.delay,
            momentum=outer.optimizer != "average",
        )

    @staticmethod
    def parse(table: Mapping[str, Any]) -> "Islands":
        """Inverse of `table`. Raises `ValueError`, `KeyError` or `TypeError` for an invalid one."""
        if not table:
            return ONE
        found = Islands(**table)
        for name, value in table.items():
            if type(value) is not (bool if name == "momentum" else int) or value < (name not in ("delay", "momentum")):
                raise ValueError(f"islands.{name} = {value!r}")
        return found

    @property
    def table(self) -> dict[str, Any]:
        """For a manifest; empty for a single island."""
        return asdict(self) if self.fragments else {}

    @property
    def with_own_state(self) -> range:
        return range(self.num if self.fragments else 0)

    @property
    def numbers(self) -> dict[str, tuple[int, ...]]:
        """Shape of each array of figures."""
        if not self.fragments:
            return {}
        told, heard = len(OUTER_FIGURES), len(OUTER_FIGURES) + 1
        return {
            TOLD: (self.num, self.ranks, self.fragments, told),
            HEARD: (self.fragments, self.num, heard),
            MARKS: (self.fragments, 2),
        }

    def goes_on(self, own: "Islands") -> bool:
        """Whether a run with islands `own` continues the cycle of these."""
        cycles = [(each.num, each.every, each.fragments, each.delay) for each in (self, own)]
        return self.fragments > 0 and cycles[0] == cycles[1]


ONE = Islands(num=1, ranks=1, every=1, fragments=0, delay=0, momentum=False)


def note(where: str, stored: Islands, own: Islands) -> str:
    """What a run with islands `own` does not resume from a checkpoint, in words; "" if it resumes everything."""
    if not own.fragments:
        anchor = f"training begins at the anchor of {where}, which is of {_words(stored)}{_STATE}"
        return anchor if stored.fragments else ""
    if not stored.fragments:
        return f"islands begin at the parameters of {where}, which is of a run without them; outer momentum is zero"
    if not stored.goes_on(own):
        return f"every island begins at the anchor of {where}, which is of {_words(stored)}, not {_words(own)}{_STATE}"
    return f"outer momentum is zero, since {where} has none" if own.momentum and not stored.momentum else ""


_STATE = ", with the optimizer state of island 0; the other islands' changes since their last exchange are left out"


def _words(islands: Islands) -> str:
    return f"{islands.num} islands (every = {islands.every}, fragments = {islands.fragments}, delay = {islands.delay})"
