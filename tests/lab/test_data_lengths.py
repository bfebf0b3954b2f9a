"""`terrace data lengths`: the lengths of a corpus in every form, the costs of policies, and refusals."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrace.cli.main import main
from terrace.lab.policies.costs import POLICIES
from terrace.lab.policies.tables import bins_of, lengths_svg
from tests.support.tiny_runs import one_line

TEXTS = ["a" * number for number in (3, 4, 9, 100, 100)]
# A byte is a token, and a document ends with one more.
ROWS = {(4, 7): 2, (8, 15): 1, (64, 127): 2}


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["data", "lengths", *words]) == 0
    return capsys.readouterr().out


def rows_of(text: str) -> dict[tuple[int, int], int]:
    """The bins of a printed histogram that hold documents."""
    found = re.findall(r"^ +([\d,]+) +([\d,]+) +([\d,]+) +[\d.]+%", text, re.M)
    numbers = [[int(number.replace(",", "")) for number in row] for row in found]
    return {(low, high): count for low, high, count in numbers if count}


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=50))
@settings(max_examples=30, deadline=None)
def test_every_document_is_in_the_bin_of_its_length(lengths: list[int]) -> None:
    bins = bins_of(lengths)
    for each in bins:
        inside = [length for length in lengths if each.shortest <= length <= each.longest]
        assert each.num_documents == len(inside)
        assert each.tokens == pytest.approx(sum(inside) / sum(lengths))
        assert each.attention == pytest.approx(sum(n * n for n in inside) / sum(n * n for n in lengths))
    assert sum(each.num_documents for each in bins) == len(lengths)
    assert ElementTree.fromstring(lengths_svg(bins, "a < b")).tag.endswith("svg")


@pytest.mark.parametrize("form", ["jsonl", "folder", "parquet"])
def test_a_corpus_in_any_form_has_the_lengths_of_its_documents(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"corpus.{form}"
    if form == "jsonl":
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    elif form == "folder":
        path.mkdir()
        for number, text in enumerate(TEXTS):
            (path / f"{number}.txt").write_text(text)
    else:
        arrow = pytest.importorskip("pyarrow", reason="needs the package pyarrow")
        tables = pytest.importorskip("pyarrow.parquet")
        tables.write_table(arrow.table({"story": TEXTS}), path)
    words = ["--data.column", "story"] if form == "parquet" else []
    text = said(
        capsys, *words, str(path), "--sequence", "64", "--cluster.tiers.node.size", "1", "--data.cache", "cache"
    )
    assert rows_of(text) == ROWS
    assert "5 documents, 221 tokens, the longest 101" in text
    assert "4 sequences x 64 tokens on cluster local, 2 system x 1 node x 2 package: 4 ranks" in text
    assert "attend together in fp32\n" in text
    assert "cut, since longer than a sequence: 2 documents" in text


def test_what_policies_cost_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "lengths.svg"
    cluster = ["--cluster", "dgx-h100", "--cluster.tiers.system.size", "2"]
    text = said(capsys, "--distribution", "magiattention", *cluster, "--sequence", "131072", "--picture", str(picture))
    rows = [re.split(r"  +", row.strip()) for row in text.splitlines()]
    over = {row[0]: float(row[4]) for row in rows if row[0] in POLICIES}
    assert 1.0 <= over["cost"] < 1.05 < min(over["tokens"], over["even ring"], over["tiered ring"])
    assert "attend together in bf16\n" in text
    assert f"wrote {picture}" in text
    assert "attention" in picture.read_text()


@pytest.mark.parametrize("name", ["bimodal", "one-huge"])
def test_other_distributions_are_shown(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{name}: 4,096 documents" in said(capsys, "--distribution", name)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "give either a PATH or --distribution NAME"),
        (["docs", "--distribution", "bimodal"], "give either a PATH or --distribution NAME"),
        (["--distribution", "bimodal", "--data.column", "x"], "--data has no effect on --distribution"),
        (["--distribution", "bimodal", "--train.steps", "3"], "only keys of the data and of the cluster can be set"),
        (["--distribution", "bimodal", "--batch", "0"], "--batch 0 must be at least 1"),
        (["nowhere.txt"], "nowhere.txt"),
        (["docs", "--data.path", "tests"], "--data.path has no effect with PATH"),
        (["--distribution", "bimodal", "--batch", str(10**9)], "of these documents, and up to 200,000"),
        (
            ["--distribution", "bimodal", "--cluster.tiers.system.size", "4096"],
            "resize a tier, for example --cluster.tiers.",
        ),
        (["--distribution", "bimodal", "--picture", "."], "--picture"),
        (["--distribution", "bimodal", "--picture", "lengths.png"], "name a file that ends in .svg"),
        (["--distribution", "gauss"], "invalid choice: 'gauss'"),
    ],
)
def test_what_cannot_be_is_one_line(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "lengths", *words]) == 2
    assert error in one_line(capsys.readouterr().err)
