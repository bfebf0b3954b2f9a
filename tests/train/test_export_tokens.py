"""Which token ends a turn, and which fills a row: one answer for sampling, feedback, and what `transformers` loads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from terrace.data.ends import ends_of, turn_end
from terrace.data.tokenizer import FileTokenizer, load_tokenizer
from terrace.data.tokenizer_files import agreeing
from terrace.model.blocks import block_specs
from terrace.model.config import parse_model
from terrace.model.decoder import build_blocks
from terrace.model.hf.written import write_pretrained
from terrace.model.init import initialise
from terrace.train import sample
from terrace.train.export import token_facts
from terrace.train.trained import load_trained
from tests.support.chats import CHATML, FORGETFUL, STRICT, TAGGED, write_tokenizer
from tests.support.tiny_runs import MODEL

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

WIDE = MODEL | {"vocab_size": 512}
WITH_SYSTEM = "{% if messages[0].role != 'system' %}{{ raise_exception('a system') }}{% endif %}" + CHATML
SCORED = WIDE | {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}


def put(folder: Path, name: str, **values: Any) -> None:
    path = folder / name
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({key: value for key, value in {**old, **values}.items() if value is not None}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A base model's tokenizer: <|endoftext|> ends a text, <|im_end|> the turns of its template."""
    made = write_tokenizer(tmp_path / "tokenizer")
    put(made, "tokenizer_config.json", eos_token="<|endoftext|>")
    return made


def ids_of(folder: Path) -> dict[str, int]:
    return {each["content"]: each["id"] for each in json.loads((folder / "tokenizer.json").read_text())["added_tokens"]}


def write_export(source: Path, folder: Path, table: dict[str, Any]) -> Path:
    """A model of random values as an export writes it."""
    config = parse_model(table)
    blocks = build_blocks(config)
    initialise(blocks, config, seed=0, dtype=torch.float32)
    values = dict(zip([spec.name for spec in block_specs(config)], blocks, strict=True))
    facts = token_facts(source, config, load_tokenizer(source).text_tokens.end)
    write_pretrained(
        folder, config, lambda block, name: values[block].get_parameter(name).detach(), "fp32", source=source,
        carried=facts.files, ids=facts.ids,
    )  # fmt: skip
    return folder


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHATML, "<|im_end|>"),
        (TAGGED, "<|im_end|>"),
        (FORGETFUL, "<|im_end|>"),
        (STRICT, "<|endoftext|>"),  # the eos_token, named by the template
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", None),
        ("{{ raise_exception('no') }}", None),
        (WITH_SYSTEM, "<|im_end|>"),
    ],
)
def test_a_turn_ends_with_the_token_that_the_template_writes(folder: Path, template: str, end: str | None) -> None:
    (folder / "chat_template.jinja").write_text(template)
    assert turn_end(load_tokenizer(folder), folder) == (None if end is None else ids_of(folder)[end])


