"""From the text of a conversation to token ids, and to the characters that each token stands for.

A token's characters decide whether it is trained on (terrace.data.chat), so they are those that the token means, not
all that the `tokenizers` package reports for it:

- An added token with `lstrip` or `rstrip` reports the white space that it swallows; it means its own spelling alone.
- A post-processor with `trim_offsets` reports a token that begins with a space without it, and a token of spaces
  as empty; trimming is switched off.
- Adjacent unknown characters become bytes that all report the whole stretch; each means its own character.
- One token for several unknown characters (not words) means the first: a prompt that ends after it has the same token.
- A BPE model that drops unknown characters does not count them in later offsets; they are counted here.

What a normalizer or a prefix inserts is assigned to the character that it comes from or precedes.
"""

import itertools
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from terrace.data.text_tokens import TextTokens, state_of
from terrace.data.tokenizer import BYTES, ByteTokenizer, Tokenizer

if TYPE_CHECKING:
    from tokenizers import AddedToken, Encoding
    from tokenizers import Tokenizer as FileEncoder

Ids = npt.NDArray[np.int64]
Offsets = npt.NDArray[np.int64]  # of shape (num_tokens, 2)
_SPACE = "▁"  # a space, or the prefix of a text
_LONGEST_RESPELLED = 256  # characters of a run that a normalizer changes; a guess: the work grows with the square


class ChatEncoder(Protocol):
    """Maps text to ids and to the characters that each id stands for."""

    around: TextTokens  # of a prompt with its completion
    unknown: int | None  # the token for unknown characters

    def encode(self, text: str) -> tuple[Ids, Ids, Ids]:
        """Ids, the first character of each, and one past its last; arrays of shape (num_tokens,)."""

    def forged(self, text: str) -> str | None:
        """A special token that is spelled out in `text`, or None."""


class ByteEncoder:
    """Encodes text as UTF-8 bytes, without special tokens."""

    around = ByteTokenizer.text_tokens
    unknown: int | None = None

    def encode(self, text: str) -> tuple[Ids, Ids, Ids]:
        # One id per byte; the bytes of one character share its place.
        ids = np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)
        characters = np.cumsum((ids & 0xC0) != 0x80) - 1  # all but continuation bytes begin one
        return ids, characters, characters + 1

    def forged(self, text: str) -> str | None:
        return None


class SpecialEncoder:
    """A Hugging Face tokenizer that encodes special tokens in the text as such."""

    def __init__(self, encoder: "FileEncoder", around: TextTokens) -> None:
        # A tokenizer.json may ask for truncation and padding, which would cut or fill conversations silently.
        encoder.no_truncation()
        encoder.no_padding()
        _untrimmed(encoder)
        self._encoder = encoder
        self.around = around
        added = encoder.get_added_tokens_decoder()
        self._greedy = {index: token for index, token in added.items() if token.lstrip or token.rstrip}
        # The names of bytes where a tokenizer falls back to them.
        names = {value: encoder.token_to_id(f"<0x{value:02X}>") for value in range(256)}
        self._byte = {index: value for value, index in names.items() if index is not None}
        self.unknown = _unknown(encoder)
        self._drops = self.unknown is None and _drops(encoder)
        self._fuses = self.unknown is not None and _kind(encoder) in ("BPE", "Unigram")
        # One regular expression for all special tokens; "(?!)" matches nothing.
        special = {index: token for index, token in added.items() if token.special}
        contents = sorted((token.content for token in special.values()), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, contents)) or "(?!)")
        # These are looked for in the normalised text, so other characters than their own may spell them.
        normalised = encoder.normalizer is not None
        self._respelled = {index: token.content for index, token in special.items() if normalised and token.normalized}

    def encode(self, text: str) -> tuple[Ids, Ids, Ids]:
        encoding = self._encoder.encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, dtype=np.int64)
        offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        if self._drops:
            self._shift(text, encoding, offsets)
        if self._greedy:
            for place in np.flatnonzero(np.isin(ids, list(self._greedy))):
                first, end = offsets[place].tolist()
                offsets[place] = _own_characters(text, first, end, self._greedy[int(ids[place])])
        if self._byte:
            self._divide_runs(text, ids, offsets)
        if self._fuses:
            unknown = ids == self.unknown
            offsets[unknown, 1] = np.minimum(offsets[unknown, 0] + 1, offsets[unknown, 1])
        return ids, offsets[:, 0], offsets[:, 1]

    def forged(self, text: str) -> str | None:
        found = self._special.search(text)
        if found is not None:
            return found.group()
        if not self._respelled:
            return None
        there = self._encoder.encode(text, add_special_tokens=False).ids
        return next((self._respelled[index] for index in there if index in self._respelled), None)

    def _shift(self, text: str, encoding: "Encoding", offsets: Offsets) -> None:
        """Corrects `offsets`, in place, for the characters that the model has dropped."""
        spelled = {character: self._normalised(character) for character in set(text)}
        known = self._encoder.model.token_to_id
        dropped = {each for each, made in spelled.items() if each != " " and all(known(part) is None for part in made)}
        if not dropped:
            return
        # The offsets of a word begin where it begins.
        for _, group in itertools.groupby(range(len(offsets)), key=encoding.word_ids.__getitem__):
            word = list(group)
            tokens = [encoding.tokens[token] for token in word]
            found = _spelled_from(text, int(offsets[word[0], 0]), tokens, spelled, dropped)
            if found is not None:
                offsets[word] = found

    def _normalised(self, character: str) -> str:
        normalizer = self._encoder.normalizer
        made = character if normalizer is None else normalizer.normalize_str(character)
        return made.removeprefix(_SPACE) if len(made) > 1 else made  # a normalizer may put it before a text

    def _divide_runs(self, text: str, ids: Ids, offsets: Offsets) -> None:
        """Assigns to each byte of a run of unknown characters, in place, its own character."""
        wide = np.isin(ids, list(self._byte)) & (offsets[:, 1] - offsets[:, 0] > 1)
        places = np.flatnonzero(wide).tolist()
        for (first, end), group in itertools.groupby(places, key=lambda place: tuple(offsets[place].tolist())):
            run = list(group)
            spelled = bytes(self._byte[int(ids[place])] for place in run).decode(errors="replace")
            owners = [owner for character, owner in self._owners(text, first, end, spelled) for _ in character.encode()]
            if len(owners) == len(run):
                offsets[run, 0] = owners
                offsets[run, 1] = np.array(owners) + 1

    def _owners(self, text: str, first: int, end: int, spelled: str) -> list[tuple[str, int]]:
        """Each character of `spelled`, the normalised text[first:end], with the index of its original character."""
        if len(spelled) == end - first:
            return list(zip(spelled, range(first, end), strict=True))
        if end - first > _LONGEST_RESPELLED:
            return []
        # A normalizer makes several characters, or none, of one. What it puts before a text counts for all stretches.
        normalizer = self._encoder.normalizer
        stretches = [text[first:place] for place in range(first + 1, end + 1)]
        sizes = [len(part if normalizer is None else normalizer.normalize_str(part)) for part in stretches]
        later = [after - before for before, after in itertools.pairwise(sizes)]
        counts = [len(spelled) - sum(later), *later]
        if min(counts) < 0:
            return []
        places = [place for place, count in enumerate(counts, start=first) for _ in range(count)]
        return list(zip(spelled, places, strict=True))


