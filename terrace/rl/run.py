"""A run of `terrace rl`: roles on a runtime, a controller, and all around its steps.

    roles, once they are made (terrace.rl.making) -> steps: numbers, evaluation, checkpoint

A checkpoint of the actor has the run's progress among its facts: steps, the KL coefficient, the multiplier; a file
beside it has the responses under way. Prompts and responses are functions of seeds and places, so a resumed run has the
bits of one that went on.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from terrace.base.errors import CheckpointError
from terrace.base.schema import dump
from terrace.checkpoint.layout import complete, folder_of, latest, step_of
from terrace.checkpoint.reading import Checkpoint
from terrace.checkpoint.writing import remove
from terrace.data.tokenizer import Tokenizer
from terrace.rl.algorithms.lagrange import Multiplier
from terrace.rl.algorithms.metrics import Metrics
from terrace.rl.call_lines import CallLines
from terrace.rl.calls.runtime import Group, Runtime
from terrace.rl.calls.spans import idle_share, now_s, seconds_by_phase
from terrace.rl.config import RlConfig
from terrace.rl.controllers.controllers import CONTROLLERS
from terrace.rl.controllers.setup import Progress, Roles, Setup, Sizes
from terrace.rl.controllers.step import rewarded
from terrace.rl.placing import ACTOR
from terrace.rl.samples import Samples
from terrace.rl.stream.saved import read_state, write_state
from terrace.rl.stream.stream import Drawing, stream_of
from terrace.rl.values.prompts import PromptSource, rows_of
from terrace.rl.values.rows import Rows

START, STREAM = "start", "stream"  # folders of a run folder, beside those of checkpoints by role
# Keys of [run] that a resumed run may have otherwise: its length, where it runs, and what it shows and keeps.
_MAY_CHANGE = (
    *("steps", "rows", "reference", "metrics", "timeout_s", "reward_timeout_s", "high_lr"),
    *("evaluate_every", "checkpoint_every", "keep_checkpoints"),
)
_ALL = 1 << 30  # more checkpoints than a run has
_MULTIPLIER_WINDOW = 1024  # last responses whose mean cost the multiplier follows; a guess


Examples = Callable[[int, int], Rows]  # (first, number) -> prompts with their right responses


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """Configuration, prompts and tokenizer of a run; `examples` are for its supervised start, if it has one."""

    config: RlConfig
    prompts: PromptSource
    tokenizer: Tokenizer
    stops: frozenset[int]
    examples: Examples | None = None


class Run:
    """A run whose roles are made; `steps` are its steps from the first that is left.

    `calls` and `samples` are of the newest step, for the run's record.
    """

    def __init__(self, inputs: RunInputs, runtime: Runtime, roles: Roles, rollout: Group | None, folder: Path) -> None:
        self._inputs, self._runtime, self._roles, self._folder = inputs, runtime, roles, folder
        config = inputs.config
        rewards = [each.function or Path(each.model).name for each in config.reward]
        self.samples = Samples(inputs.tokenizer, rewards, config.run.evaluate_every)
        self.calls, self._call_lines = dict[str, Any](), CallLines(config.places.values())
        self._generator = rollout or roles.actor
        self._progress = self._first_progress()
        self._stream = stream_of(self._drawing(), roles.actor, rollout)
        self._setup = self._make_setup()

    def _drawing(self) -> Drawing:
        config = self._inputs.config
        return Drawing(
            source=self._inputs.prompts,
            prompts=config.run.prompts,
            responses=config.run.responses,
            has_greedy=config.algorithm.traits.baseline == "greedy",
            max_lag=config.run.max_lag,
            is_apart=config.is_apart,
        )

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
            stream=self._stream,
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
            observe=self.samples.drawn,
        )

    def steps(self) -> Iterator[tuple[int, Metrics]]:
        """(number of the step, from 1, its numbers); saved and evaluated as the run says."""
        config, controller = self._inputs.config, CONTROLLERS[self._inputs.config.algorithm.name](self._setup)
        run, world_size = config.run, config.cluster.world_size
        for step in range(self._progress.step + 1, run.steps + 1):
            begin_s = now_s()
            found = next(controller)
            end_s = now_s()
            found |= self._timed(begin_s, end_s)
            seconds = end_s - begin_s
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

    def _timed(self, begin_s: float, end_s: float) -> Metrics:
        """Seconds of the step by phase, the ranks' idle share, and the bytes of its hand-over."""
        ended, under_way = self._runtime.calls.taken(end_s)
        self.calls = self._call_lines.of_step(ended, begin_s, end_s)
        # Evaluations lie between two steps.
        spans = [span for span in ended if span.end_s > begin_s]
        ranks = [pool.num_ranks for pool in self._runtime.pools]
        handed = {f"reshard/{name}": value for name, value in self._stream.numbers.items()}
        return handed | seconds_by_phase(spans) | idle_share([*spans, *under_way], ranks, begin_s, end_s)

    def evaluated(self) -> Metrics:
        """The mean reward of the likeliest responses to held-out prompts; nothing without these."""
        prompts = self._inputs.prompts.held_out()
        if not prompts:
            return {}
        rows = rows_of(list(prompts))
        seeds, greedy = torch.zeros(len(rows), dtype=torch.int64), torch.ones(len(rows), dtype=torch.bool)
        rows = rows | Rows({"seeds": seeds, "greedy": greedy})
        self._stream.hand_over(self._progress.step)
        rows = rows | self._generator.generate(rows)
        rows = rewarded(self._setup, rows)
        self.samples.held_out(rows)
        return {"val/reward": float(rows.tensor("reward").mean())}

    def _save(self) -> None:
        facts = {"rl": _facts(self._progress, self._inputs.tokenizer, self._inputs.config)}
        keep = self._inputs.config.run.keep_checkpoints
        (actor, of_actor), *critics = self._learning()
        state = self._state_file(self._progress.updates, self._progress.step)
        facts["rl"]["stream"] = write_state(state, *self._stream.state())
        # By updates, as checkpoints count. The actor last: a step counts as saved when it is there. Until then its
        # earlier step needs the critics of that step.
        for name, role in critics:
            role.save(folder=self._folder / name, step=self._progress.updates, facts=facts, keep=_ALL)
        of_actor.save(folder=self._folder / actor, step=self._progress.updates, facts=facts, keep=keep)
        kept = {step_of(path) for path in _checkpoints(self._folder / actor)}
        names = {folder_of(Path(), updates).name for updates in kept}
        for path in state.parent.iterdir():
            updates, _, _ = path.name.partition(".")
            is_older = updates == state.name.partition(".")[0] and path != state
            if updates not in names or is_older:
                path.unlink()
        for name, _ in critics:
            for path in _checkpoints(self._folder / name):
                if step_of(path) not in kept:
                    remove(path)

    def _state_file(self, updates: int, step: int) -> Path:
        # Also by step: one without updates must not change the file of the checkpoint that it replaces.
        return self._folder / STREAM / f"{folder_of(Path(), updates).name}.{step}.safetensors"

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
        for name in ("step", "updates"):
            setattr(self._progress, name, int(facts[name]))
        self._progress.kl_coefficient = float(facts["kl_coefficient"])
        if self._progress.multiplier is not None:
            values = facts["multiplier"]
            self._progress.multiplier = replace(
                self._progress.multiplier, log_value=float(values["log_value"]), costs=tuple(values["costs"])
            )
        self._stream.restore(*read_state(self._state_file(checkpoint.step, self._progress.step), facts["stream"]))
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
    """By dotted name, values that a resumed run must have in common with the one that began."""
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
        "kl_coefficient": progress.kl_coefficient,
        "multiplier": None if multiplier is None else {"log_value": multiplier.log_value, "costs": multiplier.costs},
        "run": _identity(tokenizer, config),
    }
