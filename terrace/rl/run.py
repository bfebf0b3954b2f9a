"""A run of `terrace rl`: roles on a runtime, a controller, and what stands around its steps.

    supervised start, if the task has one -> roles -> steps: numbers, evaluation, checkpoint

A checkpoint of the actor has the run's progress among its facts: steps, prompts taken, the KL coefficient, the
multiplier. Prompts and responses are functions of seeds and places, so a resumed run has the bits of one that went on.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from terrace.base.errors import CheckpointError, ModelError, PlanError
from terrace.base.schema import dump
from terrace.base.words import counted
from terrace.checkpoint.layout import complete, folder_of, latest, step_of
from terrace.checkpoint.reading import Checkpoint
from terrace.checkpoint.writing import remove
from terrace.data.tokenizer import Tokenizer
from terrace.generation.sliced import sliced_config
from terrace.model.config import load_model
from terrace.model.experts.config import refuse_looking_ahead
from terrace.plan.context import is_context_parallel
from terrace.plan.mesh import Mesh
from terrace.rl.config import RlConfig
from terrace.rl.controllers import CONTROLLERS, Progress, Roles, Setup, Sizes
from terrace.rl.lagrange import Multiplier
from terrace.rl.metrics import Metrics
from terrace.rl.prompts import PromptSource, rows_of
from terrace.rl.rows import Rows
from terrace.rl.runtime import Pool, Runtime
from terrace.rl.workers.critic import Critic
from terrace.rl.workers.engine_rows import EngineSettings
from terrace.rl.workers.policy import Actor, Reference, Student
from terrace.rl.workers.reward_function import RewardFunction
from terrace.rl.workers.reward_model import RewardModel
from terrace.runtime.settings import OptimizerConfig

ACTOR, START = "actor", "start"  # folders of checkpoints in a run folder
_PHASES = {
    "hand_over": "reshard",
    "generate": "generate",
    "rewards": "reward",
    "actor.logprobs": "old_log_prob",
    "reference.logprobs": "ref",
    "values": "values",
    "update": "update",
}
# Keys of [run] that a resumed run may have otherwise: its length, where it runs, and what it shows and keeps.
_MAY_CHANGE = (
    *("steps", "rows", "reference", "metrics", "timeout_s", "reward_timeout_s"),
    *("evaluate_every", "checkpoint_every", "keep_checkpoints"),
)
_ALL = 1 << 30  # more checkpoints than a run has
_MULTIPLIER_WINDOW = 1024  # last responses whose mean cost the multiplier follows; a guess

Examples = Callable[[int, int], Rows]  # (first, number) -> prompts with their right responses


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """What a run reads: `examples` are for its supervised start, if it has one."""

    config: RlConfig
    prompts: PromptSource
    tokenizer: Tokenizer
    stops: frozenset[int]
    examples: Examples | None = None


def check_roles(config: RlConfig) -> None:
    """Raise `PlanError` or `ModelError` for a plan or a model that no role can have; starts nothing."""
    mesh, longest = Mesh.of(config.cluster, config.plan), config.run.max_prompt + config.run.max_response
    if is_context_parallel(mesh, config.plan):
        raise PlanError("responses need whole rows: leave out the context axis and balance")
    if config.plan.outer is not None:
        raise PlanError("islands would generate with parameters that differ: leave out plan.outer")
    if config.model.learned_positions and longest > config.model.max_positions:
        raise ModelError(
            f"run.max_prompt + run.max_response = {longest} tokens, and the model has learned "
            f"{config.model.max_positions} positions: lower one of them"
        )
    if config.model.scalar_head:
        raise ModelError("the model is a reward model, which writes nothing: name a causal language model")
    refuse_looking_ahead(config.model.experts)
    sliced_config(config.model, config.run.rows)
    for reward in config.rewards:
        if reward.model:
            reward_settings(config, reward.model)
    settings = engine_settings(config, config.weights, config.run.mini_batch, config.optimizer)
    Actor.layout(config.cluster.world_size, settings=settings, rows=config.run.rows)


def engine_settings(config: RlConfig, weights: str, batch: int, optimizer: OptimizerConfig) -> EngineSettings:
    """The engine of a role that steps on `batch` rows; raises `PlanError` where these do not fit."""
    return EngineSettings(
        model=config.model,
        cluster=config.cluster,
        plan=config.plan,
        num_micros=config.num_micros(batch),
        sequence=config.sequence,
        optimizer=optimizer,
        weights=weights,
        seed=config.run.seed,
    )


def reward_settings(config: RlConfig, folder: str) -> EngineSettings:
    """The engine of a reward model under the actor's plan; raises `ModelError` for a folder of another model."""
    model = load_model(folder)
    if not model.scalar_head:
        raise ModelError(
            f"{folder} is no reward model: its head has {model.vocab_size} outputs, and a reward is one; train one "
            'with train.objective = "reward"'
        )
    settings = engine_settings(config, folder, config.run.mini_batch, config.optimizer)
    # A reward is read at the last token, which has no label otherwise.
    return replace(settings, model=model, sequence=config.sequence + 1)


