"""Folders of data: what is read by default, what is said of the rest, and where Terrace differs from `datasets`."""

import json
from pathlib import Path

import pyarrow
import pytest

from terrace.base.errors import DataError
from terrace.data.chat_tokens import prepare_chat
from terrace.data.config import DataConfig
from terrace.data.corpus import read_documents
from terrace.data.files import find_data
from terrace.data.pair_tokens import prepare_pairs
from terrace.data.prepared import prepare_eval_sources, prepare_sources
from terrace.data.sources import EvalConfig
from terrace.data.tokenizer import ByteTokenizer
from terrace.data.tokens import prepare_tokens
from tests.support.layouts import LEAK, A, Layout, arrow_file, card, write

CODE = "def add(a, b):\n    return a + b\n"

# Where `datasets` reads otherwise, or not at all; docs/data.md says so.
DIFFERENT: dict[str, tuple[Layout, list[str]]] = {
    "a capital letter makes no other split": ({"Train.csv": A, "Test.csv": LEAK}, ["a", "b"]),
    "a text file is a document": ({"a.txt": "one\ntwo\n"}, ["one\ntwo\n"]),
    "a word of csv is a text": ({"a.csv": "text,id\nNA,1\nnull,2\n7,3\n"}, ["NA", "null", "7"]),
    "prose beside text": ({"a.txt": "one", "b.md": "two", "c.py": CODE}, ["one", "two", CODE]),
    "source is prose": (
        {
            "train.py": CODE,
            "test_add.py": CODE,
            "tests/x.py": CODE,
            "README.md": "# Add",
            "package.json": '{\n "a": 1\n}',
        },
        ["# Add", CODE, CODE, CODE],
    ),
    "source with data of its tests": ({"a.py": CODE, "b.py": CODE, "tests/x/rows.json": LEAK}, [CODE, CODE]),
    "scripts beside data": ({"load.py": CODE, "more.py": CODE, "train.csv": A, "test.csv": LEAK}, ["a", "b"]),
    "scripts beside lists": (
        {"train.py": CODE, "more.py": CODE, "alpaca.json": A, "settings.json": '{\n "a": 1\n}'},
        ["a", "b"],
    ),
    "scripts beside a train folder": ({"a.py": CODE, "b.py": CODE, "train/0.csv": A, "test/0.csv": LEAK}, ["a", "b"]),
    "prose names no test": ({"testing.md": "how to test", "intro.md": "hello"}, ["hello", "how to test"]),
    "prose with a train split": ({"train/a.md": "hello", "test/b.md": "LEAK", "c.md": "c"}, ["hello"]),
    "settings beside records": ({"a.jsonl": A, "b.jsonl": ["c"], "stats.json": '{\n "rows": 3\n}'}, ["a", "b", "c"]),
    "one split of another name": ({"data/latest-00000-of-00001.parquet": A}, ["a", "b"]),
    "a packed test": ({"train.jsonl": A, "test.jsonl.gz": "x"}, ["a", "b"]),
    "one file that two patterns mean": (
        {"a.jsonl": A, "README.md": card("- config_name: x\n  data_files: [a.jsonl, '*.jsonl']\n")},
        ["a", "b"],
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_where_folders_are_read_otherwise_than_by_datasets(tmp_path: Path, name: str) -> None:
    layout, texts = DIFFERENT[name]
    root = write(tmp_path / "folder", layout)
    assert list(read_documents(root)) == texts
    assert "train" in find_data(root).words or "latest" in find_data(root).words


BOTH = "- config_name: en\n  data_files: en.csv\n", "- config_name: de\n  data_files: de.csv\n"

REFUSED: list[tuple[Layout, str, str]] = [
    ({"test.jsonl": LEAK}, "", "has the split test, not 'train'.*; choose one with --data.split NAME"),
    ({"x/valid/a.csv": LEAK}, "", "has the split validation, not 'train'"),
    ({"data/test_sft-00000-of-00001.csv": LEAK}, "", "has the split test_sft, not 'train'"),
    ({"train.csv": A, "dev.csv": LEAK}, "test", "has the splits train, validation, not 'test'"),
    ({"data/train-en-00000-of-00001.csv": A}, "", "the split 'train-en', and names .* rename them to train_en-00000"),
    ({"a.jsonl": A}, "en:train", "names a configuration, and .* has no README.md with configurations"),
    ({"en.csv": A, "de.csv": A, "README.md": card(*BOTH)}, "", "configurations en, de, none of them is the default"),
    ({"en.csv": A, "de.csv": A, "README.md": card(*BOTH)}, "fr:", "configurations en, de, not 'fr'"),
    ({"en.csv": A, "README.md": card(*BOTH[:1])}, "test", "has the split train, not 'test'"),
    ({"README.md": card(*BOTH[:1])}, "", "names 'en.csv', which is missing or of an unknown suffix"),
    (
        {"README.md": card("- config_name: x\n  data_files: '*.csv'\n")},
        "",
        "no file of the split 'train' that is there",
    ),
    ({"README.md": card("- config_name: x\n  data_files: ../a.csv\n")}, "", "'../a.csv', which is not in the folder"),
    (
        {"README.md": card("- config_name: x\n  data_files: /etc/hosts\n")},
        "",
        "'/etc/hosts', which is not in the folder",
    ),
    ({"README.md": card("- config_name: x\n  data_files: hf://x/a.csv\n")}, "", "which is not in the folder"),
    ({"README.md": card("- config_name: x\n  data_dir: ../..\n")}, "", "which is not in the folder"),
    (
        {"a.txt": "x", "README.md": card("- config_name: x\n  data_files: a.txt\n  sample_by: line\n")},
        "",
        "'sample_by'",
    ),
    ({"README.md": card("- config_name: x\n  data_files: 3\n")}, "", "data_files of 'x' are paths"),
    (
        {"README.md": card("- config_name: x\n  data_files:\n  - split: a-b\n    path: a\n")},
        "",
        "has a split, named by",
    ),
    ({"README.md": card("- x\n")}, "", "each entry is a table with a config_name"),
    ({"README.md": card("  - [\n")}, "", "the YAML block of .* is damaged"),
    ({"train.jsonl.gz": "x", "test.jsonl": LEAK}, "", "train.jsonl.gz is packed; unpack it"),
    ({"a.json": '{\n "text": "a"\n}'}, "", "holds no records: a.json has neither"),
]


@pytest.mark.parametrize(("layout", "split", "message"), REFUSED)
def test_folders_that_do_not_say_what_to_read_are_refused(
    tmp_path: Path, layout: Layout, split: str, message: str
) -> None:
    root = write(tmp_path / "folder", layout)
    with pytest.raises(DataError, match=message) as error:
        find_data(root, split)
    assert "\n" not in str(error.value)


def test_a_configuration_is_chosen_by_the_split(tmp_path: Path) -> None:
    root = write(tmp_path, {"en.csv": A, "de.csv": ["c"], "README.md": card(*BOTH)})
    assert list(read_documents(root, split="de:")) == list(read_documents(root, split="de:train")) == ["c"]
    assert find_data(root, "en:").words.endswith(": en: train, 1 .csv file; left out: 1 .csv file, 1 .md file")


def test_a_file_of_two_splits_is_said(tmp_path: Path) -> None:
    root = write(tmp_path, {"dev-train.csv": A, "dev-test.csv": LEAK})
    assert list(read_documents(root)) == A
    assert find_data(root).words.endswith(
        ": train, 1 .csv file, 1 of them also of validation; left out: 1 file of validation, 1 file of test"
    )


def test_what_is_left_out_is_said_at_the_start(tmp_path: Path) -> None:
    layout: Layout = {
        "train/1.jsonl": A,
        "train/2.jsonl": "",
        "test/1.jsonl": LEAK,
        "test/2.jsonl": LEAK,
        "val.jsonl": LEAK,
    }
    layout |= {"train/x.csv": LEAK, "logo.png": "x", "notes": "x", ".hidden.jsonl": LEAK, ".git/a.jsonl": LEAK}
    root = write(tmp_path / "folder", layout)
    said: list[str] = []
    data = DataConfig(path=str(root), cache=str(tmp_path / "cache"))
    (source,) = prepare_sources(data, ByteTokenizer(), 2, said.append)
    assert source.tokens.num_documents == 2
    assert said == [
        f"{root}: train, 1 .jsonl file; left out: 2 files of test, 1 empty file, 1 file without a suffix, 1 .csv file, "
        "1 .jsonl file, 1 .png file, 2 hidden files"
    ]


def selection(folder: Path, texts: list[str], rows: list[int], column: str = "text") -> Path:
    """A folder as `save_to_disk` of `datasets` 1.x wrote it after a filter: two files, and the rows that are kept."""
    folder.mkdir(parents=True)
    for name, part in (("a.arrow", texts[:2]), ("b.arrow", texts[2:])):
        arrow_file(folder / name, pyarrow.table({column: part}))
    arrow_file(folder / "indices.arrow", pyarrow.table({"indices": pyarrow.array(rows, pyarrow.uint64())}))
    files = {"_data_files": ["a.arrow", "b.arrow"], "_indices_data_files": ["indices.arrow"]}
    state = {key: [{"filename": name} for name in names] for key, names in files.items()}
    (folder / "state.json").write_text(json.dumps({**state, "_split": "train"}))
    return folder


def test_a_saved_selection_is_the_rows_that_were_selected(tmp_path: Path) -> None:
    folder = selection(tmp_path / "saved", ["a", "filtered out", "b", "c"], [3, 0])
    assert list(read_documents(folder)) == ["c", "a"]
    made = prepare_tokens(folder, ByteTokenizer(), tmp_path / "cache")
    # Another selection of the same files is another corpus.
    arrow_file(folder / "indices.arrow", pyarrow.table({"indices": [0, 2]}))
    assert list(read_documents(folder)) == ["a", "b"]
    assert prepare_tokens(folder, ByteTokenizer(), tmp_path / "cache").digest != made.digest
    arrow_file(folder / "indices.arrow", pyarrow.table({"indices": [4]}))
    with pytest.raises(DataError, match="selects row 4, which is not there"):
        list(read_documents(folder))


def test_a_saved_selection_of_pairs(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    selection(folder, ["x", "y", "z"], [2, 0])
    table = pyarrow.table({key: [f"{key} {each}" for each in range(3)] for key in ("prompt", "chosen", "rejected")})
    arrow_file(folder / "a.arrow", table.slice(0, 2))
    arrow_file(folder / "b.arrow", table.slice(2))
    made = prepare_pairs(folder, ByteTokenizer(), "bytes", "", tmp_path / "cache")
    text = bytes(made.open().tolist()[: made.open_starts()[1] - 1]).decode()
    assert (made.num_documents, text) == (4, "prompt 2chosen 2")


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"_data_files": [{"filename": "a.arrow", "skip": 1, "take": 2}]}, "takes a range of rows of a file"),
        ({"_data_files": [{"filename": "../a.arrow"}]}, "it names a.arrow, which lies elsewhere"),
        ({"_data_files": [{"filename": "/a.arrow"}]}, "it names a.arrow, which lies elsewhere"),
        ({"_data_files": [{"filename": "a.arrow"}], "_indices_data_files": "x"}, "it has no list _indices_data_files"),
    ],
)
def test_saved_data_sets_that_are_not_read_are_refused(tmp_path: Path, state: object, message: str) -> None:
    arrow_file(tmp_path / "a.arrow", pyarrow.table({"text": A}))
    (tmp_path / "state.json").write_text(json.dumps(state))
    with pytest.raises(DataError, match=message):
        list(read_documents(tmp_path))