def test_one_answer_for_everyone(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, tokenizer = ids_of(folder), load_tokenizer(folder)
    wanted = tuple(sorted((ids["<|endoftext|>"], ids["<|im_end|>"])))
    assert ends_of(tokenizer, folder) == wanted
    assert ends_of(tokenizer, folder / "tokenizer.json", folder=folder) == wanted
    put(folder, "generation_config.json", eos_token_id=[ids["<s>"], True])
    assert ends_of(tokenizer, folder, folder=folder) == tuple(sorted((*wanted, ids["<s>"])))
    (folder / "generation_config.json").unlink()
    # Sampling from a folder, as an export writes it.
    out = write_export(folder, tmp_path / "out", WIDE)
    assert load_trained(out).stops == wanted
    # The closing sample of a run.
    seen = dict[str, Any]()
    monkeypatch.setattr(sample, "sample_prompt", lambda *_: "a")
    monkeypatch.setattr(sample, "generate", lambda *_, **given: seen.update(given) or "")
    (tmp_path / "run").mkdir()
    sample.closing_sample(_Job(tmp_path / "run", str(folder)), tmp_path)  # type: ignore[arg-type]
    assert seen["stops"] == wanted


class _Job:
    """What a closing sample asks of a job."""

    def __init__(self, folder: Path, tokenizer: str) -> None:
        self.folder, self.sources, self.run, self.data, self.train = folder, (), self, self, self
        self.tokenizer, self.bos, self.eos, self.chat_template, self.sequence = tokenizer, "auto", "auto", "", 8


def test_an_export_ends_where_the_run_s_turns_end(folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ids = ids_of(folder)
    out = write_export(folder, tmp_path / "out", WIDE)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert theirs.generation_config.eos_token_id == [ids["<|endoftext|>"], ids["<|im_end|>"]]
    # It ends at a token of either kind: logits prefer <|im_end|>.
    theirs.lm_head = torch.nn.Linear(16, 512)
    with torch.no_grad():
        theirs.lm_head.weight.zero_()
        theirs.lm_head.bias.copy_(torch.nn.functional.one_hot(torch.tensor(ids["<|im_end|>"]), 512))
    assert theirs.generate(torch.tensor([[5, 6]]), max_new_tokens=4, do_sample=False).shape == (1, 3)
    # What the folder began with stays, and is read again as the same end of a text.
    put(folder, "generation_config.json", temperature=0.5, eos_token_id=ids["<|endoftext|>"])
    out = write_export(folder, tmp_path / "other", WIDE)
    table = json.loads((out / "generation_config.json").read_text())
    assert table == {"temperature": 0.5, "eos_token_id": [ids["<|endoftext|>"], ids["<|im_end|>"]]}
    assert load_tokenizer(out).text_tokens.end == ids["<|endoftext|>"]


def test_an_export_of_a_model_whose_turns_end_as_texts_is_as_it_was(tmp_path: Path) -> None:
    source = write_tokenizer(tmp_path / "tokenizer")
    out = write_export(source, tmp_path / "out", WIDE)
    assert not (out / "generation_config.json").exists()
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("declared", [None, "<|endoftext|>", "<s>", "a map"])
def test_transformers_scores_rows_together_as_alone(folder: Path, tmp_path: Path, declared: str | None) -> None:
    """A pad token that ended texts would hide their last token, whose score is the reward."""
    transformers = pytest.importorskip("transformers")
    put(folder, "tokenizer_config.json", pad_token=None if declared == "a map" else declared, bos_token=None)
    if declared == "a map":
        put(folder, "special_tokens_map.json", pad_token="<|endoftext|>", eos_token="<|endoftext|>")
    check_scores(transformers, write_export(folder, tmp_path / "out", SCORED), ["sky", "a longer text"])
    pad = json.loads((tmp_path / "out" / "config.json").read_text())["pad_token_id"]
    assert pad not in ends_of(load_tokenizer(folder), folder)
    if declared == "<s>":
        assert pad == ids_of(folder)["<s>"]


def test_a_tokenizer_whose_one_special_token_ends_texts_gets_another(folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    whole = json.loads((folder / "tokenizer.json").read_text())
    whole["added_tokens"] = [each for each in whole["added_tokens"] if each["content"] == "<|endoftext|>"]
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    put(folder, "tokenizer_config.json", bos_token=None, chat_template=None)
    out = write_export(folder, tmp_path / "out", SCORED)
    size = load_tokenizer(folder).vocab_size
    assert json.loads((out / "config.json").read_text())["pad_token_id"] == size
    check_scores(transformers, out, ["sky", "a longer text"])
    # Without a row for it there is none: rows are then scored alone, never wrongly.
    full = write_export(folder, tmp_path / "full", SCORED | {"vocab_size": size})
    assert json.loads((full / "config.json").read_text())["pad_token_id"] is None


def test_a_reward_model_on_bytes_is_filled_as_in_its_run() -> None:
    assert token_facts(None, parse_model(SCORED), 256).ids == {"pad_token_id": 0}
    assert token_facts(None, parse_model(WIDE), 256).ids == {}


def check_scores(transformers: Any, folder: Path, texts: list[str]) -> None:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ended = [text + tokenizer.eos_token for text in texts]
    with torch.no_grad():
        together = model(**tokenizer(ended, padding=True, return_tensors="pt")).logits[:, 0]
        alone = [model(**tokenizer([text], return_tensors="pt")).logits[0, 0] for text in ended]
        states = [model.model(**tokenizer([text], return_tensors="pt"))[0][0, -1] for text in ended]
    assert torch.allclose(together, torch.stack(alone), rtol=0, atol=1e-5)
    # The score of the last token, which ends the text.
    assert torch.allclose(together, torch.stack([model.score(state)[0] for state in states]), rtol=0, atol=1e-5)


CLASSES = ["PreTrainedTokenizerFast", "LlamaTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer", "GPTNeoXTokenizerFast"]


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("said", ["by the folder", "by the run", "by tokenizer.json", "by nobody"])
def test_an_export_puts_before_a_text_what_the_run_put(folder: Path, tmp_path: Path, kind: str, said: str) -> None:
    """Where tokenizer.json has no template, `transformers` puts nothing; some of its classes do not even read that."""
    transformers = pytest.importorskip("transformers")
    if said == "by tokenizer.json":
        text, begin = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<s>", "type_id": 0}}
        known = {"<s>": {"id": "<s>", "ids": [ids_of(folder)["<s>"]], "tokens": ["<s>"]}}
        whole = {"single": [begin, text], "pair": [begin, text], "special_tokens": known}
        put(folder, "tokenizer.json", post_processor={"type": "TemplateProcessing", **whole})
    put(folder, "tokenizer_config.json", tokenizer_class=kind, add_bos_token=True if said == "by the folder" else None)
    of_run = load_tokenizer(folder, True if said == "by the run" else "auto")
    assert isinstance(of_run, FileTokenizer)
    assert len(of_run.text_tokens.begin) == (said != "by nobody")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    (tmp_path / "out").mkdir()
    for name, content in {**files, **agreeing(files, of_run)}.items():
        (tmp_path / "out" / name).write_bytes(content)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs("a tier")["input_ids"] == of_run.encode_prompt("a tier").tolist()
    again = load_tokenizer(tmp_path / "out")
    assert isinstance(again, FileTokenizer)
    assert (again.text_tokens.begin, again.text_tokens.end) == (of_run.text_tokens.begin, of_run.text_tokens.end)
    assert not agreeing({**files, **agreeing(files, of_run)}, of_run)
