"""The places of a run at which a rehearsal carries out faults. A run has none, and nothing happens there.

Faults come from a product, which `TERRACE_FAULTS` asks for (terrace.launch.start).
"""

from collections.abc import Callable

from terrace.base.errors import ConfigError
from terrace.base.products import first
from terrace.launch.start import faults
from terrace.launch.world import World
from terrace.roster.island import Kept
from terrace.roster.outer import RosterState
from terrace.runtime.messages import Progress

BEGINS = "READ DATA"  # what a rank does first in each step


class Faults:
    """The faults of a rank: none. `words` is a line for the user on what this rank carries out ("": nothing)."""

    words = ""

    def watched(self, progress: Progress, step: Callable[[], int]) -> Progress:
        """The callback of instructions, which calls `progress`; `step` gives the number of the step, from 0."""
        return progress

    def kept(self, state: RosterState) -> Kept:
        """What a rank of an island keeps for exchanges, with `state` in it."""
        return state

    def joins(self) -> None:
        """Called on each rank of an island that is about to join a roster."""

    def meets(self, window: int) -> None:
        """Called on each rank of an island that has trained a window, before it meets the others."""


NO_FAULTS = Faults()


def faults_of(world: World) -> Faults:
    """The faults of this rank. Raises `ConfigError` if they cannot be, or if no product carries them out."""
    if not (text := faults()):
        return NO_FAULTS
    injected = first(lambda product: product.faults)
    if injected is None:
        raise ConfigError("TERRACE_FAULTS is set, but no installed product carries out faults (the lab does): unset it")
    found: Faults = injected(text, world.rank, world.world_size)
    return found
