"""Prompts by their place in a run: a pure function of (seed, place), so that a resumed run takes the same ones.

A task, or a file of prompts, is a `PromptSource`. A reward sees a response as a `Sample`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from terrace.rl.values.ragged import Ragged
from terrace.rl.values.rows import Rows


@dataclass(frozen=True)
class Prompt:
    """A text, its tokens, and further values of its line for rewards, such as an answer."""

    text: str
    tokens: tuple[int, ...]
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """A response to a prompt as rewards see it: `finish` is "stop" where the model ended it, else "length".

    `data` is the prompt's line.
    """

    prompt: str
    response: str
    finish: str
    data: Mapping[str, Any]


class PromptSource(Protocol):
    """Training prompts without end, and some that are never trained on."""

    def prompt(self, place: int) -> Prompt:
        """The training prompt at a place in the run, from 0."""

    def held_out(self) -> tuple[Prompt, ...]:
        """Prompts that no place has; empty if there are none."""


def rows_of(prompts: list[Prompt], first_group: int = 0) -> Rows:
    """A row a prompt: columns `prompts` (tokens), `prompt_texts`, `data`, and `groups`, numbered from `first_group`."""
    return Rows({
        "prompts": Ragged.of([torch.tensor(prompt.tokens, dtype=torch.int64) for prompt in prompts]),
        "prompt_texts": tuple(prompt.text for prompt in prompts),
        "data": tuple(prompt.data for prompt in prompts),
        "groups": torch.arange(first_group, first_group + len(prompts)),
    })  # fmt: skip
