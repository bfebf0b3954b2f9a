"""What failures leave of a plan's steps: ways to survive them, the save interval of each, and the worth of spares.

Stalls of saves are predicted from the largest shard that a rank writes; docs/failures.md has the equations.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from terrace.cluster.cluster import Cluster
from terrace.cluster.failures import MOST_SPARES
from terrace.plan.outer import OUTERS
from terrace.plan.partners import find_partners
from terrace.planner.goodput import Job, Save, member_wait_s, members_goodput, waiting, waits
from terrace.program.program import Program
from terrace.simulate.links import send_s
from terrace.simulate.peer_copies import part_bytes
from terrace.simulate.step import Prediction

DISK, COPIES, ISLANDS = "checkpoints on disk", "copies in memory", "islands that come and go"
# Bytes/s of a device where the cluster names no rate: a copy into pinned memory of a host whose GPUs share its lanes
# (assumed), and storage of 2 TB/s for 16,384 devices (Llama 3, 2407.21783, section 3.3.1).
_STAGED, _STORED = 10e9, 2e12 / 16_384
# Seconds of a save of any size: ranks that wait for each other, a thread, files that are synced and joined. Measured in
# runs of two ranks on a local disk.
_FIXED_S, _COMMIT_S = 0.01, 0.1
_NO_SAVE = Save(stall_s=0.0)


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to survive failures. `num_steps` between saves that stall and count as `save` says; 0: it saves nothing."""

    name: str
    goodput: float  # waits for repaired machines included
    num_steps: int = 0
    save: Save = _NO_SAVE


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """A plan's step on a cluster whose parts fail. `num_machines` are those of the tiers, without spares."""

    cluster: Cluster
    num_machines: int
    step_s: float
    shard_bytes: int  # the largest that a rank saves
    has_islands: bool  # the plan's: saves have an interval by number alone, and there are no copies in memory
    exchange_s: float  # between exchanges of islands

    @property
    def job(self) -> Job:
        failures = self.cluster.failures
        mean_s = failures.mean_s(self.cluster.world_size, self.num_machines)
        return Job(mean_s=mean_s, restart_s=failures.restart_s)

    @cached_property
    def ways(self) -> tuple[Way, ...]:
        running, found = 1 - self.waiting(self._spares), []
        for name, save in ((DISK, self._on_disk()), (COPIES, self._in_memory())):
            if save is not None:
                steps = self.job.best_steps(self.step_s, save)
                goodput = running * self.job.goodput(steps * self.step_s, save)
                found.append(Way(name=name, goodput=goodput, num_steps=steps, save=save))
        if self.cluster.tiers[-1].size > 1:
            found.append(Way(name=ISLANDS, goodput=self._of_islands()))
        return tuple(found)

    @property
    def _spares(self) -> int:
        return self.cluster.failures.spares or 0

    @property
    def _repair_s(self) -> float:
        """Seconds until a machine is repaired; 0 where another always stands by, so that nothing waits."""
        failures = self.cluster.failures
        return 0.0 if failures.spares is None else failures.repair_s

    def waiting(self, spares: int) -> float:
        """Share of the time that a synchronous run waits for repaired machines."""
        return waiting(self.job.mean_s, self._repair_s, spares)

    @property
    def next_spare(self) -> float:
        """Goodput of checkpoints on disk that one more spare would add."""
        now, more = (1 - self.waiting(self._spares + each) for each in (0, 1))
        return self.ways[0].goodput * (more / now - 1)

    @cached_property
    def best_spares(self) -> int:
        """The number of spares with the highest goodput per machine, spares counted."""
        found, best = 0, 0.0
        for number, each in enumerate(waits(self.job.mean_s, self.cluster.failures.repair_s)):
            per_machine = (1 - each) / (self.num_machines + number)
            if per_machine <= best or number > MOST_SPARES:
                break
            found, best = number, per_machine
        return found

    def _staged_s(self) -> float:
        device, host = self.cluster.device, self.cluster.device.below.get("host")
        if device.type == "cpu":
            return _FIXED_S + 2 * self.shard_bytes / device.memory_bandwidth_bytes_per_s  # read and written
        return _FIXED_S + (self.shard_bytes / _STAGED if host is None else host.write_s(self.shard_bytes))

    def _on_disk(self) -> Save:
        disk = self.cluster.device.below.get("disk")
        write_s = self.shard_bytes / _STORED if disk is None else disk.write_s(self.shard_bytes)
        return Save(stall_s=self._staged_s(), write_s=_COMMIT_S + write_s)

    def _in_memory(self) -> Save | None:
        """None with islands, or where no rank has a partner on another machine."""
        if self.has_islands:
            return None
        each = max(1, self.cluster.world_size // self.num_machines)
        machines = [str(rank // each) for rank in range(self.cluster.world_size)]
        partners = find_partners([tier.size for tier in self.cluster.tiers], machines)
        if partners is None:
            return None
        return Save(stall_s=self._staged_s() + send_s(self.cluster, partners.tier, self.shard_bytes))

    def _of_islands(self) -> float:
        """Members of the outermost tier: one that returns reads its state from the others."""
        failures, members = self.cluster.failures, self.cluster.tiers[-1].size
        member_s = members * self.job.mean_s
        heal_s = send_s(self.cluster, len(self.cluster.tiers) - 1, self.shard_bytes)
        wait_s = member_wait_s(members, member_s, self._repair_s, self._spares)
        return members_goodput(members, member_s, failures.restart_s + heal_s + wait_s, self.exchange_s / 2)


def outlook(cluster: Cluster, prediction: Prediction, num_machines: int) -> Outlook:
    """The outlook of a predicted step on `cluster`: the whole one where the step is that of one island."""
    outer = prediction.step.plan.outer
    every = outer.every if outer.has_islands else OUTERS["diloco"](cluster.tiers[-1].name).every
    return Outlook(
        cluster=cluster,
        num_machines=num_machines,
        step_s=prediction.step_s,
        shard_bytes=largest_shard(prediction.programs),
        has_islands=outer.has_islands,
        exchange_s=every * prediction.step_s,
    )


def largest_shard(programs: Sequence[Program]) -> int:
    return max(part_bytes(program, program.mesh.at_stage(0, program.stage.index)) for program in programs)
