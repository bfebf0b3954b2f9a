"""The tasks that ship with Terrace, by name: what a run of one needs besides its TOML file."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from terrace.rl import calculator_task, sort_task
from terrace.rl.characters import CharacterTokenizer
from terrace.rl.values.prompts import PromptSource
from terrace.rl.values.rows import Rows


class TaskPrompts(PromptSource, Protocol):
    """Prompts with examples for a supervised start."""

    def examples(self, first: int, num: int) -> Rows:
        """`num` prompts with right responses, from index `first` on."""


@dataclass(frozen=True)
class Task:
    """Prompts of a seed, their tokenizer, and the longest of both in tokens."""

    prompts: Callable[[int], TaskPrompts]
    tokenizer: CharacterTokenizer
    longest_prompt: int
    longest_response: int


TASKS = {
    "sort": Task(
        sort_task.SortPrompts, sort_task.SortTokenizer(), sort_task.LONGEST_PROMPT, sort_task.LONGEST_RESPONSE
    ),
    "calculator": Task(
        calculator_task.CalculatorPrompts,
        calculator_task.CalculatorTokenizer(),
        calculator_task.LONGEST_PROMPT,
        calculator_task.LONGEST_RESPONSE,
    ),
}
