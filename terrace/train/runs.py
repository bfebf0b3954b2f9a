"""Run folders of `terrace train` and `terrace rl`: which kind a folder is, and where its model is. Needs no torch.

Every command that takes a run folder uses this. In a run of `terrace rl` the model is the actor, whose checkpoints have
a folder of their own; they are numbered by updates, and their facts hold the step of the run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, Literal

from terrace.base.errors import CheckpointError, ConfigError
from terrace.base.schema import load, read_table
from terrace.model.hf.folder import TOKENIZER
from terrace.runtime.settings import OptimizerConfig
from terrace.train.config import RunConfig
from terrace.train.folder import SOURCE, no_run_words
from terrace.train.rules import checked_run
from terrace.train.schedule import learning_rate, warmed_up

if TYPE_CHECKING:
    from terrace.checkpoint.reading import Checkpoint

CONFIG = "config.toml"
ACTOR = "actor"  # the folder of a run of feedback with the checkpoints of its model
FEEDBACK = "rl"  # key of the facts with which a run of feedback resumes
Command = Literal["train", "rl"]


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """What commands need to know about a run to use its model. `train` is the configuration of a run of `terrace
    train`.

    `saves` is the parent of the folder `checkpoints`. `tokenizer` and `template` are those of the training, `base` the
    initial weights, `context` the longest row in tokens, `compute` the compute dtype.
    """

    folder: Path
    command: Command
    saves: Path
    tokenizer: str
    template: str
    base: str
    context: int
    compute: str
    bos: bool | str
    eos: str
    optimizer: OptimizerConfig
    warmup_steps: int
    train: RunConfig | None = None

    @property
    def source(self) -> Path:
        """The folder with the files that an export needs besides the weights."""
        return self.folder / SOURCE

    def step_of(self, checkpoint: "Checkpoint") -> int:
        """The step of the run after which `checkpoint` was saved."""
        return checkpoint.step if self.command == "train" else int(checkpoint.facts[FEEDBACK]["step"])

    def rate_after(self, step: int) -> float:
        """Learning rate of the step that follows `step` steps."""
        if self.train is None:
            return warmed_up(self.optimizer.lr, step, self.warmup_steps)
        return learning_rate(step, self.train.train, self.optimizer)


def command_of(table: Mapping[str, Any]) -> Command:
    """The command that a run's settings belong to."""
    return "rl" if "run" in table and "train" not in table else "train"


def read_run(folder: Path) -> RunFolder:
    """Reads the run in `folder`. Raises `CheckpointError` if it is not a run folder, and `ConfigError` for invalid
    settings.
    """
    table = _table(folder)
    if command_of(table) == "rl":
        return _of_feedback(folder, table)
    run = checked_run(table)
    return RunFolder(
        folder=folder,
        command="train",
        saves=folder,
        tokenizer=run.data.tokenizer,
        template=run.data.chat_template,
        base=run.train.weights,
        context=run.train.sequence,
        compute=run.plan.compute,
        bos=run.data.bos,
        eos=run.data.eos,
        optimizer=run.optimizer,
        warmup_steps=run.train.warmup_steps,
        train=run,
    )


def read_trained(folder: Path, why: str) -> RunConfig:
    """The configuration of a run of `terrace train`. `why` completes the error for a run of `terrace rl`.

    Raises as `read_run` does.
    """
    run = read_run(folder)
    if run.train is None:
        raise ConfigError(f"{folder} is a run of terrace rl, {why}")
    return run.train


def table_to_resume(folder: Path, command: Command) -> Mapping[str, Any]:
    """The settings of the run in `folder`, to be resumed by `command`.

    Raises `CheckpointError` if the folder is not a run, or a run of the other command.
    """
    table = _table(folder)
    own = command_of(table)
    if own != command:
        raise CheckpointError(
            f"{folder} is a run of terrace {own}: to go on: terrace {own} --resume {quote(str(folder))}"
        )
    return table


def again(terrace: str, folder: Path, command: Command, *, is_saved: bool) -> str:
    """Words on the saved checkpoints, with the command that resumes the run in `folder`.

    `terrace` is the command line as the user called it (terrace.launch.called).
    """
    name = quote(str(folder))
    if is_saved:
        return f"saved checkpoints are complete; to go on: {terrace} {command} --resume {name}"
    return (
        f"nothing was saved yet; to begin again: {terrace} {command} --config {quote(str(folder / CONFIG))} "
        f"--folder {name} --resume auto"
    )


def _table(folder: Path) -> Mapping[str, Any]:
    if not (folder / CONFIG).is_file():
        raise CheckpointError(no_run_words(folder))
    return read_table(folder / CONFIG, folder)  # of the folder, and no link to another


def _of_feedback(folder: Path, table: Mapping[str, Any]) -> RunFolder:
    run, plan = ({} if not isinstance(table.get(name), Mapping) else table[name] for name in ("run", "plan"))
    names = ("max_prompt", "max_response", "warmup_steps")
    sizes = [run[name] for name in names if type(run.get(name)) is int and run[name] >= 0]
    if len(sizes) < len(names):
        raise ConfigError(f"{folder / CONFIG} lacks whole numbers for run.{', run.'.join(names)}: restore the file")
    return RunFolder(
        folder=folder,
        command="rl",
        saves=folder / ACTOR,
        # The run's own copy, which stays as it was.
        tokenizer=str(folder / SOURCE / TOKENIZER),
        template="",
        base=str(table.get("weights", "")),
        context=sizes[0] + sizes[1],
        compute=str(plan.get("compute", "fp32")),
        bos="auto",
        eos="auto",
        optimizer=load(OptimizerConfig, table.get("optimizer", {}), "optimizer"),
        warmup_steps=sizes[2],
    )
