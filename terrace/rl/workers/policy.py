"""The actor, which learns and draws responses, and the reference, which it is held near.

The actor is an engine under its plan and, between two updates, replicas for generation that have its parameters by a
hand-over. Slices end with the next update, keys and values with the call that drew: nothing keeps a second copy of the
parameters during training.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from terrace.base.errors import TrainingError
from terrace.checkpoint.reading import Checkpoint, resume
from terrace.generation.engine import GenerationEngine
from terrace.generation.request import Request, Sampling
from terrace.generation.sliced import sliced_blocks, sliced_config
from terrace.launch.world import World
from terrace.model.config import block_specs
from terrace.plan.dealing import Replica
from terrace.plan.transition import Transition
from terrace.plan.wire import MessageClass
from terrace.program.lowering import build_stages
from terrace.rl.aggregation import Aggregation
from terrace.rl.algorithm import Algorithm, Sums, policy_loss
from terrace.rl.batches import objective_of
from terrace.rl.calls import call
from terrace.rl.layout import RoleLayout
from terrace.rl.metrics import rollout_numbers
from terrace.rl.ragged import Ragged, offsets_of
from terrace.rl.rows import Rows
from terrace.rl.workers.engine_rows import (
    ALL,
    TEXTS,
    EngineSettings,
    device_of,
    engine_of,
    means_of,
    own_rows,
    saved,
    scores,
    step_batches,
)
from terrace.runtime.reshard import HandOver

_PAGE_TOKENS = 16  # of keys and values
_MOST_REQUESTS = 256  # with pages at a time: beyond it a pass over a CPU's matrices gains nothing; a guess


class Actor:
    """A policy under `settings`, generating on replicas of `rows` tensor ranks.

    A worker: every rank of its world makes it and gets every call, with its share of the rows.
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
    ) -> None:
        """Responses have at most `num_tokens` tokens, and end with one of `stops`. Raises as the engine does."""
        self._settings, self._num_tokens, self._stops, self._seed = settings, num_tokens, stops, seed
        self._aggregation, self._sums = algorithm.aggregate(num_tokens), Sums(float)
        objective = objective_of(policy_loss(algorithm, self._sums))
        self.engine = engine_of(world, settings, objective, device_of())
        self._hand_over = HandOver(self.engine, rows)
        self._rows, self._version = rows, 0
        self._blocks: Sequence[nn.Module] | None = None  # of the replica, from a hand-over to the next update

    @classmethod
    def layout(cls, num_ranks: int, *, settings: EngineSettings, rows: int = 1, **_: object) -> RoleLayout:
        """Data ranks of the plan, and replicas of `rows` tensor ranks."""
        return RoleLayout.of(settings.cluster, settings.plan, replicas_of(settings, rows))

    @call()
    def hand_over(self) -> dict[str, float]:
        """Give the replicas the present parameters; bytes that all ranks sent, as planned and as counted."""
        # Former slices go before new ones come: two sets may not fit.
        self._blocks = None
        before = self._reshard_bytes()
        slices = self._hand_over.run(lend=True)
        self._blocks = sliced_blocks(self._settings.model, slices, self._hand_over.group)
        planned = sum(self._hand_over.sent_bytes.values())
        sent = self.engine.comm.exchange([planned, self._reshard_bytes() - before])
        return dict(zip(("bytes_planned", "bytes_sent"), map(float, map(sum, zip(*sent, strict=True))), strict=True))

    @call(split="replica", take="replica", reads=("prompts", "seeds"))
    def generate(self, rows: Rows, *, greedy: bool = False) -> Rows:
        """Responses to prompts: `responses`, their log-probabilities `rollout`, `versions` of the weights, `finish`.

        `rows` have `prompts` and `seeds` (R), int64: a response depends on prompt, seed and weights alone. Responses
        are drawn from the policy itself, at temperature 1, or are its likeliest tokens where `greedy`.
        """
        if self._blocks is None:
            raise TrainingError("generation has no weights: call hand_over first")
        sampling = Sampling(temperature=0.0 if greedy else 1.0, top_k=0, seed=self._seed)
        requests = [
            Request(
                prompt=tuple(prompt.tolist()),
                num_tokens=self._num_tokens,
                seed=seed,
                sampling=sampling,
                stop_tokens=self._stops,
            )
            for prompt, seed in zip(rows.ragged("prompts").rows(), rows.tensor("seeds").tolist(), strict=True)
        ]
        made = self._engine_for(self._blocks, len(requests)).run(requests) if requests else []
        offsets = offsets_of(torch.tensor([len(each.tokens) for each in made], dtype=torch.int64))

        def ragged(kind: str, dtype: torch.dtype) -> Ragged:
            return Ragged(torch.tensor([x for each in made for x in getattr(each, kind)], dtype=dtype), offsets)

        return Rows({
            "responses": ragged("tokens", torch.int64),
            "rollout": ragged("logprobs", torch.float32),
            "versions": ragged("versions", torch.int64),
            "finish": tuple(each.finish for each in made),
        })  # fmt: skip

    @call(split="data", take="data", balance="rows", reads=TEXTS)
    def logprobs(self, rows: Rows) -> Rows:
        """Log-probabilities `old` of the responses' tokens, as the engine finds them."""
        return Rows({"old": scores(self.engine, rows)})

    # Every rank gets all rows and takes its own: a step needs equally many on all data ranks, which shares of equal
    # tokens are not.
    @call()
    def update(self, rows: Rows, *, lr: float, columns: tuple[str, ...]) -> dict[str, float]:
        """One step on a mini-batch with `columns` (terrace.rl.algorithm.policy_loss); returns the actor's metrics."""
        self._blocks = None
        self._sums.clear()
        (step,) = step_batches(self.engine, own_rows(self.engine, rows), columns, self._aggregation)
        result = self.engine.step([batch for _, batch in step], lr)
        self._version += 1
        means = means_of(self.engine, self._sums)
        own = {name: value for name, value in means.items() if not name.startswith("rollout/")}
        if len(own) < len(means):
            own |= rollout_numbers(means)
        return {"pg_loss": result.loss, "grad_norm": result.grad_norm, "lr": lr, **own}

    @call()
    def save(self, folder: Path, step: int, facts: Mapping[str, Any], keep: int) -> str:
        """Write a checkpoint with `facts` into a run folder, and keep the newest `keep`; returns its folder."""
        return saved(self.engine, self._settings, folder, step, {**facts, "version": self._version}, keep)

    @call()
    def resume(self, folder: Path) -> None:
        """Take up a checkpoint that `save` has written."""
        checkpoint = Checkpoint(folder)
        resume(self.engine, checkpoint)
        self._version, self._blocks = int(checkpoint.facts["version"]), None

    def _engine_for(self, blocks: Sequence[nn.Module], num: int) -> GenerationEngine:
        # With pages for its `num` requests and no more; every rank of the replica has the same requests.
        context = self._settings.sequence + 1
        return GenerationEngine(
            blocks,
            sliced_config(self._settings.model, self._rows),
            context=context,
            num_pages=min(_MOST_REQUESTS, num) * -(-context // _PAGE_TOKENS),
            page_tokens=_PAGE_TOKENS,
            version=self._version,
        )

    def _reshard_bytes(self) -> int:
        total = self.engine.comm.ledger.total()
        return sum(size for (message, _), size in total.items() if message is MessageClass.RESHARD)


class Reference:
    """A policy that does not change."""

    def __init__(self, world: World | None, *, settings: EngineSettings) -> None:
        objective = objective_of(policy_loss(Algorithm(), Sums(float)))
        self.engine = engine_of(world, settings, objective, device_of(), freeze=ALL)

    @classmethod
    def layout(cls, num_ranks: int, *, settings: EngineSettings) -> RoleLayout:
        """Data ranks of the plan."""
        return RoleLayout.of(settings.cluster, settings.plan)

    @call(split="data", take="data", balance="rows", reads=TEXTS)
    def logprobs(self, rows: Rows) -> Rows:
        """Log-probabilities `reference` of the responses' tokens."""
        return Rows({"reference": scores(self.engine, rows)})


class Student:
    """A supervised start: learns the right responses to prompts, and leaves a checkpoint for the other roles."""

    def __init__(self, world: World | None, *, settings: EngineSettings) -> None:
        objective = objective_of(policy_loss(Algorithm(), Sums(float)))
        self._settings, self._engine = settings, engine_of(world, settings, objective, device_of())

    @classmethod
    def layout(cls, num_ranks: int, *, settings: EngineSettings) -> RoleLayout:
        """Data ranks of the plan."""
        return RoleLayout.of(settings.cluster, settings.plan)

    @call()
    def update(self, rows: Rows, *, lr: float) -> dict[str, float]:
        """One step on prompts and their right responses; returns the loss."""
        (step,) = step_batches(self._engine, own_rows(self._engine, rows), (), Aggregation("token-mean"))
        return {"loss": self._engine.step([batch for _, batch in step], lr).loss}

    @call()
    def finish(self, folder: Path, step: int) -> str:
        """Write a checkpoint, for `EngineSettings.weights`, and end; returns its folder."""
        written = saved(self._engine, self._settings, folder, step, {}, 1)
        self._engine.close()
        del self._engine
        return written


def replicas_of(settings: EngineSettings, rows: int) -> tuple[Replica, ...]:
    """The replicas of `rows` tensor ranks that generate, as `HandOver` has them; raises `PlanError` as it does."""
    specs = block_specs(settings.model)
    programs = build_stages(settings.cluster, settings.plan, specs, settings.num_micros, settings.sequence)
    held = [set(program.stage.held) for program in programs]
    return Transition.of(settings.cluster, settings.plan, specs, programs[0].flats, held, rows).replicas
