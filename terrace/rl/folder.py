"""The folder of a run of feedback, for commands that use its model.

The model is the actor, whose checkpoints have a folder of their own. They are numbered by updates; their facts hold the
step of the run.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terrace.base.errors import ConfigError
from terrace.base.schema import load
from terrace.model.hf.folder import TOKENIZER
from terrace.rl.placing import ACTOR
from terrace.runtime.settings import OptimizerConfig
from terrace.train.folder import SOURCE
from terrace.train.runs import CONFIG, RunFolder

if TYPE_CHECKING:
    from terrace.checkpoint.reading import Checkpoint

FACTS = "rl"  # key of a checkpoint's facts with which a run resumes


class FeedbackFolder(RunFolder):
    """A run of `terrace rl`: without a configuration of `terrace train`."""

    def step_of(self, checkpoint: "Checkpoint") -> int:
        return int(checkpoint.facts[FACTS]["step"])

    def rate_after(self, step: int) -> float:
        return warmed_up(self.optimizer.lr, step, self.warmup_steps)


def run_folder(folder: Path, table: Mapping[str, Any]) -> RunFolder:
    """The run with the settings `table`. Raises `ConfigError` if they lack the lengths of its rows."""
    run, plan = ({} if not isinstance(table.get(name), Mapping) else table[name] for name in ("run", "plan"))
    names = ("max_prompt", "max_response", "warmup_steps")
    sizes = [run[name] for name in names if type(run.get(name)) is int and run[name] >= 0]
    if len(sizes) < len(names):
        raise ConfigError(f"{folder / CONFIG} lacks whole numbers for run.{', run.'.join(names)}: restore the file")
    return FeedbackFolder(
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


def warmed_up(peak: float, step: int, num_steps: int) -> float:
    """Learning rate of step `step` (from 0): linear warm-up over `num_steps` steps, then constant."""
    return peak * min(1.0, (step + 1) / max(1, num_steps))
