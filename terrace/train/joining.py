"""A user's script: the world that it finds, and its plan, cluster and settings as values."""

import math
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from terrace.accelerator import first_device, has_streams
from terrace.base.errors import ConfigError, PlanError
from terrace.base.schema import load
from terrace.base.words import counted
from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import load_cluster, parse_cluster
from terrace.comm.exchange import gather_plain
from terrace.comm.groups import Timeouts
from terrace.comm.process_group import rank_device
from terrace.launch.machines import boot_id, check_tiers
from terrace.launch.start import detect, join
from terrace.launch.watchdog import Watchdog, watch
from terrace.model.balance import BalanceConfig
from terrace.model.blocks import operations_of
from terrace.model.spec import BlockSpec
from terrace.plan.counts import num_choices
from terrace.plan.members import most_micros
from terrace.plan.plan import EXPERT_CHUNKS, Plan
from terrace.plan.presets import parse_plan
from terrace.plan.validate import validate
from terrace.runtime.islands import Island
from terrace.runtime.own_rule import own_config
from terrace.runtime.settings import OptimizerConfig
from terrace.simulate.footprint import work_of
from terrace.simulate.step import Step, with_chunks
from terrace.train.layers import section
from terrace.train.patience import APART, Patience

FITTED = "local"  # the preset for this machine, with any number of ranks
_JOIN_TIMEOUT_S = 600.0
_DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}

# What a script may give as the optimizer: settings, keys, a name, or a torch.optim.Optimizer's class with arguments.
AnyOptimizer = OptimizerConfig | Mapping[str, Any] | str | type[torch.optim.Optimizer] | partial[torch.optim.Optimizer]


@dataclass
class Joined:
    """This process's rank and world. `dog` watches a world that was joined here, until `leave`. `say` gets notes."""

    say: Callable[[str], None]
    rank: int
    world_size: int
    device: torch.device
    dog: Watchdog | None = None
    machines: tuple[str, ...] = ()  # of the ranks
    patience: Patience = field(default_factory=Patience)
    is_left: bool = False

    def timeouts(self, timeout_s: float) -> Timeouts:
        """Timeouts of this world's messages, longer than the watchdog's, so that the watchdog reports first."""
        limit = timedelta(seconds=2 * timeout_s)
        return Timeouts(limit, limit if self.dog is None else APART)

    def at(self, step: int, counter: int, instruction: object, waiting_on: tuple[int, ...]) -> None:
        """Reports this rank's position to the watchdog, if there is one."""
        if self.dog is not None:
            extra_s = self.patience.seconds(step, instruction, waiting_on)
            self.dog.at(step, counter, instruction, waiting_on, extra_s)

    def live_on(self, island: Island) -> None:
        """Sets this rank's island, which the watchdog's messages then name."""
        if self.dog is not None and island.outer.has_islands:
            self.dog.name_island(island.numbers.island)
            self.patience.follow(island, waits_anywhere=has_streams(self.device))

    def note(self, words: str) -> None:
        """Says a line on rank 0, unless it is empty."""
        if words and self.rank == 0:
            self.say(words)

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """Names a lost peer in the body. No timeout runs between calls, which may take any time."""
        if self.dog is None:
            yield
            return
        self.dog.idle(what)
        with self.dog.guard():
            yield
        self.dog.idle("between steps")

    def leave(self) -> None:
        """Leaves the world if it was joined here; a world that the user joined is kept."""
        self.is_left = True
        if self.dog is not None:
            self.dog.__exit__(None, None, None)
            self.dog = None
            dist.destroy_process_group()


def find_world(timeout_s: float, say: Callable[[str], None]) -> Joined:
    """Finds this process's world, joining that of torchrun, srun or mpirun if one of them started it."""
    if dist.is_initialized():
        machines = tuple(gather_plain(boot_id() or socket.gethostname(), rank_device()))
        return Joined(say, dist.get_rank(), dist.get_world_size(), rank_device(), machines=machines)
    # No launcher: a plain script is a world of one.
    if not detect():
        return Joined(say, 0, 1, first_device())
    # Not renumbered: the script may have read its data by the launcher's number.
    world = join(_JOIN_TIMEOUT_S, say, renumber=False)
    dog = watch(world, timeout_s=timeout_s)
    # Left in `Joined.leave`: the watchdog outlives this function.
    dog.__enter__()
    dog.idle("before the first step")
    return Joined(say, world.rank, world.world_size, rank_device(), dog, world.machines)


def read_cluster(cluster: Cluster | Mapping[str, Any] | str, world_size: int, machines: Sequence[str] = ()) -> Cluster:
    """Resolves `cluster`: a value, a table, a file or a preset. "local" adapts to the number of ranks.

    `machines` names each rank's machine. Raises `ConfigError` if the number of ranks differs from the world's, or a
    tier inside a machine would span several.
    """
    if isinstance(cluster, str):
        found = load_cluster(cluster)
        # Only this preset adapts: a named cluster of another size is a mistake.
        found = _fitted(found, world_size) if cluster == FITTED else found
    else:
        found = cluster if isinstance(cluster, Cluster) else parse_cluster(dict(cluster))
    if found.world_size != world_size:
        sizes = " x ".join(str(tier.size) for tier in found.tiers)
        raise ConfigError(
            f"cluster {found.name!r} has {sizes} = {counted(found.world_size, 'rank')}, but {world_size} "
            f"{'run' if world_size > 1 else 'runs'}: start {found.world_size} (torchrun --nproc-per-node "
            f'{found.world_size}), change the sizes of its tiers, or write cluster="local" for whatever runs here'
        )
    check_tiers(machines, [(tier.name, tier.size) for tier in found.tiers])
    return found


