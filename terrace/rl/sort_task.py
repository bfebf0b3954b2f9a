"""Task `sort`: the digits of a prompt in ascending order. It ships with the project: no data, no download.

A prompt is 5 to 10 random digits and `>`, a response the digits sorted and the end. The reward is 1 for exactly that,
the end included, else 0. Prompts and responses differ in length, so a wrong mask or a lost end shows at once. A
sixteenth of all prompts, by their checksum, is held out and never trained on.
"""

import json
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from terrace.data.text_tokens import TextTokens
from terrace.model.hf.folder import TOKENIZER, TOKENIZER_CONFIG
from terrace.rl.values.prompts import Prompt, Sample
from terrace.rl.values.ragged import Ragged
from terrace.rl.values.rows import Rows

ASK = ">"
_CHARACTERS = "0123456789" + ASK
END = len(_CHARACTERS)
VOCAB = END + 1
_END_TEXT = "<end>"
SHORTEST, LONGEST = 5, 10  # digits
LONGEST_PROMPT, LONGEST_RESPONSE = LONGEST + 1, LONGEST + 1  # tokens
NUM_HELD_OUT = 512
_HELD_OUT_OF = 16


class SortTokenizer:
    """A token a character, and the end."""

    vocab_size: int = VOCAB
    text_tokens: TextTokens = TextTokens(end=END, context=END)
    fingerprint: str = "sort-1"

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """Ids of `text`; raises `ValueError` for another character than digits and `>`."""
        return np.array([_CHARACTERS.index(character) for character in text], dtype=np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        return [self.encode(text) for text in texts]

    def encode_prompt(self, text: str, *, begins_text: bool = True) -> npt.NDArray[np.int64]:
        return self.encode(text)

    def files(self) -> dict[str, bytes]:
        """The same tokenizer as the files of a Hugging Face folder, name -> content."""
        ids = {character: token for token, character in enumerate(_CHARACTERS)} | {_END_TEXT: END}
        end = {"id": END, "content": _END_TEXT, "single_word": False, "lstrip": False, "rstrip": False}
        tokenizer = {
            "version": "1.0",
            "added_tokens": [end | {"normalized": False, "special": True}],
            "pre_tokenizer": {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False},
            "decoder": {"type": "Fuse"},
            "model": {"type": "WordLevel", "vocab": ids, "unk_token": ""},
        }
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": None, "eos_token": _END_TEXT}
        return {TOKENIZER: json.dumps(tokenizer).encode(), TOKENIZER_CONFIG: json.dumps(config).encode()}

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        return "".join(_CHARACTERS[token] for token in ids if token != END)


@dataclass(frozen=True)
class SortPrompts:
    """Prompts of the task."""

    seed: int = 0

    def prompt(self, place: int) -> Prompt:
        """The training prompt at a place, from 0."""
        return _drawn(f"{self.seed}/{place}", is_held_out=False)

    def held_out(self) -> tuple[Prompt, ...]:
        return self._held_out

    @cached_property
    def _held_out(self) -> tuple[Prompt, ...]:
        return tuple(_drawn(f"held out/{place}", is_held_out=True) for place in range(NUM_HELD_OUT))

    def examples(self, first: int, num: int) -> Rows:
        """Prompts with their right responses, from place `first` of a stream of their own: for a supervised start."""
        prompts = [_drawn(f"{self.seed}/example/{place}", is_held_out=False) for place in range(first, first + num)]
        encode = SortTokenizer().encode
        answers = [np.append(encode(answer(prompt.text)), END) for prompt in prompts]
        return Rows({
            "prompts": Ragged.of([torch.tensor(prompt.tokens, dtype=torch.int64) for prompt in prompts]),
            "responses": Ragged.of([torch.from_numpy(each) for each in answers]),
        })  # fmt: skip


def answer(prompt: str) -> str:
    """The right response to a prompt."""
    return "".join(sorted(prompt.removesuffix(ASK)))


def reward(samples: Sequence[Sample]) -> list[float]:
    """1 for the sorted digits and the end, else 0."""
    return [float(each.finish == "stop" and each.response == answer(each.prompt)) for each in samples]


def length_cost(samples: Sequence[Sample]) -> list[float]:
    """Digits of the response over the longest: a cost that works against the reward, to try a constraint on."""
    return [len(each.response) / LONGEST for each in samples]


def _drawn(name: str, *, is_held_out: bool) -> Prompt:
    # A string seeds Python's generator by its SHA-512, the same in every process.
    draw = random.Random(name)
    while True:
        text = "".join(draw.choices("0123456789", k=draw.randint(SHORTEST, LONGEST))) + ASK
        if (zlib.crc32(text.encode()) % _HELD_OUT_OF == 0) == is_held_out:
            return Prompt(text, tuple(SortTokenizer().encode(text).tolist()))
