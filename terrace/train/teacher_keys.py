"""The section `[teacher]` of a run: a model whose distributions a student learns. Needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from terrace.base.errors import ConfigError, ModelError
from terrace.base.schema import read_table
from terrace.model.config import ModelConfig, load_model, parse_model
from terrace.model.facts import has_scalar_head, vocabulary_size

DISTILL: Final = "distill"  # of train.objective
_RUN, _PUBLISHED = "config.toml", "config.json"
# Temperatures at which distributions have one token, or are even: guesses.
_LEAST, _MOST = 1e-3, 1e3


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """The teacher of a run with train.objective = "distill", and how much it counts (terrace.runtime.distilled)."""

    model: str = ""  # folder of the teacher: of a run, or of Hugging Face
    plan: str = "zero3"  # name or file of the plan of its forward, on the ranks of the run
    weight: float = 0.9  # of its distributions, above 0 and at most 1; the labels have the rest
    temperature: float = 1.0  # by which both models' logits are divided, for its part of the loss; 0.001 to 1000
    mix: float = 0.0  # rows are mixed in pairs, with shares of Beta(mix, mix); 0: not (MixKD, arXiv 2011.00593)
    top_k: int = 0  # 0: it runs before each step; else k of its tokens a position are found once, before the first

    def check(self) -> None:
        """Raises `ConfigError` for a value out of range."""
        if not 0 < self.weight <= 1:
            raise ConfigError(
                f"teacher.weight = {self.weight} must be above 0 and at most 1: it is the teacher's part of the loss"
            )
        if not _LEAST <= self.temperature <= _MOST:  # nan is not
            raise ConfigError(
                f"teacher.temperature = {self.temperature} must be at least {_LEAST:g} and at most {_MOST:g}: logits "
                "are divided by it"
            )
        if not 0 <= self.mix <= _MOST:
            raise ConfigError(
                f"teacher.mix = {self.mix} must be at least 0 and at most {_MOST:g}: rows are mixed with shares of "
                "Beta(mix, mix)"
            )
        if self.mix and self.top_k:
            raise ConfigError(
                f"teacher.mix = {self.mix} with teacher.top_k = {self.top_k}: kept tokens are those of whole rows; "
                "leave one of them out"
            )
        if self.top_k < 0:
            raise ConfigError(f"teacher.top_k = {self.top_k} must be 0, or a number of tokens")

    @property
    def num_labels(self) -> int:
        """Labels of a token: those of both rows where they are mixed."""
        return 2 if self.mix else 1

    @property
    def is_online(self) -> bool:
        return bool(self.model) and not self.top_k


NO_TEACHER = TeacherConfig()


def without_teacher(table: Mapping[str, Any]) -> dict[str, Any]:
    """A run's table for commands that use its model, for which the teacher need not be there any more."""
    found = {name: value for name, value in table.items() if name != "teacher"}
    train = found.get("train")
    if isinstance(train, Mapping) and train.get("objective") == DISTILL:
        found["train"] = {name: value for name, value in train.items() if name != "objective"}
    return found


@lru_cache(maxsize=8)
def model_in(folder: str, key: str) -> ModelConfig:
    """The model in the folder of a run or of Hugging Face that `key` names.

    Raises `ConfigError` for a folder that has none, and `ModelError`.
    """
    path = Path(folder)
    if (path / _RUN).is_file():
        table = read_table(path / _RUN)
        if not isinstance(table.get("model"), Mapping):
            raise ConfigError(f"{key} = {folder!r}: its {_RUN} has no model, so it is no run folder")
        return parse_model(table["model"])
    if (path / _PUBLISHED).is_file():
        return load_model(folder, training=False)
    raise ConfigError(
        f"{key} = {folder!r} is neither a run folder ({_RUN}) nor a Hugging Face folder ({_PUBLISHED}): name "
        "one that a run of Terrace or save_pretrained has left"
    )


def teacher_model(folder: str) -> ModelConfig:
    """The model in a teacher's folder. Raises as `model_in`."""
    return model_in(folder, "teacher.model")


def check_same_tokens(own: ModelConfig, other: ModelConfig, named: str) -> None:
    """Raise `ModelError` unless `other`, which `named` names, has probabilities of the same tokens as `own`."""
    if has_scalar_head(other):
        raise ModelError(f"{named} has one output a token, a score: name a language model")
    mine, its = vocabulary_size(own), vocabulary_size(other)
    if mine != its:
        raise ModelError(
            f"{named} has a vocabulary of {its:,} tokens, and the model one of {mine:,}: a student learns "
            "probabilities of the same tokens: name a teacher with its tokenizer and vocabulary"
        )
