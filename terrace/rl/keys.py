"""The sections `[run]` and `[[reward]]` of a run's file, each checked on its own."""

import math
from dataclasses import dataclass, fields

from terrace.base.errors import ConfigError, did_you_mean
from terrace.runtime.settings import LARGEST
from terrace.train.trackers import check_names

TASKS = ("sort", "calculator")  # each has a TOML file beside this one
_MOST = 1 << 31  # bound of all counts: more than any run or tensor dim needs
_LONGEST_S = 1e6  # longest deadline, 11 days: waiting for connections overflows beyond 2^31 ms
_MOST_OF = dict.fromkeys(("critic_lr", "start_lr"), LARGEST) | dict.fromkeys(
    ("timeout_s", "reward_timeout_s"), _LONGEST_S
)


@dataclass(frozen=True, kw_only=True)
class RunKeys:
    """Length and sizes of a run: a step draws `responses` for each of `prompts`, with `mini_batch` per update."""

    max_prompt: int  # tokens; a longer prompt is refused
    max_response: int  # tokens; a longer response is cut
    task: str = ""  # one that ships with Terrace; empty: the prompts of a file
    prompts_file: str = ""  # JSONL or Parquet
    prompt_column: str = "prompt"  # its other columns go to rewards
    held_out: int = 0  # first prompts of the file, which are never trained on and evaluated instead
    steps: int = 40  # of learning; each draws, scores and updates
    prompts: int = 64  # of a step, over all ranks
    responses: int = 8  # to each prompt of a step
    mini_batch: int = 256  # responses an update
    epochs: int = 1  # times that a response is learned from
    rows: int = 1  # tensor ranks of a replica that generates
    max_lag: int = 0  # steps that may lie between the weights that draw a response and the step that learns from it
    router_replay: bool = False  # the actor learns from a response with the experts that it was drawn with
    reference: bool | str = True  # measure the KL to the start, or to the model in a folder, at the cost of a forward
    seed: int = 0  # of prompts, responses and initial values
    warmup_steps: int = 10  # in which the learning rate rises
    critic_lr: float = 1e-3  # peak learning rate of critics
    high_lr: bool = False  # loaded weights may train at a rate that destroys them: terrace.train.rates
    start_steps: int = 0  # supervised steps of a task before
    start_batch: int = 128  # examples of such a step
    start_lr: float = 1e-3  # learning rate of these steps
    evaluate_every: int = 10  # steps between evaluations of held-out prompts; 0: none
    checkpoint_every: int = 0  # steps between checkpoints; 0: only at the end
    keep_checkpoints: int = 2  # the newest ones that stay in the run folder
    metrics: tuple[str, ...] = ()  # where else they go: terrace.train.trackers
    timeout_s: float = 600.0  # of a call of a role
    reward_timeout_s: float = 60.0  # of a call of a reward function

    def __post_init__(self) -> None:
        least = dict.fromkeys(
            ("max_prompt", "max_response", "steps", "prompts", "responses", "mini_batch", "epochs", "rows"), 1
        )
        least |= dict.fromkeys(("seed", "held_out", "warmup_steps", "start_steps", "evaluate_every", "max_lag"), 0)
        least |= {"start_batch": 1, "checkpoint_every": 0, "keep_checkpoints": 1}
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise ConfigError(f"run.{name} = {getattr(self, name)} must be at least {smallest}")
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, int) and item.name != "seed" and value >= _MOST:
                raise ConfigError(f"run.{item.name} = {value} must be below 2^31")
        if self.seed >= 1 << 63:
            raise ConfigError(f"run.seed = {self.seed} must be below 2^63")
        if self.responses >= 1 << 20:
            raise ConfigError(f"run.responses = {self.responses} must be below 2^20: seeds of prompts lie so far apart")
        for name, most in _MOST_OF.items():
            value = getattr(self, name)
            if not value > 0:
                raise ConfigError(f"run.{name} = {value} must be above 0")
            if value > most:
                raise ConfigError(f"run.{name} = {value} must be at most {most:g}")
        if self.task and self.task not in TASKS:
            raise ConfigError(f"run.task = {self.task!r} is not known{did_you_mean(self.task, TASKS)}")
        if bool(self.task) == bool(self.prompts_file):
            raise ConfigError(
                f"run.task = {self.task!r} and run.prompts_file = {self.prompts_file!r}: give one of them, the prompts "
                "of a task or those of a file"
            )
        for name in ("held_out", "prompt_column"):
            if self.task and getattr(self, name) != getattr(RunKeys, name):
                raise ConfigError(
                    f"run.{name} = {getattr(self, name)!r} has no effect under run.task = {self.task!r}, which has no "
                    "file of prompts: leave it out"
                )
        if self.prompts * self.responses % self.mini_batch:
            raise ConfigError(
                f"run.mini_batch = {self.mini_batch} must divide the responses of a step, {self.prompts} x "
                f"{self.responses} = {self.prompts * self.responses}"
            )
        check_names(self.metrics, "run.metrics")


@dataclass(frozen=True, kw_only=True)
class EnvironmentKeys:
    """The environment that answers the turns of responses: a Python class; without a name a response is one turn."""

    name: str = ""  # module:class
    max_turns: int = 8  # of the policy in a response
    deadline_s: float = 30.0  # of each call of a method
    overlap: int = 4  # passes of a replica over its other responses, before it waits for an answer
    most_faults: float = 0.1  # share of a step's responses whose environments may fail before the run ends

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not self.name and value != item.default:
                raise ConfigError(
                    f"environment.{item.name} = {value} has no effect without an environment: name one with "
                    'environment.name = "module:class", or leave it out'
                )
        for key, least in (("max_turns", 1), ("overlap", 1)):
            if not least <= getattr(self, key) < _MOST:
                raise ConfigError(f"environment.{key} = {getattr(self, key)} must be at least {least} and below 2^31")
        if not 0 < self.deadline_s <= _LONGEST_S:
            raise ConfigError(f"environment.deadline_s = {self.deadline_s} must be above 0 and at most {_LONGEST_S:g}")
        if not 0 <= self.most_faults <= 1:
            raise ConfigError(f"environment.most_faults = {self.most_faults} must be from 0 to 1")


@dataclass(frozen=True, kw_only=True)
class RewardKeys:
    """A reward or a cost: a Python function `module:function`, or a model, that returns a number for each response."""

    function: str = ""  # module:function
    model: str = ""  # Hugging Face folder of a model with one output
    weight: float = 1.0  # in the sum of all rewards

    def __post_init__(self) -> None:
        if bool(self.function) == bool(self.model):
            raise ConfigError(
                f"a reward with function = {self.function!r} and model = {self.model!r}: give one of them, and "
                "[[reward]] again for another"
            )
        if not math.isfinite(self.weight):
            raise ConfigError(f"a reward with weight = {self.weight}: must be a finite number")