class Timed:
    """A role whose calls add their seconds to `time/PHASE` and keep what a hand-over returned."""

    def __init__(self, name: str, role: Any, found: Metrics) -> None:
        self._name, self._role, self._found = name, role, found

    def __getattr__(self, method: str) -> Any:
        call = getattr(self._role, method)
        phase = _PHASES.get(method) or _PHASES.get(f"{self._name}.{method}")

        def timed(*arguments: Any, **values: Any) -> Any:
            begin_s = time.perf_counter()
            result = call(*arguments, **values)
            if phase is not None:
                key = f"time/{phase}"
                self._found[key] = self._found.get(key, 0.0) + time.perf_counter() - begin_s
            if method == "hand_over":
                self._found |= {f"reshard/{name}": value for name, value in result.items()}
            return result

        return timed


class Run:
    """A run whose roles are made; `steps` are its steps from the first that is left."""

    def __init__(self, inputs: RunInputs, runtime: Runtime, folder: Path, say: Callable[[str], None]) -> None:
        self._inputs, self._folder, self._say = inputs, folder, say
        config, self._seen = inputs.config, Metrics()
        pool = runtime.pool(config.cluster.world_size)
        weights = str(self._start(pool)) if config.run.start_steps else config.weights
        self._roles = self._make(pool, weights)
        self._progress = self._first_progress()
        self._setup = self._make_setup()

    def _start(self, pool: Pool) -> Path:
        """The checkpoint of the supervised start, made now unless the folder has it."""
        config, examples = self._inputs.config, self._inputs.examples
        assert examples is not None, "only a task with examples has a supervised start"
        run, folder = config.run, self._folder / START
        saved = folder_of(folder, run.start_steps)
        if (saved / "manifest.json").is_file():
            return saved
        optimizer = replace(config.optimizer, lr=run.start_lr)
        settings = engine_settings(config, config.weights, run.start_batch, optimizer)
        student = pool.host(student=(Student, {"settings": settings}))["student"]
        for step in range(run.start_steps):
            loss = student.update(examples(step * run.start_batch, run.start_batch), lr=run.start_lr)["loss"]
        self._say(
            f"supervised start: {counted(run.start_steps, 'step')} of {run.start_batch} examples, loss {loss:.3f}"
        )
        return Path(student.finish(folder=folder, step=run.start_steps))

    def _make(self, pool: Pool, weights: str) -> Roles:
        config, inputs = self._inputs.config, self._inputs
        run = config.run
        settings = engine_settings(config, weights, run.mini_batch, config.optimizer)
        actor = {
            "settings": settings,
            "algorithm": config.algorithm,
            "num_tokens": run.max_response,
            "stops": inputs.stops,
            "rows": run.rows,
            "seed": run.seed,
        }
        functions = {"tokenizer": inputs.tokenizer, "deadline_s": run.reward_timeout_s}
        roles: dict[str, tuple[type, Mapping[str, Any]]] = {ACTOR: (Actor, actor)}
        if run.reference:
            roles["reference"] = (Reference, {"settings": settings})
        given = {f"reward_{index}": reward for index, reward in enumerate(config.reward)}
        for name, reward in (given | ({"cost": config.cost} if config.cost is not None else {})).items():
            column = {"column": "cost" if name == "cost" else "reward"}
            if reward.function:
                roles[name] = (RewardFunction, {**functions, **column, "function": reward.function})
            else:
                of_model = reward_settings(config, reward.model)
                roles[name] = (RewardModel, {**column, "settings": of_model})
        critics = self._critics(weights)
        roles |= {name: (Critic, values) for name, values in critics.items()}
        made = {name: Timed(name, role, self._seen) for name, role in pool.host(**roles).items()}
        return Roles(
            actor=made[ACTOR],
            rewards=tuple((reward.weight, made[f"reward_{index}"]) for index, reward in enumerate(config.reward)),
            reference=made.get("reference"),
            cost=made.get("cost"),
            critic=made.get("critic"),
            cost_critic=made.get("cost_critic"),
        )

    def _critics(self, weights: str) -> dict[str, Mapping[str, Any]]:
        config = self._inputs.config
        names = {"ppo": ("critic",), "safe-rlhf": ("critic", "cost_critic")}.get(config.algorithm.name, ())
        optimizer = replace(config.optimizer, lr=config.run.critic_lr)
        settings = engine_settings(config, weights, config.run.mini_batch, optimizer)
        settings = replace(settings, model=replace(config.model, scalar_head=True))
        return {name: {"settings": settings, "value_clip": config.algorithm.value_clip} for name in names}

    def _first_progress(self) -> Progress:
        algorithm = self._inputs.config.algorithm
        if algorithm.cost_threshold is None:
            return Progress(kl_coefficient=algorithm.kl_coefficient)
        multiplier = Multiplier(
            threshold=algorithm.cost_threshold,
            rate=algorithm.multiplier_rate,
            window=_MULTIPLIER_WINDOW,
            largest=algorithm.multiplier_largest,
            log_value=math.log(algorithm.multiplier),
        )
        return Progress(kl_coefficient=algorithm.kl_coefficient, multiplier=multiplier)

    def _make_setup(self) -> Setup:
        config = self._inputs.config
        run, warm = config.run, max(1, config.run.warmup_steps)
        return Setup(
            roles=self._roles,
            algorithm=config.algorithm,
            prompts=self._inputs.prompts,
            sizes=Sizes(
                prompts=run.prompts,
                responses=run.responses,
                mini_batch=run.mini_batch,
                num_tokens=run.max_response,
                epochs=run.epochs,
            ),
            progress=self._progress,
            lr=lambda step: config.optimizer.lr * min(1.0, (step + 1) / warm),
            critic_lr=lambda step: run.critic_lr * min(1.0, (step + 1) / warm),
            rollout_is_exact=config.rollout_is_exact,
        )

    def steps(self) -> Iterator[tuple[int, Metrics]]:
        """(number of the step, from 1, its numbers); saved and evaluated as the run says."""
        config, controller = self._inputs.config, CONTROLLERS[self._inputs.config.algorithm.name](self._setup)
        run, world_size = config.run, config.cluster.world_size
        for step in range(self._progress.step + 1, run.steps + 1):
            self._seen.clear()
            begin_s = time.perf_counter()
            found = next(controller)
            seconds = time.perf_counter() - begin_s
            found |= dict(self._seen)
            lengths = (found.get(f"{kind}_length/mean", 0.0) for kind in ("prompt", "response"))
            # DAPO draws more than it learns from.
            tokens = found.get("group/tokens", sum(lengths) * run.prompts * run.responses)
            found |= {
                "time/step": seconds,
                "perf/tokens_per_s": tokens / seconds,
                "perf/tokens_per_s_per_device": tokens / seconds / world_size,
            }
            is_last = step == run.steps
            if run.evaluate_every and (step % run.evaluate_every == 0 or is_last):
                found |= self.evaluated()
            yield step, found
            if is_last or (run.checkpoint_every and step % run.checkpoint_every == 0):
                self._save()

    def evaluated(self) -> Metrics:
        """The mean reward of the likeliest responses to held-out prompts; nothing without these."""
        prompts = self._inputs.prompts.held_out()
        if not prompts:
            return {}
        rows = rows_of(list(prompts))
        rows = rows | Rows({"seeds": torch.zeros(len(rows), dtype=torch.int64)})
        self._roles.actor.hand_over()
        rows = rows | self._roles.actor.generate(rows, greedy=True)
        rewards = sum(weight * role.rewards(rows).tensor("reward") for weight, role in self._roles.rewards)
        assert isinstance(rewards, torch.Tensor), "a run has a reward"
        return {"val/reward": float(rewards.mean())}

    def _save(self) -> None:
        facts = {"rl": _facts(self._progress, self._inputs.tokenizer, self._inputs.config)}
        keep = self._inputs.config.run.keep_checkpoints
        (actor, of_actor), *critics = self._learning()
        # By updates, as checkpoints count. The actor last: a step counts as saved when it is there. Until then its
        # earlier step needs the critics of that step.
        for name, role in critics:
            role.save(folder=self._folder / name, step=self._progress.updates, facts=facts, keep=_ALL)
        of_actor.save(folder=self._folder / actor, step=self._progress.updates, facts=facts, keep=keep)
        kept = {step_of(path) for path in _checkpoints(self._folder / actor)}
        for name, _ in critics:
            for path in _checkpoints(self._folder / name):
                if step_of(path) not in kept:
                    remove(path)

    def _learning(self) -> list[tuple[str, Any]]:
        roles = self._roles
        named = [(ACTOR, roles.actor), ("critic", roles.critic), ("cost_critic", roles.cost_critic)]
        return [(name, role) for name, role in named if role is not None]

    def resume(self) -> int:
        """Go on from the newest checkpoint of the run folder; returns its step, 0 where there is none.

        Raises `CheckpointError` for one that is damaged or of another run.
        """
        checkpoint = checkpoint_of(self._inputs, self._folder)
        if checkpoint is None:
            return 0
        checkpoint.verify()
        facts = checkpoint.facts["rl"]
        for name in ("step", "updates", "place"):
            setattr(self._progress, name, int(facts[name]))
        self._progress.kl_coefficient = float(facts["kl_coefficient"])
        if self._progress.multiplier is not None:
            values = facts["multiplier"]
            self._progress.multiplier = replace(
                self._progress.multiplier, log_value=float(values["log_value"]), costs=tuple(values["costs"])
            )
        for name, role in self._learning():
            role.resume(folder=folder_of(self._folder / name, checkpoint.step))
        return self._progress.step


