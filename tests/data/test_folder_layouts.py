"""Folders of data as their makers meant them: what `datasets.load_dataset(folder)` reads of one is trained on."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from terrace.data.corpus import read_documents
from tests.support.layouts import LEAK, A, Layout, card, write

OTHER = ["other"]

ONE_SPLIT = "- config_name: default\n  data_files:\n"
PAIR = ONE_SPLIT + "  - split: train\n    path: {train}\n  - split: test\n    path: {test}\n"

LAYOUTS: dict[str, Layout] = {
    "names of files": {"train.jsonl": A, "test.jsonl": LEAK},
    "parquet": {"train.parquet": A, "validation.parquet": LEAK},
    "folders": {"train/0.parquet": A, "test/0.parquet": LEAK},
    "deep folders": {"x/y/train/0.jsonl": A, "x/y/dev/0.jsonl": LEAK},
    "folders with numbers": {"train-1/0.jsonl": A, "my_train/1.jsonl": OTHER, "val/0.jsonl": LEAK},
    "folders before files": {"train/test.jsonl": A, "test/train.jsonl": LEAK},
    "training": {"training.jsonl": A, "testing.jsonl": LEAK},
    "evaluation": {"my_train_part.csv": A, "my-eval-1.csv": LEAK},
    "numbers": {"train1.json": A, "train2.json": OTHER, "valid1.json": LEAK},
    "no border": {"retrain.jsonl": A, "latest.jsonl": OTHER, "contest.jsonl": ["c"]},
    "a keyword is not at the end": {"old.train": "x", "a.jsonl": A},
    "shards at the top": {"train-00000-of-00002.parquet": A, "train-00001-of-00002.parquet": OTHER},
    "shards": {"data/train-00000-of-00002.parquet": A, "data/train-00001-of-00002.parquet": OTHER},
    "shards of splits": {"data/train-00000-of-00001.parquet": A, "data/test-00000-of-00001.parquet": LEAK},
    "shards with a hash": {
        "data/train-00000-of-00001-a09b74b3ef9c3b56.parquet": A,
        "data/test-00000-of-00001-a09b74b3ef9c3b56.parquet": LEAK,
    },
    "shards of any split": {"data/train-00000-of-00001.json": A, "data/random-00000-of-00001.json": LEAK},
    "shards beside others": {"data/train-00000-of-00001.jsonl": A, "data/more.jsonl": LEAK, "more.jsonl": LEAK},
    "shards elsewhere": {"x/train-00000-of-00001.jsonl": A, "x/random-00000-of-00001.jsonl": LEAK},
    "no names": {"a.jsonl": A, "b.jsonl": OTHER},
    "kinds of JSON": {"a.jsonl": A, "b.json": OTHER, "c.ndjson": ["c"]},
    "lines in .json": {"c4.json": '{"text": "a"}\n{"text": "b"}\n'},
    "a list in .jsonl": {"a.jsonl": '[{"text": "a"}, {"text": "b"}]'},
    "a list of texts": {"a.json": '["a", "b"]'},
    "a mark of bytes": {"a.json": '\ufeff{"text": "a"}\n'},
    "csv": {"a.csv": "text,url\na,u\n\"two\nlines, and \"\"more\"\"\",v\n"},
    "csv with splits": {"train.csv": A, "test.csv": LEAK},
    "tsv": {"a.tsv": "text\turl\na,b\tu\n"},
    "arrow": {"x-train.arrow": A, "x-test.arrow": LEAK},
    "text": {"a.txt": A, "b.txt": OTHER},
    "text with splits": {"train.txt": A, "test.txt": LEAK, "valid.txt": LEAK},
    "the commonest form": {"a.csv": A, "b.csv": OTHER, "c.jsonl": LEAK},
    "as many of two forms": {"a.csv": LEAK, "b.jsonl": A},
    "parquet first": {"a.jsonl": LEAK, "b.parquet": A},
    "text beside records": {"a.jsonl": A, "LICENSE.txt": "all rights"},
    "hidden files": {"a.jsonl": A, ".b.jsonl": LEAK, ".git/c.jsonl": LEAK, "__MACOSX/d.jsonl": LEAK},
    "never data": {"a.jsonl": A, "README.md": "# About", "config.json": '{"a": 1}', "dataset_infos.json": "{}"},
    "unknown suffixes": {"a.jsonl": A, "logo.bin": "x", "notes": "x"},
    "a card": {"a.jsonl": A, "b.jsonl": LEAK, "README.md": card(PAIR.format(train="a.jsonl", test="b.jsonl"))},
    "a card with patterns": {
        "x/1.jsonl": A, "x/y/2.jsonl": OTHER, "z/1.jsonl": LEAK,
        "README.md": card(PAIR.format(train="x/**", test="'z/*.jsonl'")),
    },
    "a card against names": {
        "test.jsonl": A, "train.jsonl": LEAK, "README.md": card(PAIR.format(train="test.jsonl", test="train.jsonl")),
    },
    "a card of one split": {"a.csv": A, "b.csv": LEAK, "README.md": card(ONE_SPLIT.rstrip() + " a.csv\n")},
    "a card of lists": {
        "a.csv": A, "b.csv": OTHER, "c.csv": LEAK, "README.md": card(ONE_SPLIT + "  - a.csv\n  - b.csv\n"),
    },
    "a card of list of paths": {
        "a1.csv": A, "a2.csv": OTHER, "c.csv": LEAK,
        "README.md": card(ONE_SPLIT + "  - split: train\n    path:\n    - a1.csv\n    - 'a[2-3].csv'\n"),
    },
    "a card of folders": {
        "en/train.jsonl": A, "en/test.jsonl": LEAK, "de/train.jsonl": LEAK,
        "README.md": card(
            "- config_name: en\n  data_dir: en\n  default: true\n", "- config_name: de\n  data_dir: de\n"
        ),
    },
    "a card's separator": {
        "a.csv": "text|n\na,b|1\n", "README.md": card("- config_name: x\n  data_files: a.csv\n  sep: '|'\n"),
    },
    "a card by itself": {
        "train.jsonl": A, "test.jsonl": LEAK,
        ".huggingface.yaml": "configs:\n- config_name: x\n  data_files: train.jsonl\n",
    },
    "a card without configurations": {"train.jsonl": A, "test.jsonl": LEAK, "README.md": "---\nlicense: mit\n---\nx"},
    "a card that names one configuration": {
        "a.jsonl": A, "b.jsonl": LEAK,
        "README.md": card(
            "- config_name: b\n  data_files: b.jsonl\n", "- config_name: default\n  data_files: a.jsonl\n"
        ),
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The `datasets` library, off line and with a cache of its own."""
    patch = pytest.MonkeyPatch()
    for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
        patch.setenv(name, "1")
    patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf")))
    yield pytest.importorskip("datasets", reason="folders are not held against datasets, which is not installed")
    patch.undo()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_folder_is_read_as_datasets_reads_it(library: Any, tmp_path: Path, name: str) -> None:
    root = write(tmp_path / "folder", LAYOUTS[name])
    found = library.load_dataset(str(root), cache_dir=str(tmp_path / "cache"))
    for split, rows in found.items():
        # Documents of text are files here, and lines there.
        theirs = "\n".join(sorted(row["text"] for row in rows)).split("\n")
        ours = "\n".join(sorted(text.rstrip("\n") for text in read_documents(root, split=str(split)))).split("\n")
        assert sorted(ours) == sorted(theirs), split
    if "train" in found:
        assert list(read_documents(root)) == list(read_documents(root, split="train"))


def test_saved_data_sets_are_read_as_datasets_reads_them(library: Any, tmp_path: Path) -> None:
    rows = library.Dataset.from_dict({"text": [*A, *OTHER]})
    chosen = library.DatasetDict({"train": rows.select([2, 0]), "test": rows.filter(lambda row: row["text"] == "b")})
    chosen.save_to_disk(str(tmp_path / "both"))
    chosen["train"].save_to_disk(str(tmp_path / "one"))
    loaded = library.load_from_disk(str(tmp_path / "both"))
    assert list(read_documents(tmp_path / "both")) == list(loaded["train"]["text"])
    assert list(read_documents(tmp_path / "both", split="test")) == ["b"]
    assert list(read_documents(tmp_path / "one")) == ["other", "a"]
