"""A slow reference of the masks of chats, from the definition alone, and many tokenizers to hold masks against it.

A token is the assistant's if the model would have to write it: it is not among the tokens of the text before the
assistant's, as a prompt has them, nor among those of the text that follows. No offsets of a tokenizer are read.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, models
from tokenizers import normalizers as norm
from tokenizers import pre_tokenizers as pre
from tokenizers import processors as post

Pieces = Sequence[tuple[str, bool]]  # text, and whether the assistant wrote it

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,!?:\n"
_BYTES = [f"<0x{value:02X}>" for value in range(256)]
_SPACE = norm.Replace(" ", "▁")


def slow_mask(tokenizer: Tokenizer, pieces: Pieces) -> list[int]:
    """1 for each token of the concatenated `pieces` that the assistant wrote."""

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return found

    whole = ids("".join(text for text, _ in pieces))
    mask = [0] * len(whole)
    place = 0
    while place < len(pieces):
        if not pieces[place][1]:
            place += 1
            continue
        end = place
        while end < len(pieces) and pieces[end][1]:
            end += 1
        before = ids("".join(text for text, _ in pieces[:place]))
        after = ids("".join(text for text, _ in pieces[end:]))
        first = _num_common(whole, before)
        last = len(whole) - _num_common(whole[::-1], after[::-1])
        mask[first:last] = [1] * (last - first)
        place = end
    return mask


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _ids(words: Sequence[str]) -> dict[str, int]:
    return {word: number for number, word in enumerate(dict.fromkeys(words))}


def _byte_level() -> Any:
    merges = [("Ċ", "Ċ"), ("Ġ", "y"), ("e", "s"), ("Ġy", "es"), ("Ġ", "Ġ"), ("ð", "Ł"), ("ðŁ", "Ļ"), ("h", "i")]
    alphabet = sorted(pre.ByteLevel.alphabet())
    return models.BPE(_ids([*alphabet, *("".join(merge) for merge in merges)]), merges)


def _sentences(byte_fallback: bool, unknown: str | None = "<unk>") -> Any:
    merges = [("▁", "y"), ("e", "s"), ("▁y", "es"), ("▁", "▁"), ("h", "i")]
    words = ["<unk>", *_BYTES, "▁", *_LETTERS.replace("\n", ""), "é", *("".join(merge) for merge in merges)]
    return models.BPE(_ids(words), merges, unk_token=unknown, byte_fallback=byte_fallback, fuse_unk=not byte_fallback)


def _unigram(byte_fallback: bool) -> Any:
    letters = _LETTERS if not byte_fallback else _LETTERS.replace("\n", "")
    words = [("<unk>", -20.0), *((name, -9.0) for name in _BYTES), ("▁", -3.0), *((each, -5.0) for each in letters)]
    return models.Unigram([*words, ("▁yes", -1.0), ("es", -2.0), ("hi", -2.0)], 0, byte_fallback)


def _word_piece() -> Any:
    words = ["[UNK]", "yes", "hi", "and", *_LETTERS, *(f"##{letter}" for letter in _LETTERS)]
    return models.WordPiece(_ids(words), unk_token="[UNK]")


def _word_level() -> Any:
    return models.WordLevel(_ids(["[UNK]", "yes", "hi", "and", "\n", "u", "."]), unk_token="[UNK]")


# Models with the normalizers and pre-tokenizers that they are used with.
_FORMS: list[tuple[Any, list[Any], list[Any]]] = [
    (
        _byte_level,
        [None, norm.NFC(), norm.NFKC(), norm.Sequence([norm.NFD(), norm.StripAccents(), norm.Lowercase()])],
        [
            pre.ByteLevel(add_prefix_space=False),
            pre.ByteLevel(add_prefix_space=True),
            pre.ByteLevel(add_prefix_space=False, use_regex=False),
            pre.Sequence([pre.Split("\n", "isolated"), pre.Digits(True), pre.ByteLevel(False)]),
        ],
    ),
    (lambda: _sentences(True), [norm.Sequence([norm.Prepend("▁"), _SPACE]), _SPACE], [None]),
    (lambda: _sentences(False), [None, norm.Lowercase()], [pre.Metaspace(prepend_scheme="first")]),
    (lambda: _sentences(False, None), [None, norm.Lowercase(), norm.NFC()], [pre.Metaspace(), pre.Whitespace()]),
    (
        lambda: _unigram(True),
        [None, norm.NFKC(), norm.Sequence([norm.Strip(), norm.NFKC(), norm.Lowercase()])],
        [pre.Metaspace(), pre.Metaspace(prepend_scheme="never", split=False)],
    ),
    (lambda: _unigram(False), [norm.Nmt(), norm.NFKD()], [pre.Metaspace(), pre.Split("e", "removed")]),
    (_word_piece, [norm.BertNormalizer(), None], [pre.BertPreTokenizer(), pre.Split(" ", "removed")]),
    (_word_level, [None, norm.Lowercase()], [pre.Whitespace(), pre.WhitespaceSplit()]),
]
_FLAGS: list[dict[str, bool]] = [
    {},
    {"rstrip": True},
    {"lstrip": True},
    {"lstrip": True, "rstrip": True, "normalized": True},
    {"normalized": True},
]
_POST = [None, post.ByteLevel(trim_offsets=True), post.RobertaProcessing(("<a>", 0), ("<u>", 1), trim_offsets=True)]


def many_tokenizers(headers: Sequence[str], end: str, *, apart: bool) -> Iterator[tuple[str, Tokenizer]]:
    """Tokenizers of all forms, and words that tell them apart; special tokens are `headers` and `end`.

    Headers stand `apart` from words, or touch them.
    """
    posts = itertools.cycle(_POST)
    for number, (make, normalizers, splitters) in enumerate(_FORMS):
        for normalizer, splitter, flags in itertools.product(normalizers, splitters, _FLAGS):
            # Beside a normalised mark, these change the ends of a whole text alone, where a prompt is another one.
            if any(name in str(normalizer) for name in ("Prepend", "Strip(")) and flags.get("normalized"):
                continue
            tokenizer = Tokenizer(make())
            if normalizer is not None:
                tokenizer.normalizer = normalizer
            if splitter is not None:
                tokenizer.pre_tokenizer = splitter
            processor = next(posts)
            if processor is not None:
                tokenizer.post_processor = processor
            # A mark of a single word is none beside a word.
            tokenizer.add_special_tokens(
                [AddedToken(mark, special=True, single_word=apart, **flags) for mark in headers]
                + [AddedToken(end, special=True, **flags)]
            )
            yield f"{number} {normalizer} {splitter} {flags} {processor}", tokenizer
