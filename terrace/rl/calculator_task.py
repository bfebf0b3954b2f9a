"""Task `calculator`: multiply two numbers with a tool. It ships with the project and needs no data.

A prompt is two numbers of two or three digits, such as `417*38=`. A model of this size cannot multiply them. It may
write `?417*38` and an end token, which calls the calculator: the environment answers `15846=`, and the model goes on.
Any other turn is its answer, with a reward of 1 for the right number, else 0. A call that is no product of two numbers
is answered by `!=`. The supervised start shows the call in one example of `CALLS_OF`, and right answers alone in the
others, so that a policy begins by guessing and learns from rewards to ask.
"""

import random
import re

import numpy as np
import torch

from terrace.rl.characters import CharacterPrompts, CharacterTokenizer
from terrace.rl.values.environment import Turn
from terrace.rl.values.prompts import Prompt
from terrace.rl.values.ragged import Ragged
from terrace.rl.values.rows import Rows

CALL, ASK, WRONG = "?", "=", "!"
SMALLEST, LARGEST = 10, 999
LONGEST_PROMPT = 8  # tokens: 999*999=
LONGEST_RESPONSE = 9 + 7 + 7  # of a call, its answer, and the number with an end
NUM_HELD_OUT = 256
CALLS_OF = 4
_PRODUCT = re.compile(r"\?(\d{1,4})\*(\d{1,4})")


class CalculatorTokenizer(CharacterTokenizer):
    def __init__(self) -> None:
        super().__init__(f"0123456789*{ASK}{CALL}{WRONG}", "calculator-1")


class Calculator:
    def reset(self, prompt: Prompt) -> None:
        self._answer = answer(prompt.text)

    def step(self, turn: Turn) -> tuple[str, float, bool]:
        if not turn.text.startswith(CALL):
            return "", float(turn.text == self._answer), True
        found = _PRODUCT.fullmatch(turn.text)
        said = WRONG if found is None else str(int(found[1]) * int(found[2]))
        return f"{said}{ASK}", 0.0, False


class CalculatorPrompts(CharacterPrompts):
    tokenizer = CalculatorTokenizer()
    num_held_out = NUM_HELD_OUT

    @staticmethod
    def written(draw: random.Random) -> str:
        return f"{draw.randint(SMALLEST, LARGEST)}*{draw.randint(SMALLEST, LARGEST)}{ASK}"

    def examples(self, first: int, num: int) -> Rows:
        """`num` prompts with right responses, from index `first` of a separate stream, for a supervised start."""
        prompts = [self.example(place) for place in range(first, first + num)]
        encode, end = self.tokenizer.encode, [self.tokenizer.end]
        responses, emitted = list[torch.Tensor](), list[torch.Tensor]()
        for place, prompt in enumerate(prompts, start=first):
            right = [*encode(answer(prompt.text)), *end]
            called = [*encode(CALL + prompt.text.removesuffix(ASK)), *end] if place % CALLS_OF == 0 else []
            said = [*right[:-1], *encode(ASK)] if called else []
            responses.append(torch.from_numpy(np.array([*called, *said, *right], dtype=np.int64)))
            emitted.append(torch.tensor([*(True for _ in called), *(False for _ in said), *(True for _ in right)]))
        return Rows({
            "prompts": Ragged.of([torch.tensor(prompt.tokens, dtype=torch.int64) for prompt in prompts]),
            "responses": Ragged.of(responses),
            "emitted": Ragged.of(emitted),
        })  # fmt: skip


def answer(prompt: str) -> str:
    one, other = prompt.removesuffix(ASK).split("*")
    return str(int(one) * int(other))
