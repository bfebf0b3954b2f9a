"""When a run copies its state into the memory of other machines, and the predicted cost of these copies."""

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from terrace.base.errors import CheckpointError
from terrace.checkpoint.memory import clear
from terrace.checkpoint.peer_copies import PeerCopies
from terrace.cluster.cluster import Cluster
from terrace.launch.world import World
from terrace.plan.partners import TIME, find_partners, one_machine
from terrace.program.report import StepReport
from terrace.runtime.engine import Engine
from terrace.runtime.messages import Progress
from terrace.simulate.peer_copies import CopyCost, part_bytes, residual_bytes, with_copies
from terrace.train.hooks import Hook, StepDone
from terrace.train.job import RunJob

COST = 0.05  # of the predicted step: the most that copies may take where the run's file does not say how often


class NoCopies(Hook):
    """Stands in for `Copies` in a run that makes none. A run restored from memory keeps that copy until it ends."""

    def __init__(self, engine: Engine, world: World, came_from: Path | None) -> None:
        self._engine, self._world, self._came_from = engine, world, came_from

    def start(self, predicted: Sequence[StepReport], cluster: Cluster, first_step: int) -> Sequence[StepReport]:
        """Makes the first copy. Returns the predicted steps of all stages with the cost of copies added."""
        return predicted

    def ended(self) -> None:
        if self._came_from is not None:
            self._engine.comm.exchange(None)
            if self._world.hosts.index(self._world.hosts[self._world.rank]) == self._world.rank:
                clear(self._came_from)

    def failed(self) -> None:
        self.ended()


class Copies(NoCopies):
    """The peer copies of a run. `at` reports the current position to the watchdog; `note` receives lines for the
    user.
    """

    def __init__(
        self, engine: Engine, world: World, job: RunJob, peers: PeerCopies, at: Progress, note: Callable[[str], None]
    ) -> None:
        super().__init__(engine, world, None)
        self._train, self._peers = job.run.train, peers
        self._at, self._note = at, note
        self._every = self._train.peer_copies_every
        self._time_s: dict[str, float] = {}  # of the last step that was not given up

    def start(self, predicted: Sequence[StepReport], cluster: Cluster, first_step: int) -> Sequence[StepReport]:
        program, first_bytes = self._engine.program, self._peers.own_bytes
        took_s = max(self._engine.comm.exchange(self._copy(first_step)))
        if not self._every:
            # Rank 0's prediction for all: others may have measured another one.
            step_s = self._engine.comm.exchange(predicted[0].step_s)[0]
            self._every = max(1, math.ceil(took_s / (COST * step_s)))
        pieces, residuals = part_bytes(program, self._world.rank), residual_bytes(program)
        # A run that did not bring its residuals makes them in its first step.
        later = residuals if first_bytes == pieces else 0
        told = self._engine.comm.exchange([pieces + residuals, later])
        num_steps, mesh = self._train.steps - first_step, program.mesh
        # The last step has a checkpoint instead.
        num_copies = 1 + (self._train.steps - 1) // self._every - first_step // self._every
        found = []
        for stage, report in enumerate(predicted):
            rank = mesh.at_stage(0, stage)
            cost = CopyCost(
                tier=self._peers.partners.tier,
                own_bytes=told[rank][0],
                kept_bytes=told[self._peers.partners.kept(rank)][0],
                own_later_bytes=told[rank][1],
                kept_later_bytes=told[self._peers.partners.kept(rank)][1],
                num_copies=num_copies,
                num_steps=num_steps,
            )
            found.append(with_copies(report, cost, cluster))
        rank, tier = self._peers.partners.keeper(self._world.rank), cluster.tiers[self._peers.partners.tier].name
        often = "every step" if self._every == 1 else f"every {self._every} steps"
        self._note(
            f"copies in memory {often}, {took_s:.2g} s each: {self._peers.own_bytes / 1e6:.3g} MB of this rank to rank "
            f"{rank} on {self._world.machines[rank]} over tier {tier}; they take {self._peers.memory_bytes / 1e6:.3g} "
            "MB of main memory for each rank like this one"
        )
        return found

    def stepped(self, done: StepDone) -> None:
        # A step that was given up left the state unchanged.
        if done.problem is None:
            is_due = done.number % self._every == 0 and done.number < self._train.steps
            self._time_s = {TIME: self._copy(done.number) if is_due else 0.0}
        done.figures["time_s"] = self._time_s

    def ended(self) -> None:
        self._peers.close()

    def _copy(self, num_done: int) -> float:
        rank, partners = self._world.rank, self._peers.partners
        self._at(0, "PEER COPY", tuple(sorted({rank, partners.keeper(rank), partners.kept(rank)})))
        try:
            return self._peers.copy(num_done)
        except OSError as error:
            raise CheckpointError(f"cannot write {self._peers.folder}: {error.strerror}; make room there") from error


def copies_of(
    engine: Engine, world: World, job: RunJob, facts: Mapping[str, Any], at: Progress, note: Callable[[str], None]
) -> NoCopies:
    """The peer copies of a run, with their memory allocated; `NoCopies` if it makes none. Raises `ConfigError`."""
    train = job.run.train
    none = NoCopies(engine, world, job.resume.parent if job.memory and job.resume is not None else None)
    if not train.peer_copies:
        return none
    partners = find_partners([tier.size for tier in job.run.cluster.tiers], world.machines)
    if partners is None:
        # A resumed run may have lost its other machines.
        note(f"no copies in memory: {one_machine(world.machines)}")
        return none
    timeout = timedelta(seconds=2 * train.timeout_s)
    return Copies(engine, world, job, PeerCopies(engine, world, job.folder, partners, facts, timeout), at, note)
