"""The rollout: generation replicas on ranks of their own, which receive their parameters from the actor's ranks.

It generates while the actor learns, and takes new parameters between two calls of `generate`.
"""

from collections.abc import Sequence
from datetime import timedelta
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from terrace.base.errors import TrainingError
from terrace.comm.process_group import OrderedGroup
from terrace.launch.rendezvous import open_store
from terrace.launch.world import World
from terrace.plan.presets import preset
from terrace.rl.calls.call import call
from terrace.rl.calls.layout import RoleLayout
from terrace.rl.hand_over.apart import HandOverApart, local_replica
from terrace.rl.hand_over.transition import Apart
from terrace.rl.values.rows import Rows
from terrace.rl.workers.drawing import READS, drawn
from terrace.rl.workers.engine_rows import device_of
from terrace.rl.workers.environments import NO_ENVIRONMENT, EnvironmentSettings
from terrace.rl.workers.handing import MEET_S, bytes_of_all, reshard_bytes, transition_of
from terrace.rl.workers.settings import EngineSettings
from terrace.rl.workers.sliced import sliced_blocks


class Rollout:
    """The worker of the rollout, on replicas of `rows` tensor ranks, for the actor with `settings` in pools `apart`."""

    def __init__(
        self,
        world: World | None,
        *,
        settings: EngineSettings,
        apart: Apart,
        num_tokens: int,
        stops: frozenset[int],
        rows: int = 1,
        seed: int = 0,
        timeout_s: float = 600.0,
        environment: EnvironmentSettings = NO_ENVIRONMENT,
        keeps_routes: bool = False,
    ) -> None:
        """Responses have at most `num_tokens` tokens, and their turns end with one of `stops`.

        `timeout_s` is the timeout of a message. Raises as `transition_of` does.
        """
        self._world, self._settings, self._apart, self._rows = world, settings, apart, rows
        self._drawing: dict[str, Any] = {"num_tokens": num_tokens, "stops": stops, "seed": seed, "tensor_rows": rows}
        self._drawing["environment"] = environment
        self._drawing["keeps_routes"] = keeps_routes
        self._version, self._limit = 0, timedelta(seconds=timeout_s)
        self._takes: HandOverApart | None = None
        self._blocks: Sequence[nn.Module] | None = None
        self._transition = transition_of(settings, rows, apart)
        self._group: OrderedGroup | None = None
        if rows > 1:
            ranks = local_replica(self._transition, apart, self._rank)
            self._group = OrderedGroup.of(ranks, self._limit)

    @property
    def _rank(self) -> int:
        return 0 if self._world is None else self._world.rank

    @classmethod
    def layout(
        cls, num_ranks: int, *, settings: EngineSettings, apart: Apart, rows: int = 1, **_: object
    ) -> RoleLayout:
        """Replicas of `rows` tensor ranks. A rollout has no plan, so every rank is a data rank."""
        replicas = transition_of(settings, rows, apart).replicas
        own = [tuple(rank - apart.first for rank in replica) for replica in replicas]
        return RoleLayout.of(apart.target, preset("ddp", apart.target), own)

    @call(take="all")
    def join(self, address: str, port: int) -> None:
        """Connect to the actor's ranks through the store at this address; they call `join` concurrently."""
        store = open_store(address, port, MEET_S)
        ranks = self._settings.cluster.world_size
        device = device_of(self._settings)
        self._takes = HandOverApart(
            self._transition, self._apart, ranks, self._rank, store, device, timeout=self._limit
        )

    @call()
    def take(self, version: int) -> dict[str, float]:
        """Receive the parameters that the actor sends in `give`, as `version`. Returns bytes that these ranks sent."""
        if self._takes is None:
            raise TrainingError("this rollout has met no actor: call join of both first")
        # Free the old slices first: two sets may not fit in memory.
        self._blocks, self._version = None, version
        before = reshard_bytes(self._takes.ledger)
        self._blocks = sliced_blocks(self._settings.model, self._takes.run(), self._group)
        own = [sum(self._takes.sent_bytes.values()), reshard_bytes(self._takes.ledger) - before]
        total = torch.tensor(own, dtype=torch.int64, device=device_of(self._settings))
        if self._world is not None:
            dist.all_reduce(total)
        return bytes_of_all([total.tolist()])

    @call(split="replica", take="replica", reads=READS, keeps_groups=True)
    def generate(self, rows: Rows, *, leave: Fraction = Fraction(0)) -> Rows:
        if self._blocks is None:
            raise TrainingError("generation has no weights: call take first")
        return drawn(
            self._blocks,
            self._settings.model,
            rows,
            context=self._settings.sequence + 1,
            version=self._version,
            leave=leave,
            group=self._group,
            **self._drawing,
        )