def load_encoder(path: str | Path, tokenizer: Tokenizer) -> ChatEncoder:
    if str(path) == BYTES:
        return ByteEncoder()
    from tokenizers import Tokenizer as FileEncoder

    file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    return SpecialEncoder(FileEncoder.from_str(file.read_text(encoding="utf-8")), tokenizer.text_tokens)


def _spelled_from(
    text: str, place: int, tokens: list[str], spelled: dict[str, str], dropped: set[str]
) -> list[tuple[int, int]] | None:
    """The character range of each of `tokens`, which spell `text` from `place` on, skipping `dropped` characters.

    None if they do not spell it, for example because a normalizer composes characters.
    """
    found = []
    for token in tokens:
        first = None
        for character in token:
            here = text[place : place + 1]
            if character == _SPACE and here != " ":  # a prefix
                first = place if first is None else first
                continue
            while here in dropped:
                place += 1
                here = text[place : place + 1]
            if spelled.get(here, "").replace(" ", _SPACE) != character:
                return None
            first = place if first is None else first
            place += 1
        found.append((first or 0, max(place, (first or 0) + 1)))
    return found


def _own_characters(text: str, first: int, end: int, token: "AddedToken") -> tuple[int, int]:
    piece, content = text[first:end], token.content
    # A token of white space that swallows what is before it stands last.
    at = piece.rfind(content) if token.lstrip and not token.rstrip else piece.find(content)
    if at >= 0:
        return first + at, first + at + len(content)
    # Found in normalised text, and spelled otherwise here.
    inner = piece.strip()
    start = first + piece.find(inner)
    return start, start + len(inner)


def _unknown(encoder: "FileEncoder") -> int | None:
    name = getattr(encoder.model, "unk_token", None)
    if name is not None:
        return encoder.token_to_id(name)
    # A Unigram model shows its token in JSON alone.
    found = re.search(rb'"unk_id":\s*(\d+)', encoder.model.__getstate__()) if _kind(encoder) == "Unigram" else None
    return None if found is None else int(found[1])


def _drops(encoder: "FileEncoder") -> bool:
    """Whether the model drops characters without a token; none are if text is first turned into bytes."""
    if _kind(encoder) != "BPE" or encoder.model.byte_fallback:
        return False
    steps = [step for step in (encoder.normalizer, encoder.pre_tokenizer) if step is not None]
    return not any(b'"ByteLevel"' in step.__getstate__() for step in steps)


def _kind(encoder: "FileEncoder") -> str:
    return type(encoder.model).__name__


def _untrimmed(encoder: "FileEncoder") -> None:
    state = state_of(encoder.post_processor)
    if not _trims(state):
        return
    from tokenizers import Tokenizer as FileEncoder

    # The package makes a post-processor of JSON only as part of a tokenizer.
    model = {"type": "WordLevel", "vocab": {}, "unk_token": ""}
    bare = {"version": "1.0", "model": model, "post_processor": state, "added_tokens": []}
    encoder.post_processor = FileEncoder.from_str(json.dumps(bare)).post_processor


def _trims(state: Any) -> bool:
    """Switches off, in place, every `trim_offsets` in a post-processor's state. Returns whether one was on."""
    found = state.get("trim_offsets") is True
    if found:
        state["trim_offsets"] = False
    # All are visited: `any` of a generator would stop at the first.
    return any([found, *(_trims(each) for each in state.get("processors", ()))])
