"""The main loop of `terrace rl`: runs a controller on roles (created by terrace.rl.making), evaluates, and saves.

The actor's checkpoint holds the run's progress among its facts: steps, KL coefficient, multiplier. A file beside it
holds the responses in progress. Prompts and responses are functions of seeds and positions, so a resumed run is
bitwise equal to an uninterrupted one. As in `terrace train`, a run saves before its first step, after its last, and
after the step in which it is asked to stop.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from terrace.base.errors import CheckpointError
from terrace.checkpoint.layout import complete, folder_of, latest, step_of
from terrace.checkpoint.reading import Checkpoint, newest_whole
from terrace.checkpoint.writing import remove
from terrace.data.tokenizer import Tokenizer
from terrace.rl.agreement import rollout_is_exact
from terrace.rl.algorithms.lagrange import Multiplier
from terrace.rl.algorithms.metrics import Metrics
from terrace.rl.call_lines import CallLines
from terrace.rl.calls.runtime import Group, Runtime
from terrace.rl.calls.spans import idle_share, now_s, seconds_by_phase
from terrace.rl.config import RlConfig
from terrace.rl.controllers.controllers import CONTROLLERS
from terrace.rl.controllers.setup import Progress, Roles, Setup, Sizes
from terrace.rl.controllers.step import rewarded
from terrace.rl.folder import FACTS, warmed_up
from terrace.rl.identity import fixes_of, identity
from terrace.rl.placing import ACTOR, LEARNING
from terrace.rl.samples import Samples
from terrace.rl.stream.saved import clear_states, read_state, state_file, write_state
from terrace.rl.stream.stream import Drawing, faults_of, served_stream, stream_of
from terrace.rl.values.prompts import PromptSource, rows_of
from terrace.rl.values.rows import Rows
from terrace.train.facts import check_facts, model_facts

# Subfolders of a run folder, beside those of the roles' checkpoints; servers load weights from the last.
START, STREAM, HANDED = "start", "stream", "handed"
_MULTIPLIER_WINDOW = 1024  # responses in the moving mean cost that updates the multiplier; a guess


Examples = Callable[[int, int], Rows]  # (first, number) -> prompts with reference responses


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """Configuration, prompts and tokenizer of a run, and `examples` for its supervised start, if it has one.

    `stops` are the tokens that end a response; `contents` are digests of the run's files (`terrace.rl.identity`).
    """

    config: RlConfig
    prompts: PromptSource
    tokenizer: Tokenizer
    stops: frozenset[int]
    examples: Examples | None = None
    chat: str = ""  # tokenizer file whose chat template prompts were rendered with; "" if they are texts
    contents: Mapping[str, str] = field(default_factory=dict)


class Run:
    """A run on created roles. `steps` yields the remaining steps.

    `calls` and `samples` describe the newest step, for the run's record.
    """

    def __init__(self, inputs: RunInputs, runtime: Runtime, roles: Roles, rollout: Group | None, folder: Path) -> None:
        self._inputs, self._runtime, self._roles, self._folder = inputs, runtime, roles, folder
        config = inputs.config
        rewards = [each.function or Path(each.model).name for each in config.reward]
        rewards += [config.environment.name] if config.environment.name else []
        self.samples = Samples(inputs.tokenizer, rewards, config.run.evaluate_every)
        self.calls, self._call_lines = dict[str, Any](), CallLines(config.places.values())
        self._generator = rollout or roles.actor
        self._progress = self._first_progress()
        stream = served_stream if config.rollout.is_served else stream_of
        self._stream = stream(self._drawing(), roles.actor, rollout)
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
            has_environments=bool(config.environment.name),
            most_faults=config.environment.most_faults,
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
        run = config.run
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
            lr=lambda step: warmed_up(config.optimizer.lr, step, run.warmup_steps),
            critic_lr=lambda step: warmed_up(run.critic_lr, step, run.warmup_steps),
            rollout_is_exact=rollout_is_exact(config),
            observe=self.samples.drawn,
        )

    def steps(
        self,
        stops: Callable[[], bool] = lambda: False,
        saved: Callable[[int, Path], object] = lambda step, folder: None,
    ) -> Iterator[tuple[int, Metrics]]:
        """Run the remaining steps, evaluating and saving as configured. Yields (step from 1, metrics).

        `stops` is called after each step but the last; if it returns True, the run saves and ends. `saved` is called
        with the step and the actor's folder of each checkpoint.
        """
        config, controller = self._inputs.config, CONTROLLERS[self._inputs.config.algorithm.name](self._setup)
        run, world_size = config.run, config.cluster.world_size
        if not self._progress.step:
            saved(0, self._save())  # so that a run folder that is not writable fails at once
        for step in range(self._progress.step + 1, run.steps + 1):
            self._runtime.step, begin_s = step, now_s()
            found = next(controller)
            end_s = now_s()
            found |= self._timed(begin_s, end_s)
            seconds = end_s - begin_s
            lengths = (found.get(f"{kind}_length/mean", 0.0) for kind in ("prompt", "response"))
            # DAPO draws more tokens than it learns from.
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
            is_stopped = not is_last and stops()
            if is_last or is_stopped or (run.checkpoint_every and step % run.checkpoint_every == 0):
                saved(step, self._save())
            if is_stopped:
                return

    def _timed(self, begin_s: float, end_s: float) -> Metrics:
        """Metrics of a step: seconds by phase, the ranks' idle share, bytes of the hand-over. Also sets `calls`."""
        ended, under_way = self._runtime.calls.taken(end_s)
        self.calls = self._call_lines.of_step(ended, begin_s, end_s)
        # Leave out evaluations, which run between steps.
        spans = [span for span in ended if span.end_s > begin_s]
        ranks = [pool.num_ranks for pool in self._runtime.pools]
        handed = {f"reshard/{name}": value for name, value in self._stream.numbers.items()}
        if self._inputs.config.environment.name:
            handed["environment/faults"], self._stream.num_faults = float(self._stream.num_faults), 0
        return (
            handed
            | self._stream.counted
            | seconds_by_phase(spans)
            | idle_share([*spans, *under_way], ranks, begin_s, end_s)
        )

    def evaluated(self) -> Metrics:
        """The mean reward of greedy responses to held-out prompts; empty without prompts or rewards."""
        prompts = self._inputs.prompts.held_out()
        if not (prompts and (self._roles.rewards or self._inputs.config.environment.name)):
            return {}
        rows = rows_of(list(prompts))
        seeds, greedy = torch.zeros(len(rows), dtype=torch.int64), torch.ones(len(rows), dtype=torch.bool)
        rows = rows | Rows({"seeds": seeds, "greedy": greedy})
        self._stream.hand_over(self._progress.step)
        rows = rows | self._generator.generate(rows)
        # A response whose environment failed has what it earned before.
        self._stream.faults += faults_of(rows)
        rows = rewarded(self._setup, rows)
        self.samples.held_out(rows)
        return {"val/reward": float(rows.tensor("reward").mean())}

    def faults(self) -> list[str]:
        """What environments did wrong since the last call, in words."""
        found, self._stream.faults = self._stream.faults, []
        return found

    def _save(self) -> Path:
        of_run = _facts(self._progress, self._inputs)
        facts = {"tokenizer": self._inputs.tokenizer.fingerprint, FACTS: of_run}
        keep = self._inputs.config.run.keep_checkpoints
        (actor, of_actor), *critics = self._learning()
        state = state_file(self._folder / STREAM, self._progress.updates, self._progress.step)
        of_run["stream"] = write_state(state, *self._stream.state())
        # Checkpoints are numbered by updates. The actor's is written last and marks the step as saved. Until then the
        # critics of its previous checkpoint must be kept.
        for name, role in critics:
            role.save(folder=self._folder / name, step=self._progress.updates, facts=facts, keep=0)
        of_actor.save(folder=self._folder / actor, step=self._progress.updates, facts=facts, keep=keep)
        kept = {step_of(path) for path in _checkpoints(self._folder / actor)}
        clear_states(state, kept)
        for name, _ in critics:
            for path in _checkpoints(self._folder / name):
                if step_of(path) not in kept:
                    remove(path)
        return folder_of(self._folder / actor, self._progress.updates)

    def _learning(self) -> list[tuple[str, Any]]:
        roles = self._roles
        named = zip(LEARNING, (roles.actor, roles.critic, roles.cost_critic), strict=True)
        return [(name, role) for name, role in named if role is not None]

    def resume(self, checkpoint: Checkpoint | None) -> int:
        """Resume from a checkpoint (`checkpoint_of`). Returns its step, 0 without a checkpoint."""
        if checkpoint is None:
            return 0
        facts = checkpoint.facts[FACTS]
        for name in ("step", "updates"):
            setattr(self._progress, name, int(facts[name]))
        self._progress.kl_coefficient = float(facts["kl_coefficient"])
        if self._progress.multiplier is not None:
            values = facts["multiplier"]
            self._progress.multiplier = replace(
                self._progress.multiplier, log_value=float(values["log_value"]), costs=tuple(values["costs"])
            )
        state = state_file(self._folder / STREAM, checkpoint.step, self._progress.step)
        self._stream.restore(*read_state(state, facts["stream"]))
        for name, role in self._learning():
            role.resume(folder=folder_of(self._folder / name, checkpoint.step))
        return self._progress.step


