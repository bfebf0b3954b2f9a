"""Recomputation of layers, as the values that a search enumerates (built by terrace.planner.operations)."""

from typing import NamedTuple

_Parts = tuple[str, ...]


class Again(NamedTuple):
    """The parts of layers that a plan recomputes.

    `parts` of every layer, as in terrace.plan.recompute. If `others` is given, `parts` apply to the first layers only,
    whose number is `Candidate.first`, and `others` to the rest.
    """

    parts: _Parts
    others: _Parts | None = None

    @property
    def least(self) -> _Parts:
        """The part that every layer recomputes at least, for any number of first layers."""
        return self.parts if self.others is None else self.others

    @property
    def is_partial(self) -> bool:
        """Whether the first layers differ from the others."""
        return self.others is not None


class Recomputations(NamedTuple):
    """All values of `Candidate.recompute`, least first, and those of plans without and with tensor ranks."""

    values: tuple[Again, ...]
    chains: tuple[tuple[int, ...], tuple[int, ...]]

    def chain(self, *, tensor: bool, context: bool, partly: bool) -> list[int]:
        """The values of plans with ranks on these axes; each recomputes at least what the previous ones do.

        With `partly`, includes those whose first layers differ from the others.
        """
        return [
            value
            for value in self.chains[tensor]
            if (partly or not self.values[value].is_partial)
            and not (context and "attention" in (*self.values[value].parts, *self.values[value].least))
        ]

    def all_layers(self, value: int, *, least: bool) -> int:
        """The uniform value that treats all layers as a partial one treats the first, or the others (`least`)."""
        again = self.values[value]
        return self.values.index(Again(again.least if least else again.parts)) if again.is_partial else value
