"""Tokens around a text: what a folder declares, as transformers reads it, and what a run says instead."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from terrace.base.errors import DataError
from terrace.base.schema import load
from terrace.data import pieces as pieces_module
from terrace.data import tokenizer as tokenizer_module
from terrace.data.chat import ChatReader
from terrace.data.chat_encoder import load_encoder
from terrace.data.config import DataConfig
from terrace.data.prepared import prepare_sources
from terrace.data.template import ChatTemplate
from terrace.data.tokenizer import FileTokenizer, load_tokenizer, trained_otherwise, within
from terrace.data.tokenizer_files import agreeing
from terrace.data.tokens import prepare_tokens
from tests.support.chats import write_tokenizer

pytest.importorskip("tokenizers")

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def template(*names: str, ids: dict[str, int]) -> dict[str, Any]:
    begin = [{"SpecialToken": {"id": name, "type_id": 0}} for name in names]
    text = [{"Sequence": {"id": "A", "type_id": 0}}]
    special = {name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in names}
    return {
        "type": "TemplateProcessing",
        "single": begin + text,
        "pair": begin + text + [{"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": special,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """ChatML's tokens and <s>; tokenizer_config.json says that <|im_end|> ends a text, and names <s> as bos_token."""
    return write_tokenizer(tmp_path / "tokenizer")


def ids_of(folder: Path) -> dict[str, int]:
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    return {token["content"]: token["id"] for token in added}


def put(folder: Path, name: str, **values: Any) -> None:
    path = folder / name
    old = json.loads(path.read_text()) if path.exists() else {}
    kept = {key: value for key, value in {**old, **values}.items() if value is not None}
    path.write_text(json.dumps(kept))


def begins(folder: Path, post_processor: Any) -> None:
    whole = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**whole, "post_processor": post_processor}))


def found(folder: Path, *given: Any) -> tuple[tuple[int, ...], int | None]:
    tokens = load_tokenizer(folder, *given).text_tokens
    return tokens.begin, tokens.end


def test_the_end_of_a_text_is_the_folder_s_own(folder: Path) -> None:
    ids = ids_of(folder)
    assert found(folder) == ((), ids["<|im_end|>"])
    put(folder, "generation_config.json", eos_token_id=[7, 9])
    put(folder, "config.json", eos_token_id=8)
    assert found(folder)[1] == ids["<|im_end|>"]
    put(folder, "tokenizer_config.json", eos_token=None)
    assert found(folder)[1] == 7
    put(folder, "generation_config.json", eos_token_id=None)
    assert found(folder)[1] == 8
    put(folder, "config.json", eos_token_id=None)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.text_tokens.end == ids["<|endoftext|>"]
    assert isinstance(tokenizer, FileTokenizer)
    end = f"they end with '<|endoftext|>' ({ids['<|endoftext|>']})"
    guessed = "guessed by its name: say otherwise with data.eos"
    assert tokenizer.words() == f"texts have no token before them; {end}, {guessed}"
    assert found(folder, "auto", "<|im_start|>")[1] == ids["<|im_start|>"]


def test_a_tokenizer_of_another_name_has_no_files_beside_it(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "mine.json")
    assert load_tokenizer(folder / "mine.json").text_tokens.end_from.startswith("guessed")


@pytest.mark.parametrize("around", ["nothing", "byte level", "alone", "sequence", "two", "bert"])
def test_what_stands_before_a_text_is_as_in_transformers(folder: Path, around: str) -> None:
    transformers = pytest.importorskip("transformers")
    ids = ids_of(folder)
    one, two = template("<s>", ids=ids), template("<|im_start|>", "<s>", ids=ids)
    bert = {"type": "BertProcessing", "sep": ["<|im_end|>", ids["<|im_end|>"]], "cls": ["<s>", ids["<s>"]]}
    processor = {
        "nothing": template(ids=ids),
        "byte level": BYTE_LEVEL,
        "alone": one,
        "sequence": {"type": "Sequence", "processors": [BYTE_LEVEL, one]},
        "two": two,
        "bert": bert,
    }[around]
    begins(folder, processor)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(folder)
    for text in ("What is a tier?", "And  a plan?\n"):
        assert list(ours.encode_prompt(text)) == theirs(text)["input_ids"][: None if around != "bert" else -1]
    assert len(ours.text_tokens.begin) == {"nothing": 0, "byte level": 0, "two": 2}.get(around, 1)