def checkpoint_of(inputs: RunInputs, folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest intact checkpoint of a run folder, verified, or None if there is none; errors of damaged newer ones.

    Intact includes the critics and the responses in progress that were saved with it. Raises `CheckpointError` if all
    checkpoints are damaged, and for a checkpoint of another run.
    """
    if latest(folder / ACTOR) is None:
        return None, []
    before, wrong = None, list[str]()
    while True:
        try:
            checkpoint, newer = newest_whole(folder / ACTOR, before)
        except CheckpointError as error:
            raise CheckpointError("; ".join([*wrong, str(error)])) from error
        wrong += newer
        facts = checkpoint.facts.get(FACTS)
        if not isinstance(facts, Mapping) or not isinstance(facts.get("run"), Mapping):
            raise CheckpointError(
                f"{checkpoint.folder} is no checkpoint of terrace rl: resume the folder of such a run"
            )
        try:
            _check_beside(folder, checkpoint)
        except CheckpointError as error:
            wrong.append(str(error))
            before = checkpoint.step
            continue
        of_model = model_facts(checkpoint.facts.get("model", {}), inputs.config.model)
        there, here = ({**run, **model} for run, model in zip((facts["run"], _identity(inputs)), of_model, strict=True))
        own = {name: here.get(name) for name in sorted(there | here)}
        check_facts(checkpoint.folder, there, own, fixes_of(inputs.config))
        return checkpoint, wrong


def _check_beside(folder: Path, checkpoint: Checkpoint) -> None:
    """Raise `CheckpointError` unless everything that was saved with the actor's checkpoint is intact."""
    facts = checkpoint.facts[FACTS]
    read_state(state_file(folder / STREAM, checkpoint.step, int(facts["step"])), facts["stream"])
    for name in facts.get("critics", ()):
        Checkpoint(folder_of(folder / name, checkpoint.step)).verify()


def _checkpoints(folder: Path) -> list[Path]:
    return complete(folder / "checkpoints")


def _identity(inputs: RunInputs) -> dict[str, Any]:
    return identity(inputs.config, inputs.tokenizer, inputs.stops, inputs.contents)


def _facts(progress: Progress, inputs: RunInputs) -> dict[str, Any]:
    multiplier = progress.multiplier
    return {
        "step": progress.step,
        "updates": progress.updates,
        "kl_coefficient": progress.kl_coefficient,
        "multiplier": None if multiplier is None else {"log_value": multiplier.log_value, "costs": multiplier.costs},
        "critics": [name for name in LEARNING[1:] if name in inputs.config.roles],
        "run": _identity(inputs),
    }
