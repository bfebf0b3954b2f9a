"""Prompts by index: a pure function of (seed, index), so that a resumed run gets the same prompts.

A task or a file of prompts is a `PromptSource`. Rewards receive responses as `Sample`s.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from terrace.rl.values.ragged import Ragged
from terrace.rl.values.rows import Rows


@dataclass(frozen=True)
class Prompt:
    """A prompt's text and tokens, and the other values of its line for rewards, such as an answer."""

    text: str
    tokens: tuple[int, ...]
    data: Mapping[str, Any] = field(default_factory=dict)
    is_chat: bool = False  # messages that a chat template has rendered


@dataclass(frozen=True)
class Sample:
    """A response as rewards receive it. `finish` is "stop" if the model ended it, "length" if it was truncated.

    `data` are the other values of the prompt's line (`Prompt.data`).
    """

    prompt: str
    response: str
    finish: str
    data: Mapping[str, Any]


class PromptSource(Protocol):
    """An endless sequence of training prompts, and some held-out prompts."""

    def prompt(self, place: int) -> Prompt:
        """The training prompt at index `place`, from 0."""

    def held_out(self) -> tuple[Prompt, ...]:
        """Prompts that are never trained on; may be empty."""


def rows_of(prompts: list[Prompt], first_group: int = 0) -> Rows:
    """One row per prompt: columns `prompts` (tokens), `prompt_texts`, `data`, and `groups`, from `first_group` up."""
    return Rows({
        "prompts": Ragged.of([torch.tensor(prompt.tokens, dtype=torch.int64) for prompt in prompts]),
        "prompt_texts": tuple(prompt.text for prompt in prompts),
        "data": tuple(prompt.data for prompt in prompts),
        "groups": torch.arange(first_group, first_group + len(prompts)),
    })  # fmt: skip