def test_a_run_says_otherwise(folder: Path) -> None:
    ids = ids_of(folder)
    assert found(folder, True)[0] == (ids["<s>"],)
    assert found(folder, "<|im_start|>")[0] == (ids["<|im_start|>"],)
    put(folder, "tokenizer_config.json", add_bos_token=True)
    assert found(folder)[0] == (ids["<s>"],)  # no template says otherwise
    begins(folder, template("<s>", ids=ids))
    assert found(folder, False)[0] == ()
    put(folder, "tokenizer_config.json", bos_token=None)
    with pytest.raises(DataError, match=r"data.bos = true, but no tokenizer_config.json .* --data.bos TOKEN"):
        load_tokenizer(folder, True)
    with pytest.raises(DataError, match=r"data.eos = '<\|im_ed\|>' is no token of .*did you mean '<\|im_end\|>'"):
        load_tokenizer(folder, "auto", "<|im_ed|>")
    put(folder, "tokenizer_config.json", eos_token="<gone>")
    with pytest.raises(DataError, match=r"eos_token in tokenizer_config.json = '<gone>' is no .* --data.eos TOKEN"):
        load_tokenizer(folder)
    assert found(folder, "auto", "<|im_end|>")[1] == ids["<|im_end|>"]
    put(folder, "tokenizer_config.json", eos_token=None)
    put(folder, "config.json", eos_token_id=99_999)
    with pytest.raises(DataError, match=r"names the token 99999 for the end of a text, but the largest"):
        load_tokenizer(folder)
    with pytest.raises(DataError, match=r'data.eos = \'</s>\' has no effect on data.tokenizer = "bytes"'):
        load_tokenizer("bytes", "auto", "</s>")
    assert load_tokenizer("bytes", False).text_tokens.end == 256
    config = load(DataConfig, {"bos": False, "eos": "</s>"}, "data")
    assert (config.bos, config.eos) == (False, "</s>")


def test_prepared_texts_stand_between_their_tokens(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces_module, "PIECE_CHARACTERS", 6)  # a document is cut into pieces
    begins(folder, template("<s>", ids=ids_of(folder)))
    texts = ["What is a tier?", "a plan </s> <s>"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = DataConfig(path=str(tmp_path / "a.jsonl"), tokenizer=str(folder), cache=str(tmp_path / "cache"))
    tokenizer = load_tokenizer(folder)
    (source,) = prepare_sources(data, tokenizer, 4)
    ids, starts = source.tokens.open().tolist(), source.tokens.open_starts().tolist()
    documents = [ids[starts[0] : starts[1]], ids[starts[1] :]]
    (begin,), end = tokenizer.text_tokens.begin, tokenizer.text_tokens.end
    assert [(each[0], each[-1]) for each in documents] == [(begin, end)] * 2
    assert [tokenizer.decode(each) for each in documents] == texts
    assert all(special not in each[1:-1] for each in documents for special in (begin, end))
    plain = prepare_tokens(data.path, load_tokenizer(folder, False), data.cache)
    assert plain.path != source.tokens.path
    assert plain.num_tokens == source.tokens.num_tokens - 2


def test_a_completion_begins_as_a_text(folder: Path) -> None:
    begins(folder, template("<s>", ids=ids_of(folder)))
    tokenizer = load_tokenizer(folder, "auto", "<|endoftext|>")
    reader = ChatReader(ChatTemplate(""), load_encoder(folder, tokenizer))
    ids, mask = reader.tokens(json.dumps({"prompt": "What ", "completion": "a plan"}), "here")
    prompt = tokenizer.encode_prompt("What a plan").tolist()
    assert ids.tolist() == [*prompt, tokenizer.text_tokens.end]
    assert mask[0] == 0
    assert mask[-1] == 1


def test_special_tokens_of_a_prompt_are_special(folder: Path) -> None:
    ids = ids_of(folder)
    tokenizer = load_tokenizer(folder, True)
    asked = "<|im_start|>user\nWhat?<|im_end|>\n"
    given = tokenizer.encode_prompt(asked).tolist()
    assert [each for each in given if each in ids.values()] == [ids["<s>"], ids["<|im_start|>"], ids["<|im_end|>"]]
    assert tokenizer.encode_prompt(asked, begins_text=False).tolist() == given[1:]
    assert tokenizer.encode_prompt("<s>" + asked).tolist() == given  # spelled out, it is not put a second time
    assert not set(tokenizer.encode(asked).tolist()) & set(ids.values())  # of data it is text
    assert tokenizer.decode(given, keep_special=True) == "<s>" + asked
    assert tokenizer.decode(given) == "user\nWhat?\n"


@pytest.mark.parametrize(
    ("bos", "eos"), [("auto", "auto"), (False, "<|endoftext|>"), ("<|im_start|>", "auto"), (True, "<s>")]
)
@pytest.mark.parametrize("processor", ["none", "byte level", "template", "sequence"])
def test_carried_files_declare_what_the_run_put(
    folder: Path, tmp_path: Path, bos: bool | str, eos: str, processor: str
) -> None:
    transformers = pytest.importorskip("transformers")
    one = template("<s>", ids=ids_of(folder))
    shapes: dict[str, Any] = {"none": None, "byte level": BYTE_LEVEL, "template": one}
    begins(folder, shapes.get(processor, {"type": "Sequence", "processors": [BYTE_LEVEL, one]}))
    put(folder, "config.json", eos_token_id=[3, 4])
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    of_run = load_tokenizer(folder, bos, eos)
    assert isinstance(of_run, FileTokenizer)
    changed = agreeing(files, of_run)
    assert bool(changed) == ((bos, eos) != ("auto", "auto"))
    (tmp_path / "out").mkdir()
    for name, content in {**files, **changed}.items():
        (tmp_path / "out" / name).write_bytes(content)
    assert found(tmp_path / "out") == found(folder, bos, eos)
    assert found(folder, *of_run.as_keys()) == found(folder, bos, eos)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs("a tier")["input_ids"] == of_run.encode_prompt("a tier").tolist()
    assert theirs.eos_token_id == of_run.text_tokens.end
    if changed:
        assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == of_run.text_tokens.end


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "GPTNeoXTokenizerFast", "PreTrainedTokenizerFast"])
def test_an_export_has_no_bos_token_that_the_run_did_not_know(folder: Path, tmp_path: Path, kind: str) -> None:
    """GPT-2's class has <|endoftext|> where the key is missing: lm-eval would put that before a text."""
    transformers = pytest.importorskip("transformers")
    put(folder, "tokenizer_config.json", tokenizer_class=kind, bos_token=None)
    of_run = load_tokenizer(folder, "auto", "<s>")
    assert isinstance(of_run, FileTokenizer)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    (tmp_path / "out").mkdir()
    for name, content in {**files, **agreeing(files, of_run)}.items():
        (tmp_path / "out" / name).write_bytes(content)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    prefix = theirs.eos_token_id if theirs.bos_token_id is None else theirs.bos_token_id
    assert prefix == of_run.text_tokens.context == load_tokenizer(tmp_path / "out").text_tokens.context