def test_conversations_are_evaluated_on_a_split_of_their_folder(tmp_path: Path) -> None:
    lines = {name: json.dumps({"prompt": "a", "completion": name}) + "\n" for name in ("train", "test")}
    root = write(tmp_path / "talks", {f"{name}.jsonl": line for name, line in lines.items()})
    of_test = EvalConfig(path=str(root), format="chat", split="test")
    data = DataConfig(path=str(root), format="chat", cache=str(tmp_path / "cache"), eval={"talks": of_test})
    (source,) = prepare_eval_sources(data, ByteTokenizer(), 8)
    assert bytes(source.tokens.open().tolist()[:-1]) == b"atest"


def test_conversations_come_from_every_form_of_a_split(tmp_path: Path) -> None:
    pairs = [{"prompt": "a", "completion": "b, c"}, {"prompt": "d", "completion": "e"}]
    files = {
        "l/train.jsonl": "".join(json.dumps(pair) + "\n" for pair in pairs),
        "j/train.json": json.dumps(pairs, indent=2),
        "c/train.csv": 'prompt,completion\na,"b, c"\nd,e\n',
        "l/test.jsonl": "no JSON",
    }
    write(tmp_path, files)
    digests = {prepare_chat(tmp_path / name, ByteTokenizer(), "bytes", "", tmp_path / "cache").digest for name in "ljc"}
    assert len(digests) == 1


