"""Run folders of `terrace train` and of products: which kind a folder is, and where its model is. Needs no torch.

Every command that takes a run folder uses this.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, cast

from terrace.base.errors import CheckpointError, ConfigError
from terrace.base.products import RunKind, load_reference, run_kinds
from terrace.base.schema import read_table
from terrace.runtime.settings import OptimizerConfig
from terrace.train.config import RunConfig
from terrace.train.folder import SOURCE, no_run_words
from terrace.train.rules import checked_run
from terrace.train.schedule import learning_rate
from terrace.train.teacher_keys import without_teacher

if TYPE_CHECKING:
    from terrace.checkpoint.reading import Checkpoint

CONFIG = "config.toml"
TRAIN = "train"


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """What commands need to know about a run to use its model. Each kind of run has a subclass.

    `saves` is the parent of the folder `checkpoints`. `tokenizer` and `template` are those of the training, `base` the
    initial weights, `context` the longest row in tokens, `compute` the compute dtype.
    """

    folder: Path
    command: str
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

    @property
    def source(self) -> Path:
        """The folder with the files that an export needs besides the weights."""
        return self.folder / SOURCE

    def step_of(self, checkpoint: "Checkpoint") -> int:
        """The step of the run after which `checkpoint` was saved."""
        return checkpoint.step

    def rate_after(self, step: int) -> float:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class TrainedFolder(RunFolder):
    """A run of `terrace train`, with its configuration."""

    config: RunConfig

    def rate_after(self, step: int) -> float:
        return learning_rate(step, self.config.train, self.optimizer)


def kind_of(table: Mapping[str, Any]) -> RunKind | None:
    """The product's kind of the run with these settings; None for a run of `terrace train`."""
    return None if TRAIN in table else next((kind for kind in run_kinds() if kind.sections[0] in table), None)


def command_of(table: Mapping[str, Any]) -> str:
    kind = kind_of(table)
    return TRAIN if kind is None else kind.command


def read_run(folder: Path) -> RunFolder:
    """Reads the run in `folder`. Raises `CheckpointError` if it is not a run folder, and `ConfigError` for invalid
    settings.
    """
    table = _table(folder)
    if (kind := kind_of(table)) is not None:
        return cast(RunFolder, load_reference(kind.folder)(folder, table))
    run = checked_run(without_teacher(table))
    return TrainedFolder(
        folder=folder,
        command=TRAIN,
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
        config=run,
    )


def read_trained(folder: Path, why: str, *, teaches: bool = False) -> RunConfig:
    """The configuration of a run of `terrace train`, with its teacher if the command `teaches`: repeats its loss.

    `why` completes the error for a run of another command.

    Raises as `read_run` does.
    """
    run = read_run(folder)
    if not isinstance(run, TrainedFolder):
        raise ConfigError(f"{folder} is a run of terrace {run.command}, {why}")
    return checked_run(_table(folder)) if teaches else run.config


def table_to_resume(folder: Path, command: str) -> Mapping[str, Any]:
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


def again(terrace: str, folder: Path, command: str, *, is_saved: bool) -> str:
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