def test_checkpoints_of_earlier_versions_are_told_apart(folder: Path) -> None:
    """They put nothing before a text and guessed its end."""
    before = load_tokenizer(folder, False, "<|endoftext|>")
    assert "-bos" not in before.fingerprint
    now = load_tokenizer(folder)
    assert now.fingerprint.startswith(before.fingerprint + "-bos")
    fix = "set bos = false and eos = '<|endoftext|>' under [data] in its config.toml"
    assert fix in trained_otherwise(before.fingerprint, now)
    assert "as they were" in trained_otherwise(now.fingerprint, before)
    assert trained_otherwise("bytes-1", now) == "name the tokenizer of its config.toml"


def test_a_token_beyond_every_vocabulary_is_refused(folder: Path) -> None:
    # The package would take sixteen gigabytes for the holes below it.
    table = json.loads((folder / "tokenizer.json").read_text())
    table["model"]["vocab"]["far"] = 4_000_000_000
    (folder / "tokenizer.json").write_text(json.dumps(table))
    with pytest.raises(DataError, match=r"tokenizer\.json has the token 4000000000, and tokens must be below"):
        load_tokenizer(folder)


def test_a_post_processor_that_names_a_missing_token_is_refused(folder: Path) -> None:
    processor = template("<s>", ids=ids_of(folder))
    begins(folder, processor | {"special_tokens": {}})
    with pytest.raises(DataError, match="puts '<s>' before a text and does not say which token it is"):
        load_tokenizer(folder)
    assert found(folder, False)[0] == ()  # the remedy


@pytest.mark.parametrize("kind", ["TemplateProcessing", "BertProcessing"])
def test_a_post_processor_of_a_token_beyond_the_vocabulary_is_refused(folder: Path, kind: str) -> None:
    other = {"type": "BertProcessing", "sep": ["</s>", 10**6], "cls": ["<s>", 10**6]}
    begins(folder, template("<s>", ids={"<s>": 10**6}) if kind == "TemplateProcessing" else other)
    with pytest.raises(DataError, match=r"puts the token 1000000 before a text, and its largest is \d+"):
        load_tokenizer(folder)


def test_a_pattern_that_goes_back_for_ever_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = json.loads((folder / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "^(a+)+b$"}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    whole["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    monkeypatch.setattr(tokenizer_module, "_LIMIT_S", 60.0)  # the package gives up before, on a busy machine, too
    tokenizer = load_tokenizer(folder)
    assert len(tokenizer.encode("ab" * 50))
    with pytest.raises(DataError, match=r"its pattern backtracks; name another|may backtrack, and to encode the text"):
        tokenizer.encode("a" * 60)
    assert capfd.readouterr().err == ""  # without the report of the package


def test_a_call_that_does_not_come_back_is_left_behind() -> None:
    with pytest.raises(DataError, match="to wait takes more than 0 s"):
        within(0.05, threading.Event().wait, "to wait")
    assert within(5.0, lambda: 3, "to count") == 3
    with pytest.raises(KeyError):
        within(5.0, lambda: {"b": 1}["a"], "to look")


def test_what_others_say_meanwhile_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    within(5.0, lambda: os.write(2, b"heard\n"), "to speak")
    assert capfd.readouterr().err == "heard\n"