def checkpoint_of(inputs: RunInputs, folder: Path) -> Checkpoint | None:
    """The newest checkpoint in the folder of a run, or None; raises `CheckpointError` for one of another run."""
    newest = latest(folder / ACTOR)
    if newest is None:
        return None
    checkpoint, own = Checkpoint(newest), _identity(inputs.tokenizer, inputs.config)
    facts = checkpoint.facts.get("rl")
    written = facts.get("run") if isinstance(facts, Mapping) else None
    if not isinstance(written, Mapping):
        raise CheckpointError(f"{newest} is no checkpoint of terrace rl: resume the folder of such a run")
    for name in sorted(own.keys() | written.keys()):
        if written.get(name) != own.get(name):
            raise CheckpointError(
                f"{newest} was written by another run: its {name} is {written.get(name)!r}, not {own.get(name)!r}; "
                "resume it with its own, or start a new run"
            )
    return checkpoint


def _checkpoints(folder: Path) -> list[Path]:
    return complete(folder / "checkpoints")


def _identity(tokenizer: Tokenizer, config: RlConfig) -> dict[str, Any]:
    """By dotted name, what a resumed run must have in common with the one that began."""
    sections = {name: dump(getattr(config, name)) for name in ("run", "algorithm", "optimizer", "cost")}
    sections |= {f"reward[{index}]": dump(reward) for index, reward in enumerate(config.reward)}
    found = {f"{name}.{key}": value for name, section in sections.items() for key, value in (section or {}).items()}
    for name in _MAY_CHANGE:
        del found[f"run.{name}"]
    return found | {"weights": config.weights, "tokenizer": tokenizer.fingerprint}


def _facts(progress: Progress, tokenizer: Tokenizer, config: RlConfig) -> dict[str, Any]:
    multiplier = progress.multiplier
    return {
        "step": progress.step,
        "updates": progress.updates,
        "place": progress.place,
        "kl_coefficient": progress.kl_coefficient,
        "multiplier": None if multiplier is None else {"log_value": multiplier.log_value, "costs": multiplier.costs},
        "run": _identity(tokenizer, config),
    }
