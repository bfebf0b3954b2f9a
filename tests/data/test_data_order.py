"""What is held out is not trained on, and no text counts twice."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from terrace.base.errors import DataError
from terrace.data.batches import Batches, Source
from terrace.data.config import DataConfig
from terrace.data.prepared import compare_facts, data_facts, prepare_sources
from terrace.data.samples import IGNORED
from terrace.data.sources import SourceConfig
from terrace.data.tokenizer import ByteTokenizer
from terrace.data.tokens import prepare_tokens
from tests.support.indexed import indexed

NUM_DOCUMENTS, SEQUENCE = 50, 63


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """Documents of 600 tokens, each a byte of its own."""
    lines = [{"text": chr(32 + number) * 599} for number in range(NUM_DOCUMENTS)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokens = prepare_tokens(tmp_path / "a.jsonl", ByteTokenizer(), tmp_path / "cache")
    return Source(tokens=tokens, documents="whole", too_long="split")


def seen(inputs: npt.NDArray[np.int64], labels: npt.NDArray[np.int64]) -> dict[int, int]:
    """Document -> its tokens that are predicted."""
    given = inputs[labels != IGNORED]
    return {int(token): int((given == token).sum()) for token in np.unique(given)}


@pytest.mark.parametrize("holdout", [0.1, 1, 15])
def test_no_part_of_a_held_out_document_is_trained_on(source: Source, holdout: float) -> None:
    batches = Batches([source], SEQUENCE, 1, seed=0, holdout=holdout)
    trained = [batches.rows(step, np.arange(1)) for step in range(batches.num_samples)]
    trained_on = seen(*(np.concatenate([row[index] for row in trained]) for index in (0, 1)))
    held = seen(*batches.holdout(np.arange(batches.num_holdout_samples))[:2])
    assert held
    assert not held.keys() & trained_on.keys()
    # All of both, once: the last token of a document is only a label.
    assert held | trained_on == {32 + number: 599 for number in range(NUM_DOCUMENTS)}
    wanted = 599 * NUM_DOCUMENTS * holdout if holdout < 1 else holdout * SEQUENCE
    assert wanted <= sum(held.values()) < wanted + 599
    assert batches.num_holdout_samples >= (holdout if holdout >= 1 else 1)
    (use,) = batches.uses(1)
    assert (use.num_samples, use.num_holdout_samples) == (batches.num_samples, batches.num_holdout_samples)


def test_a_holdout_of_all_documents_is_refused(source: Source) -> None:
    with pytest.raises(DataError, match=r"holdout = 0\.99 leaves nothing to train on: .* has 50 documents"):
        Batches([source], SEQUENCE, 1, seed=0, holdout=0.99)


def test_without_a_holdout_the_order_is_that_of_earlier_versions(source: Source) -> None:
    assert "held" not in data_facts([source], 0.0)
    facts = data_facts([source], 0.1)
    assert compare_facts(facts, [source], 0.1) == {}
    earlier = {key: value for key, value in facts.items() if key != "held"}
    assert compare_facts(earlier, [source], 0.1) == {"what is held out": ("sequences", "whole documents")}
    whole = replace(source, too_long="cut")
    assert compare_facts(data_facts([whole], 0.1), [whole], 0.1) == {}
    assert "held" not in data_facts([whole], 0.1)


def refused(tmp_path: Path, *paths: Path) -> str:
    mixture = tuple(SourceConfig(path=str(path), name=path.name) for path in paths)
    data = DataConfig(mixture=mixture, cache=str(tmp_path / "cache"))
    with pytest.raises(DataError) as error:
        prepare_sources(data, ByteTokenizer(), 4)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_file_twice_in_a_mixture_is_refused(tmp_path: Path) -> None:
    web, other = tmp_path / "web", tmp_path / "other.txt"
    web.mkdir()
    for number in range(2):
        (web / f"{number}.txt").write_text(f"the text of file {number}")
    other.write_text("another text")
    link, hard, copy = tmp_path / "link.txt", tmp_path / "hard.txt", tmp_path / "copy.txt"
    link.symlink_to(web / "1.txt")
    os.link(other, hard)
    shutil.copyfile(other, copy)
    (tmp_path / "links").symlink_to(web)
    said = f"{web / '1.txt'} and {link} are one file, which would count twice; leave one out"
    assert refused(tmp_path, web, other, link) == f"web and link.txt of data.mixture: {said}"
    for twice in ((other, hard), (web, tmp_path / "links"), (web, web / "0.txt")):
        assert "are one file, which would count twice" in refused(tmp_path, *twice)
    assert "other.txt and copy.txt hold the same tokens, which would count twice" in refused(tmp_path, other, copy)
    prefix = indexed(tmp_path / "ids", [[1, 2, 3, 4, 5, 6]], [0, 1])
    assert "are one file" in refused(tmp_path, prefix.with_suffix(".bin"), prefix.with_suffix(".idx"))
    prefix.with_suffix(".bin").unlink()
    assert "cannot read data" in refused(tmp_path, prefix, other)


def test_a_file_twice_in_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "a.txt").write_text("the text of a file")
    (tmp_path / "web" / "b.txt").symlink_to("a.txt")
    data = DataConfig(path=str(tmp_path / "web"), cache=str(tmp_path / "cache"))
    with pytest.raises(DataError, match=r"web/a\.txt and .*web/b\.txt are one file, which would count twice"):
        prepare_sources(data, ByteTokenizer(), 4)


def test_columns_of_a_table_are_texts_of_their_own(tmp_path: Path) -> None:
    lines = [{"en": f"text {number}", "de": f"Text {number}!"} for number in range(3)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "b.jsonl").symlink_to("a.jsonl")
    named = (("a.jsonl", "en"), ("b.jsonl", "de"))
    mixture = tuple(SourceConfig(path=str(tmp_path / name), column=column) for name, column in named)
    sources = prepare_sources(DataConfig(mixture=mixture, cache=str(tmp_path / "cache")), ByteTokenizer(), 4)
    assert len({source.tokens.digest for source in sources}) == 2
