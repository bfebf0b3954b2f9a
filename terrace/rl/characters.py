"""What tasks that ship with Terrace share: a tokenizer of single characters, and prompts drawn by name."""

import json
import random
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from terrace.data.text_tokens import TextTokens
from terrace.model.hf.folder import TOKENIZER, TOKENIZER_CONFIG
from terrace.rl.values.prompts import Prompt

_END_TEXT = "<end>"
_HELD_OUT_OF = 16


class CharacterTokenizer:
    """One token per character of `characters`, plus an end token."""

    def __init__(self, characters: str, fingerprint: str) -> None:
        self._characters, self.fingerprint = characters, fingerprint
        self.end = len(characters)
        self.vocab_size = self.end + 1
        self.text_tokens = TextTokens(end=self.end, context=self.end)

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """Token ids of `text`; raises `ValueError` for other characters."""
        return np.array([self._characters.index(character) for character in text], dtype=np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        return [self.encode(text) for text in texts]

    def encode_prompt(self, text: str, *, begins_text: bool = True) -> npt.NDArray[np.int64]:
        return self.encode(text)

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        return "".join(self._characters[token] for token in ids if token != self.end)

    def files(self) -> dict[str, bytes]:
        """This tokenizer as files of a Hugging Face folder, by name."""
        ids = {character: token for token, character in enumerate(self._characters)} | {_END_TEXT: self.end}
        end = {"id": self.end, "content": _END_TEXT, "single_word": False, "lstrip": False, "rstrip": False}
        tokenizer = {
            "version": "1.0",
            "added_tokens": [end | {"normalized": False, "special": True}],
            "pre_tokenizer": {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False},
            "decoder": {"type": "Fuse"},
            "model": {"type": "WordLevel", "vocab": ids, "unk_token": ""},
        }
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": None, "eos_token": _END_TEXT}
        return {TOKENIZER: json.dumps(tokenizer).encode(), TOKENIZER_CONFIG: json.dumps(config).encode()}


@dataclass(frozen=True)
class CharacterPrompts(ABC):
    """The `PromptSource` of a task. A sixteenth of all prompts, by checksum, is held out and never trained on."""

    seed: int = 0
    tokenizer: ClassVar[CharacterTokenizer]
    num_held_out: ClassVar[int]

    @staticmethod
    @abstractmethod
    def written(draw: random.Random) -> str:
        """A prompt by these random numbers."""

    def prompt(self, place: int) -> Prompt:
        """The training prompt at index `place`, from 0."""
        return self._drawn(f"{self.seed}/{place}", is_held_out=False)

    def held_out(self) -> tuple[Prompt, ...]:
        return self._held_out

    @cached_property
    def _held_out(self) -> tuple[Prompt, ...]:
        return tuple(self._drawn(f"held out/{place}", is_held_out=True) for place in range(self.num_held_out))

    def example(self, place: int) -> Prompt:
        """The prompt at index `place` of a separate stream, for a supervised start."""
        return self._drawn(f"{self.seed}/example/{place}", is_held_out=False)

    def _drawn(self, name: str, *, is_held_out: bool) -> Prompt:
        # Python seeds from a string by its SHA-512, which is the same in every process.
        draw = random.Random(name)
        while True:
            text = self.written(draw)
            if (zlib.crc32(text.encode()) % _HELD_OUT_OF == 0) == is_held_out:
                return Prompt(text, tuple(self.tokenizer.encode(text).tolist()))
