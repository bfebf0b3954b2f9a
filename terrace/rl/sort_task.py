"""Task `sort`: sort the digits of a prompt. It ships with the project and needs no data.

A prompt is 5 to 10 random digits and `>`; the right response is the sorted digits and an end token, for a reward of 1,
else 0. Lengths vary, so that a wrong mask or a missing end token shows at once. A sixteenth of all prompts, chosen by
checksum, is held out and never trained on.
"""

import random
from collections.abc import Sequence

import numpy as np
import torch

from terrace.rl.characters import CharacterPrompts, CharacterTokenizer
from terrace.rl.values.prompts import Sample
from terrace.rl.values.ragged import Ragged
from terrace.rl.values.rows import Rows

ASK = ">"
_CHARACTERS = "0123456789" + ASK
END = len(_CHARACTERS)
VOCAB = END + 1
SHORTEST, LONGEST = 5, 10  # digits
LONGEST_PROMPT, LONGEST_RESPONSE = LONGEST + 1, LONGEST + 1  # tokens
NUM_HELD_OUT = 512


class SortTokenizer(CharacterTokenizer):
    """One token per digit and for `>`, plus an end token."""

    def __init__(self) -> None:
        super().__init__(_CHARACTERS, "sort-1")


class SortPrompts(CharacterPrompts):
    tokenizer = SortTokenizer()
    num_held_out = NUM_HELD_OUT

    @staticmethod
    def written(draw: random.Random) -> str:
        return "".join(draw.choices("0123456789", k=draw.randint(SHORTEST, LONGEST))) + ASK

    def examples(self, first: int, num: int) -> Rows:
        """`num` prompts with right responses, from index `first` of a separate stream, for a supervised start."""
        prompts = [self.example(place) for place in range(first, first + num)]
        encode = self.tokenizer.encode
        answers = [np.append(encode(answer(prompt.text)), END) for prompt in prompts]
        return Rows({
            "prompts": Ragged.of([torch.tensor(prompt.tokens, dtype=torch.int64) for prompt in prompts]),
            "responses": Ragged.of([torch.from_numpy(each) for each in answers]),
        })  # fmt: skip


def answer(prompt: str) -> str:
    return "".join(sorted(prompt.removesuffix(ASK)))


def reward(samples: Sequence[Sample]) -> list[float]:
    """1 for the sorted digits with the end token, else 0."""
    return [float(each.finish == "stop" and each.response == answer(each.prompt)) for each in samples]


def length_cost(samples: Sequence[Sample]) -> list[float]:
    """Response length over the maximum: a cost that conflicts with the reward, to try out a constraint."""
    return [len(each.response) / LONGEST for each in samples]
