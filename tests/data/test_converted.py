"""A folder whose tokenizer has another form than tokenizer.json: converted once, or the line that converts it."""

import base64
import importlib
import json
import sys
from pathlib import Path

import pytest

from terrace.base.errors import DataError
from terrace.base.sealed import ChangedFile
from terrace.data.converted import other_form
from terrace.data.tokenizer import load_tokenizer
from terrace.train.folder import with_folder

pytest.importorskip("tokenizers")

TEXT = "A tier is a level of the cluster."
LINE = r"AutoTokenizer\.from_pretrained\(.*\)\.backend_tokenizer\.save\(.*tokenizer\.json"


def write_gpt2(folder: Path) -> Path:
    """Vocabulary and merges, as older folders have them: bytes, and two merges."""
    pytest.importorskip("transformers")
    from tokenizers import pre_tokenizers

    folder.mkdir()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, "ti", "tier", "er", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\nt i\ne r\nti er\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}')
    return folder


def test_another_form_is_converted_once(tmp_path: Path) -> None:
    folder = write_gpt2(tmp_path / "model")
    kept = {path.name: path.read_bytes() for path in folder.iterdir()}
    # A run on the folder takes it as its tokenizer.
    assert with_folder({}, str(folder), False)["data"] == {"tokenizer": str(folder / "tokenizer.json")}
    with pytest.warns(ChangedFile, match=r"wrote .*model/tokenizer\.json, made of vocab\.json by transformers \d"):
        tokenizer = load_tokenizer(folder / "tokenizer.json")
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode(TEXT).tolist() == theirs(TEXT)["input_ids"]
    assert len(tokenizer.encode("tier")) == 1
    assert tokenizer.decode(tokenizer.encode(TEXT).tolist()) == TEXT
    assert {name: (folder / name).read_bytes() for name in kept} == kept  # what was there stays
    assert other_form(folder) is None
    assert load_tokenizer(folder).fingerprint == tokenizer.fingerprint


def test_sentencepiece_is_converted(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    trainer = pytest.importorskip("sentencepiece").SentencePieceTrainer
    (tmp_path / "text.txt").write_text((TEXT + "\n") * 50)
    trainer.train(
        input=str(tmp_path / "text.txt"), model_prefix=str(tmp_path / "tokenizer"), vocab_size=300, byte_fallback=True,
        model_type="bpe", hard_vocab_limit=False, minloglevel=2, normalization_rule_name="identity",
    )  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    own = importlib.import_module("sentencepiece").SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    with pytest.warns(ChangedFile, match=r"made of tokenizer\.model"):
        assert load_tokenizer(tmp_path).encode(TEXT).tolist() == own.encode(TEXT)


def write_tiktoken(file: Path) -> None:
    file.write_bytes(b"".join(base64.b64encode(bytes([each])) + b" %d\n" % each for each in range(256)))


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json", "qwen.tiktoken", "tiktoken.model"])
def test_without_the_packages_the_line_that_converts_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    write_tiktoken(tmp_path / name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(DataError, match=LINE) as error:
        load_tokenizer(tmp_path)
    assert "\n" not in str(error.value)
    assert name in str(error.value)
    assert not (tmp_path / "tokenizer.json").exists()


def test_a_file_that_transformers_cannot_read_is_named(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x07nothing")
    with pytest.raises(DataError, match=r"tokenizer\.model cannot be read \(.*\); convert it: pip install") as error:
        load_tokenizer(tmp_path)
    assert "\n" not in str(error.value)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_gpt2(tmp_path / "model")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("terrace.data.converted.write_atomic", refuse)
    with pytest.raises(DataError, match=r"cannot be written there \(Permission denied\): copy the folder"):
        load_tokenizer(folder)


def test_one_file_of_a_tokenizer_is_not_its_folder(tmp_path: Path) -> None:
    write_tiktoken(tmp_path / "tokenizer.model")
    with pytest.raises(DataError, match="is one file of a tokenizer: name its folder"):
        load_tokenizer(tmp_path / "tokenizer.model")