def read_plan(
    plan: Plan | Mapping[str, Any] | str, cluster: Cluster, dtypes: set[torch.dtype], optimizer: str = "adamw"
) -> Plan:
    """Resolves `plan`: a value, a table, a file or a preset. Blocks compute in their own dtype unless the plan names
    one.

    `optimizer` is used if the table, file or preset names none. `dtypes` are those of the parameters. Raises
    `ConfigError` or `PlanError`.
    """
    if isinstance(plan, Plan):
        return plan
    table = dict(section("plan", plan))
    found = parse_plan(table, cluster)
    if "update" not in table:
        found = replace(found, update=optimizer)
    # The plan's own dtype wins.
    if "compute" in table:
        return found
    if len(dtypes) != 1 or not dtypes <= _DTYPES.keys():
        named = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise ConfigError(
            f"the parameters of the blocks are {named}, and plan {found.name!r} does not say what to compute in: write "
            f'plan={{"preset": {found.name!r}, "compute": "bf16"}} (or "fp32", "fp64")'
        )
    compute = _DTYPES[next(iter(dtypes))]
    # A master copy in fp32 would round fp64 parameters at every step.
    master = "fp64" if compute == "fp64" and "master" not in table else found.master
    return replace(found, compute=compute, master=master)  # type: ignore[arg-type]


def read_optimizer(optimizer: AnyOptimizer | None, lr: float) -> OptimizerConfig:
    """Resolves `optimizer`, a value, a table, a name or a class, with learning rate `lr`. Raises `ConfigError`."""
    if isinstance(optimizer, str):
        optimizer = {"name": optimizer}
    if isinstance(optimizer, OptimizerConfig):
        return replace(optimizer, lr=lr)
    if optimizer is not None and not isinstance(optimizer, Mapping):
        return own_config(optimizer, lr)
    if optimizer is not None and "lr" in optimizer:
        raise ConfigError("optimizer has an lr: give it to Trainer as lr alone")
    return load(OptimizerConfig, {**(optimizer or {}), "lr": lr}, "optimizer")


def read_balance(balance: BalanceConfig | Mapping[str, Any] | None) -> BalanceConfig:
    """Resolves the `[balance]` section, a value or a table. Raises `ConfigError`."""
    return balance if isinstance(balance, BalanceConfig) else load(BalanceConfig, balance or {}, "balance")


def _fitted(cluster: Cluster, world_size: int) -> Cluster:
    left, tiers = world_size, []
    for tier in cluster.tiers[:-1]:
        # Inner tiers keep the largest size that divides the ranks; the outermost tier takes the rest.
        size = math.gcd(tier.size, left)
        left //= size
        tiers.append(replace(tier, size=size))
    return replace(cluster, tiers=(*tiers, replace(cluster.tiers[-1], size=left)))


def resolved_plan(
    cluster: Cluster, plan: Plan, blocks: Sequence[BlockSpec], num_micros: int, activation: tuple[int, int] | None
) -> tuple[Plan, str]:
    """Fills in the expert chunks that a plan leaves out, using the cluster's constants and `plan.micro_batch`. Returns
    the plan and a note.

    Without `activation` (sequence, hidden) they stay left out, which means one chunk, and the note says so. Raises
    `ConfigError` for a `num_micros` beside shares, `PlanError` for a plan that does not suit the cluster or the blocks,
    and `ClusterError` for a dtype that the device has no rate for.
    """
    if plan.shares and num_micros != 1:
        raise ConfigError(
            f"num_micros = {num_micros} beside plan.shares = {list(plan.shares)}, the micro-batches of a rank of each "
            "member: leave one of them out"
        )
    if plan.finds_gaps:
        raise PlanError('expert_gaps = "auto" is for commands: give a Trainer the shares that terrace simulate prints')
    validate(cluster, plan, blocks)
    missing = [name for name in EXPERT_CHUNKS if name not in plan.expert_chunks]
    if not plan.experts or not missing or not any(map(num_choices, blocks)):
        return plan, ""
    if activation is None:
        key = "expert_chunks" if len(missing) == len(EXPERT_CHUNKS) else f"expert_chunks.{missing[0]}"
        return plan, f"{key} is left out and counts as 1; give activation=(sequence, hidden) to have it chosen"
    sequence = activation[0]
    step = Step(
        cluster=cluster,
        plan=plan,
        blocks=tuple(blocks),
        num_micros=most_micros(plan, num_micros),
        sequence=sequence,
        work=work_of(cluster, plan, operations_of(blocks), sequence),
    )
    return with_chunks(step).plan, ""
