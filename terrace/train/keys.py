"""The section `[train]` of a run's configuration. Keys are grouped by concern; `TrainConfig` has all of them."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from terrace.base.errors import ConfigError
from terrace.base.words import counted
from terrace.model.attention_kernel import AttentionChoice
from terrace.model.part_kernel import PartChoice
from terrace.train.trackers import check_names

AUTO = "auto"  # of checkpoint_every: terrace.train.saves
ON_PAIRS = ("reward", "dpo")  # objectives of pairs of responses
_MOST = 100  # steps: of each a file is written
UNCOUNTED = 2**62  # steps of a run by epochs until its data are prepared: no rule on its length forbids anything


def parse_steps(text: str | int) -> range:
    """The steps of `train.profile`, counted from 0. Raises `ConfigError` unless `text` is a short range."""
    found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", str(text).strip())
    if found is None:
        raise ConfigError(
            f"train.profile = {text!r} must be a step or a range of steps such as '10-12', counted from 1"
        )
    # One number is a range of one step.
    first, last = int(found[1]), int(found[2] or found[1])
    if not 1 <= first <= last:
        raise ConfigError(f"train.profile = {text!r} must go upward and begin at 1 or later, such as '10-12'")
    if last - first >= _MOST:
        raise ConfigError(f"train.profile = {text!r} names {last - first + 1} steps: {_MOST} are traced at most")
    return range(first - 1, last)


def check_profile(text: str | int | None, with_torch: bool, num_steps: int) -> None:
    """Raises `ConfigError` if `train.profile` names steps outside the run, or `profile_torch` is set without it."""
    if text is not None:
        last = parse_steps(text).stop
        if last > num_steps:
            raise ConfigError(
                f"train.profile = {text!r} goes up to step {last}, but the run ends at {num_steps}: name earlier steps"
            )
    elif with_torch:
        raise ConfigError("train.profile_torch = true has no effect without train.profile: name steps such as '10-12'")


_MOST_FACTOR, _MOST_LOSS, _MOST_EPOCHS = 1e4, 1e6, 1e6  # beyond, a value asks for nothing: guesses


# lambda of DeepSeek-V3 (2412.19437, section 4.2) for its first 10 T tokens, and 0.1 for the last 4.8 T.
MTP_LOSS_WEIGHT = 0.3


@dataclass(frozen=True, kw_only=True)
class Task:
    """The task of a run. `batch` is in sequences or pairs per step, over all ranks."""

    steps: int = field(default=UNCOUNTED, metadata={"absent": UNCOUNTED})  # optimizer steps of the run
    epochs: float = field(default=0.0, metadata={"absent": 0.0})  # passes over the data, in place of steps
    batch: int  # sequences or pairs of a step, over all ranks
    sequence: int  # tokens of a sequence
    objective: Literal["next-token", "distill", "reward", "dpo"] = "next-token"  # the last two on pairs
    beta: float = 0.1  # of dpo
    mtp_loss_weight: float = MTP_LOSS_WEIGHT  # of tokens after the next, where the model predicts some
    seed: int = 0  # of the initial values and the order of the samples

    def check(self) -> None:
        if not 0 <= self.epochs < _MOST_EPOCHS:
            raise ConfigError(f"train.epochs = {self.epochs} must be above 0 and below {_MOST_EPOCHS:g}")
        if self.steps == UNCOUNTED and not self.epochs:
            raise ConfigError("train.steps is missing: give it a value, or train.epochs one above 0")
        _check_least(self, steps=1, batch=1, sequence=1, seed=0)


@dataclass(frozen=True, kw_only=True)
class Updates:
    """How parameters are updated: the learning-rate schedule, and which ones are frozen."""

    warmup_steps: int = 0  # steps in which the learning rate rises to its peak
    schedule: Literal["cosine", "wsd", "linear", "constant"] = "cosine"  # of the learning rate: terrace.train.schedule
    final_lr_fraction: float = 0.1  # the schedule ends at this part of the peak learning rate
    decay_steps: int | float = 0.2  # of wsd: the steps of its decay, or their part of the run
    decay: Literal["linear", "sqrt"] = "sqrt"  # the form of the decay of wsd
    freeze: tuple[str, ...] = ()  # patterns over block.parameter

    def check(self) -> None:
        _check_least(self, warmup_steps=0)
        if not 0 <= self.final_lr_fraction <= 1:
            raise ConfigError(f"train.final_lr_fraction = {self.final_lr_fraction} must lie between 0 and 1")
        defaults = {item.name: item.default for item in fields(self)}
        given = [name for name in ("decay_steps", "decay") if getattr(self, name) != defaults[name]]
        if self.schedule != "wsd":
            if given:
                raise ConfigError(f"train.{given[0]} has no effect: train.schedule = {self.schedule!r}, not 'wsd'")
        # An integer counts steps; a fraction is a part of the run.
        elif not (self.decay_steps >= 1 if isinstance(self.decay_steps, int) else 0 < self.decay_steps < 1):
            raise ConfigError(
                f"train.decay_steps = {self.decay_steps} must be a number of steps, at least 1, or a part of the run "
                "between 0 and 1"
            )


@dataclass(frozen=True, kw_only=True)
class Records:
    """What a run logs, saves and evaluates, and how often."""

    log_every: int = 10  # steps between permanent lines on the screen
    checkpoint_every: int | Literal["auto"] = 0  # 0: only at the end; auto: by [failures] of the cluster
    keep_checkpoints: int = 2  # the newest ones that stay in the run folder
    eval_every: int = 0  # steps between evaluations, and one at the end; 0: none
    eval_batches: int = 100  # most batches of `batch` sequences of each source in an evaluation; 0: all
    keep_best: str = ""  # evaluated source whose best checkpoint is kept: "holdout" or a name in data.eval
    peer_copies: int = 0  # 1: the newest state is also in the memory of two machines
    peer_copies_every: int = 0  # steps between such copies; 0: as few as cost at most 5 % of the predicted step

    @property
    def known_every(self) -> int:
        """Steps between checkpoints as far as they are known before a run; 0: at the end only, or "auto"."""
        return 0 if isinstance(self.checkpoint_every, str) else self.checkpoint_every

    def check(self) -> None:
        _check_least(self, log_every=1, eval_every=0, eval_batches=0, keep_checkpoints=1)
        _check_least(self, peer_copies_every=0)
        if self.checkpoint_every != AUTO:
            _check_least(self, checkpoint_every=0)
        if self.peer_copies not in (0, 1):
            raise ConfigError(f"train.peer_copies = {self.peer_copies} must be 0 or 1, the copies on other machines")
        if self.peer_copies_every and not self.peer_copies:
            raise ConfigError(
                "train.peer_copies_every has no effect: train.peer_copies = 0; set it to 1, or drop the other"
            )


@dataclass(frozen=True, kw_only=True)
class Start:
    """The weights that a run begins with."""

    weights: str = ""  # folder with the initial weights, of Hugging Face or DCP; empty: from scratch
    high_lr: bool = False  # loaded weights may train at a rate that destroys them: terrace.train.rates


@dataclass(frozen=True, kw_only=True)
class Execution:
    compile: bool | None = None  # blocks through torch.compile, whole or in parts; None: on CUDA
    kernels: PartChoice = "torch"  # of norms, activations, RoPE and loss; or "liger": terrace.model.part_kernel
    attention: AttentionChoice = "auto"  # the kernel that serves: terrace.model.attention_kernel
    background_save: bool = True  # write checkpoints during the steps, from a copy in main memory
    keep_folder: Path | None = None  # of states that the plan keeps on a disk; none: the run folder


@dataclass(frozen=True, kw_only=True)
class Guards:
    """Conditions that stop a run, and when a rank is reported as slow."""

    rank_logs: bool = False  # write the output of ranks other than 0 to RUN/logs/rank-*.log
    timeout_s: float = 120.0  # a rank that does not move for so long stopped the step
    slow_factor: float = 1.5  # a rank whose own work takes so many times its peers' is named; 0: none is
    slow_steps: int = 20  # by its last steps
    follow: bool = False  # deal shares, or formats between members, anew by measurement: terrace.train.follow
    error_budget: Mapping[str, float] = field(default_factory=dict)  # message class -> largest relative rounding error
    target_loss: float | None = None  # the run fails when its last losses lie above

    def check(self) -> None:
        _check_least(self, slow_steps=4)
        if not 0 < self.timeout_s <= 1e6:
            raise ConfigError(f"train.timeout_s = {self.timeout_s} must be positive and at most 1e6")
        if self.slow_factor and not 1 < self.slow_factor < math.inf:
            raise ConfigError(f"train.slow_factor = {self.slow_factor} must be above 1, or 0 to look for no slow ranks")
        if self.slow_factor > _MOST_FACTOR:
            raise ConfigError(
                f"train.slow_factor = {self.slow_factor} has no effect: no rank is so slow and alive; use 0 to look "
                f"for none, or at most {_MOST_FACTOR:g}"
            )
        if not self.slow_factor and not self.follow and self.slow_steps != Guards.slow_steps:
            raise ConfigError("train.slow_steps has no effect: train.slow_factor = 0")
        for message, limit in self.error_budget.items():
            if not 0 < limit < math.inf:
                raise ConfigError(f"train.error_budget.{message} = {limit} must be a positive number")
        if self.target_loss is not None and not abs(self.target_loss) < _MOST_LOSS:
            raise ConfigError(
                f"train.target_loss = {self.target_loss} must be a number below {_MOST_LOSS:g}; leave it out for no "
                "target"
            )


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Outputs of a run besides its folder: trackers and traces, and the prompt of its sample."""

    prompt: str | None = field(default=None, metadata={"empty": True})  # if absent, the beginning of the data
    metrics: tuple[str, ...] = ()  # where else the metrics go: terrace.train.trackers
    profile: str | int | None = None  # steps to trace, such as "10-12"
    profile_torch: bool = False  # with torch's own profiler, too

    def check(self) -> None:
        check_names(self.metrics)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Outputs, Guards, Execution, Start, Records, Updates, Task):
    """All keys of the section. Dataclass fields are ordered from the last base to the first."""

    def __post_init__(self) -> None:
        for part in (Task, Records, Guards, Updates, Outputs):
            part.check(self)
        self._check_decay()
        check_profile(self.profile, self.profile_torch, self.steps)

    @property
    def length_key(self) -> str:
        return "train.epochs" if self.epochs else "train.steps"

    def absolute(self) -> "TrainConfig":
        return replace(self, keep_folder=self.keep_folder and self.keep_folder.absolute())

    def _check_decay(self) -> None:
        longest = self.steps - self.warmup_steps
        wanted = self.decay_steps if isinstance(self.decay_steps, int) else self.decay_steps * self.steps
        if self.schedule == "wsd" and wanted > longest:
            warm = self.steps - math.ceil(wanted)  # that leaves room for the decay
            remedy = f"use at most {longest}" if longest > 0 else f"set train.warmup_steps to at most {warm}"
            if warm < 0 >= longest:
                remedy = f"lower both, which together take at most {counted(self.steps, 'step')}"
            raise ConfigError(
                f"train.decay_steps = {self.decay_steps} is longer than the {counted(max(0, longest), 'step')} after "
                f"the warm-up, train.steps - train.warmup_steps: " + remedy
            )


def _check_least(part: Any, **least: int) -> None:
    """Raises `ConfigError` for a number below its minimum, or of more than 63 bits."""
    for name, smallest in least.items():
        value = getattr(part, name)
        if value < smallest:
            raise ConfigError(f"train.{name} = {value} must be at least {smallest}")
        if value >= 2**63:
            raise ConfigError(
                f"train.{name} = {str(value)[:40]} is more than anything can be counted to: give less than 2^63"
            )
