"""The section `[elastic]` of a run: an island that takes part in a roster. Needs no torch."""

import math
import re
import socket
from dataclasses import dataclass
from typing import Literal

from terrace.base.errors import ConfigError
from terrace.plan.outer import Outer
from terrace.plan.outer_rules import check_outer_step

LEAST_PATIENCE_S = 1.0  # five reports of an island
_LAST_PORT = 65535
_NAME = re.compile(r"[\w.:-]{1,64}")


@dataclass(frozen=True, kw_only=True)
class ElasticConfig:
    """Where islands meet, how often they exchange, and how long one waits for another."""

    meet: str = ""  # HOST:PORT of terrace meet; --meet sets it
    island: str = ""  # name in the roster, unlike all others; by default host and process id; --island sets it
    patience_s: float = 10.0  # after which an island that is silent is lost, and one that is late misses an exchange
    every: int = 100  # steps of a window, after which islands exchange
    optimizer: Literal["nesterov", "momentum", "average"] = "nesterov"  # of the outer step
    lr: float | None = None  # of the outer step; None: as in the optimizer's paper
    momentum: float | None = None  # of the outer step; None: as in the optimizer's paper

    def check(self) -> None:
        """Raises a `TerraceError` for a value out of range."""
        if not LEAST_PATIENCE_S <= self.patience_s < math.inf:
            raise ConfigError(
                f"elastic.patience_s = {self.patience_s}: islands report five times a second, so use at least "
                f"{LEAST_PATIENCE_S:g}"
            )
        if self.every < 1:
            raise ConfigError(f"elastic.every = {self.every}: islands exchange every so many steps; use 1 or more")
        if self.meet:
            address_of(self.meet)
        elif self != ElasticConfig():
            raise ConfigError(
                "[elastic] has no effect without a meeting place: name one (--meet HOST:PORT), or leave it out"
            )
        if self.island and not _NAME.fullmatch(self.island):
            raise ConfigError(
                f"elastic.island = {self.island!r} must be 1 to 64 letters, digits or the signs . _ : -, such as node7"
            )
        check_outer_step(self.outer)

    @property
    def outer(self) -> Outer:
        return Outer(tier="roster", every=self.every, optimizer=self.optimizer, lr=self.lr, momentum=self.momentum)


NO_ROSTER = ElasticConfig()


def address_of(text: str, *, is_own: bool = False) -> tuple[str, int]:
    """Host and port of HOST:PORT; with `is_own`, to listen at, the host may be left out.

    Raises `ConfigError` for anything else.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    is_port = port.isdecimal() and (is_own or int(port)) and int(port) <= _LAST_PORT
    if not is_port or (not is_own and not (colon and host)):
        form = "[HOST:]PORT" if is_own else "HOST:PORT"
        raise ConfigError(f"{text!r} is no address: give {form}, such as {'' if is_own else 'node1:'}29400")
    return host, int(port)


def default_name(process: int) -> str:
    return f"{socket.gethostname()}-{process}"[:64]
