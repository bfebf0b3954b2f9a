"""Task `sort`: sort the digits of a prompt. It ships with the project and needs no data.

A prompt is 5 to 10 random digits and `>`; the right response is the sorted digits and an end token, for a reward of 1,
else 0. Lengths vary, so that a wrong mask or a missing end token shows at once. A sixteenth of all prompts, chosen by
checksum, is held out and never trained on.
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
    """One token per character, plus an end token."""

    vocab_size: int = VOCAB
    text_tokens: TextTokens = TextTokens(end=END, context=END)
    fingerprint: str = "sort-1"

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """Token ids of `text`; raises `ValueError` for characters other than digits and `>`."""
        return np.array([_CHARACTERS.index(character) for character in text], dtype=np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        return [self.encode(text) for text in texts]

    def encode_prompt(self, text: str, *, begins_text: bool = True) -> npt.NDArray[np.int64]:
        return self.encode(text)

    def files(self) -> dict[str, bytes]:
        """This tokenizer as files of a Hugging Face folder, by name."""
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
    """The `PromptSource` of the task."""

    seed: int = 0

    def prompt(self, place: int) -> Prompt:
        """The training prompt at index `place`, from 0."""
        return _drawn(f"{self.seed}/{place}", is_held_out=False)

    def held_out(self) -> tuple[Prompt, ...]:
        return self._held_out

    @cached_property
    def _held_out(self) -> tuple[Prompt, ...]:
        return tuple(_drawn(f"held out/{place}", is_held_out=True) for place in range(NUM_HELD_OUT))

    def examples(self, first: int, num: int) -> Rows:
        """`num` prompts with right responses, from index `first` of a separate stream, for a supervised start."""
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
    """1 for the sorted digits with the end token, else 0."""
    return [float(each.finish == "stop" and each.response == answer(each.prompt)) for each in samples]


def length_cost(samples: Sequence[Sample]) -> list[float]:
    """Response length over the maximum: a cost that conflicts with the reward, to try out a constraint."""
    return [len(each.response) / LONGEST for each in samples]


def _drawn(name: str, *, is_held_out: bool) -> Prompt:
    # Python seeds from a string by its SHA-512, which is the same in every process.
    draw = random.Random(name)
    while True:
        text = "".join(draw.choices("0123456789", k=draw.randint(SHORTEST, LONGEST))) + ASK
        if (zlib.crc32(text.encode()) % _HELD_OUT_OF == 0) == is_held_out:
            return Prompt(text, tuple(SortTokenizer().encode(text).tolist()))
