"""The workers of the actor (which learns and generates), the reference, and the supervised start.

The actor is an engine under its plan and, between two updates, also generation replicas that received its parameters in
a hand-over. The replicas' slices are freed at the next update and the KV cache at the end of the generating call, so no
second copy of the parameters exists during training.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

from torch import nn

from terrace.base.errors import TrainingError
from terrace.checkpoint.reading import Checkpoint, resume
from terrace.launch.rendezvous import open_store
from terrace.launch.world import World
from terrace.rl.algorithms.aggregation import Aggregation
from terrace.rl.algorithms.algorithm import Algorithm
from terrace.rl.algorithms.batches import objective_of
from terrace.rl.algorithms.metrics import Sums, rollout_numbers
from terrace.rl.algorithms.policy_loss import aggregation_of, policy_loss
from terrace.rl.calls.call import call
from terrace.rl.calls.layout import RoleLayout
from terrace.rl.hand_over.apart import HandOverApart
from terrace.rl.hand_over.folder import FolderHandOver
from terrace.rl.hand_over.reshard import HandOver
from terrace.rl.hand_over.transition import Apart, to_writer
from terrace.rl.values.rows import ROUTES, Rows
from terrace.rl.workers.drawing import READS, drawn
from terrace.rl.workers.engine_rows import (
    ALL,
    TEXTS,
    device_of,
    engine_of,
    means_of,
    own_rows,
    saved,
    scores,
    step_batches,
)
from terrace.rl.workers.environments import NO_ENVIRONMENT, EnvironmentSettings
from terrace.rl.workers.handing import MEET_S, bytes_of_all, reshard_bytes, transition_of, weights_folder
from terrace.rl.workers.settings import EngineSettings
from terrace.rl.workers.sliced import sliced_blocks


class Actor:
    """The worker of the actor.

    It generates on replicas of `rows` tensor ranks, or, if `apart`, through a `Rollout`, or, if its weights are
    `handed` over in folders, through a `ServedRollout`.
    """

    def __init__(
        self,
        world: World | None,
        *,
        settings: EngineSettings,
        algorithm: Algorithm,
        num_tokens: int,
        stops: frozenset[int],
        rows: int = 1,
        seed: int = 0,
        apart: Apart | None = None,
        handed: str = "",
        timeout_s: float = 600.0,
        environment: EnvironmentSettings = NO_ENVIRONMENT,
        keeps_routes: bool = False,
    ) -> None:
        """Responses have at most `num_tokens` tokens, and their turns end with one of `stops`.

        `timeout_s` is the timeout of a hand-over message. With `keeps_routes`, responses have the experts of their
        tokens, which the actor's passes over them use again. Raises as the engine does.
        """
        self._keeps_routes = keeps_routes
        self._settings, self._num_tokens, self._stops, self._seed = settings, num_tokens, stops, seed
        self._environment = environment
        self._aggregation, self._sums = aggregation_of(algorithm, num_tokens), Sums()
        objective = objective_of(policy_loss(algorithm, self._sums))
        self.engine = engine_of(world, settings, objective, device_of(settings))
        self._apart, self._limit = apart, timedelta(seconds=timeout_s)
        self._sends: HandOverApart | None = None
        generates = apart is None and not handed
        self._hand_over = HandOver(self.engine, rows, self._limit) if generates else None
        self._handed, self._written = handed, -1  # the newest version that was written
        self._folders: FolderHandOver | None = None
        if handed:
            transition = to_writer(transition_of(settings, 1))
            self._folders = FolderHandOver(self.engine, settings.model, transition, self._limit)
        self._rows, self._version = rows, 0
        self._blocks: Sequence[nn.Module] | None = None  # of the replica, from a hand-over to the next update

    @classmethod
    def layout(
        cls,
        num_ranks: int,
        *,
        settings: EngineSettings,
        rows: int = 1,
        apart: Apart | None = None,
        handed: str = "",
        **_: object,
    ) -> RoleLayout:
        """The plan's data ranks, and replicas of `rows` tensor ranks unless a rollout generates."""
        replicas = transition_of(settings, rows).replicas if apart is None and not handed else ()
        return RoleLayout.of(settings.cluster, settings.plan, replicas)

    @call()
    def hand_over(self, version: int) -> dict[str, float]:
        """Hand the current parameters to the replicas as `version`. Returns planned and sent bytes over all ranks."""
        if self._hand_over is None:
            raise TrainingError("this actor generates apart: call give, and take of the rollout")
        # Free the old slices first: two sets may not fit in memory.
        self._blocks, self._version = None, version
        before = reshard_bytes(self.engine.comm.ledger)
        slices = self._hand_over.run(lend=True)
        self._blocks = sliced_blocks(self._settings.model, slices, self._hand_over.group)
        planned, sent = sum(self._hand_over.sent_bytes.values()), reshard_bytes(self.engine.comm.ledger) - before
        return bytes_of_all(self.engine.comm.exchange([planned, sent]))

    @call(take="all")
    def join(self, address: str, port: int) -> None:
        """Connect to the rollout's ranks through the store at this address; they call `join` concurrently."""
        assert self._apart is not None, "only an actor that generates apart joins"
        transition = transition_of(self._settings, self._rows, self._apart)
        store = open_store(address, port, MEET_S)
        ranks = self._settings.cluster.world_size
        engine = self.engine
        self._sends = HandOverApart(
            transition, self._apart, ranks, engine.rank, store, engine.comm.device, engine, self._limit
        )

    @call()
    def give(self) -> dict[str, float]:
        """Send the current parameters to the rollout, which calls `take` concurrently. Returns bytes as `hand_over`."""
        if self._sends is None:
            raise TrainingError("this actor has met no rollout: call join of both first")
        before = reshard_bytes(self._sends.ledger)
        self._sends.run()
        planned, sent = sum(self._sends.sent_bytes.values()), reshard_bytes(self._sends.ledger) - before
        return bytes_of_all(self.engine.comm.exchange([planned, sent]))

    @call()
    def write(self, version: int) -> dict[str, float]:
        """Write the current parameters as `version` into the folder that servers load, unless it is there.

        Returns planned and sent bytes over all ranks, those written among them.
        """
        if self._folders is None:
            raise TrainingError("this actor hands no weights to servers: call hand_over or give")
        if self._written == version:
            return {}
        before = reshard_bytes(self.engine.comm.ledger)
        written = self._folders.run(weights_folder(self._handed, version))
        self._written = version
        sent = reshard_bytes(self.engine.comm.ledger) - before + written
        return bytes_of_all(self.engine.comm.exchange([self._folders.planned_bytes, sent]))

    @call(split="replica", take="replica", reads=READS, keeps_groups=True)
    def generate(self, rows: Rows, *, leave: Fraction = Fraction(0)) -> Rows:
        """Generate responses: columns `responses`, log-probabilities `rollout`, weight `versions`, `finish`.

        `rows` have `prompts` and `seeds`, and optionally `greedy` and partial responses (`requests_of`). A response
        depends only on prompt, seed and weights. With `leave`, a replica may stop before all groups are complete
        (`completed`); unfinished rows have `finish` "aborted". An environment adds the columns of
        `Environments.columns`; `rollout` and `versions` are then of emitted tokens alone.
        """
        if self._blocks is None:
            raise TrainingError("generation has no weights: call hand_over first")
        return drawn(
            self._blocks,
            self._settings.model,
            rows,
            context=self._settings.sequence + 1,
            num_tokens=self._num_tokens,
            stops=self._stops,
            seed=self._seed,
            tensor_rows=self._rows,
            version=self._version,
            leave=leave,
            environment=self._environment,
            group=None if self._hand_over is None else self._hand_over.group,
            keeps_routes=self._keeps_routes,
        )

    @call(split="data", take="data", balance="rows", reads=(*TEXTS, ROUTES))
    def logprobs(self, rows: Rows) -> Rows:
        """Log-probabilities `old` of the responses' tokens, computed by the training engine."""
        return Rows({"old": scores(self.engine, rows)})

    # Every rank receives all rows and selects its own: a step needs equally many rows on all data ranks, which shares
    # balanced by tokens do not have.
    @call()
    def update(self, rows: Rows, *, lr: float, columns: tuple[str, ...]) -> dict[str, float]:
        """Train one step on a mini-batch with `columns` (`policy_loss.policy_loss`). Returns the actor's metrics."""
        self._blocks = None
        self._sums.clear()
        (step,) = step_batches(self.engine, own_rows(self.engine, rows), columns, self._aggregation)
        result = self.engine.step([batch for _, batch in step], lr)
        means = means_of(self.engine, self._sums.read())
        own = {name: value for name, value in means.items() if not name.startswith("rollout/")}
        if len(own) < len(means):
            own |= rollout_numbers(means)
        return {"pg_loss": result.loss, "grad_norm": result.grad_norm, "lr": lr, **own}

    @call()
    def save(self, folder: Path, step: int, facts: Mapping[str, Any], keep: int) -> str:
        """Write a checkpoint with `facts` and keep the newest `keep` (None: all). Returns the checkpoint's folder."""
        return saved(self.engine, self._settings, folder, step, facts, keep)

    @call()
    def resume(self, folder: Path) -> None:
        resume(self.engine, Checkpoint(folder))
        self._blocks, self._written = None, -1