def test_a_card_that_reads_csv_otherwise_makes_other_tokens(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    root = write(tmp_path / "folder", {"a.csv": "instruction|output|x;query;response\na|b|c;d;e\n"})

    def said(separator: str) -> str:
        (root / "README.md").write_text(card(f"- config_name: x\n  data_files: a.csv\n  sep: '{separator}'\n"))
        made = prepare_chat(root, ByteTokenizer(), "bytes", tmp_path / "chat.jinja", tmp_path / "cache")
        return bytes(made.open().tolist()).decode()

    assert [said("|"), said(";")] == ["user: a\nassistant: b\n", "user: d\nassistant: e\n"]


ALIASES = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60))


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("config_name: *a59", "each entry is a table with a config_name"),
        ("{config_name: x, data_files: a.csv, sep: *a59}", "data_dir or sep of 'x' is no text"),
        ("{config_name: x, data_files: *a59}", "data_files of 'x' are paths"),
    ],
)
def test_a_small_card_takes_no_long_time(tmp_path: Path, entry: str, message: str) -> None:
    root = write(tmp_path, {"a.csv": A, "README.md": f"---\n{ALIASES}configs:\n- {entry}\n---\n"})
    with pytest.raises(DataError, match=message) as error:
        find_data(root)
    assert len(str(error.value)) < 400