class Reference:
    """The worker of the reference: a policy that is never updated."""

    def __init__(self, world: World | None, *, settings: EngineSettings) -> None:
        objective = objective_of(policy_loss(Algorithm(), Sums()))
        self.engine = engine_of(world, settings, objective, device_of(settings), freeze=ALL)

    @classmethod
    def layout(cls, num_ranks: int, *, settings: EngineSettings) -> RoleLayout:
        return RoleLayout.of(settings.cluster, settings.plan)

    @call(split="data", take="data", balance="rows", reads=TEXTS)
    def logprobs(self, rows: Rows) -> Rows:
        return Rows({"reference": scores(self.engine, rows)})


class Student:
    """The worker of a supervised start: trains on right responses and writes the checkpoint that the roles load."""

    def __init__(self, world: World | None, *, settings: EngineSettings) -> None:
        objective = objective_of(policy_loss(Algorithm(), Sums()))
        self._settings, self._engine = settings, engine_of(world, settings, objective, device_of(settings))

    @classmethod
    def layout(cls, num_ranks: int, *, settings: EngineSettings) -> RoleLayout:
        return RoleLayout.of(settings.cluster, settings.plan)

    @call()
    def update(self, rows: Rows, *, lr: float) -> dict[str, float]:
        """Train one step on prompts with right responses. Returns the loss."""
        (step,) = step_batches(self._engine, own_rows(self._engine, rows), (), Aggregation("token-mean"))
        return {"loss": self._engine.step([batch for _, batch in step], lr).loss}

    @call()
    def finish(self, folder: Path, step: int) -> str:
        """Write a checkpoint for `EngineSettings.weights` and close the engine. Returns the checkpoint's folder."""
        written = saved(self._engine, self._settings, folder, step, {}, 1)
        self._engine.close()
        del self._engine
        return written
