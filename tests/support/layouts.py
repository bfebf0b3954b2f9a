"""Layouts of folders of data, written from tables."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

A, LEAK = ["a", "b"], ["LEAK"]

Layout = dict[str, Any]  # name -> text of the file; a list of texts is written in the form of the suffix


def write(root: Path, layout: Layout) -> Path:
    for name, given in layout.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(given, list):
            _write_texts(path, given)
        else:
            path.write_text(given)
    return root


def _write_texts(path: Path, texts: list[str]) -> None:
    match path.suffix:
        case ".jsonl" | ".ndjson":
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        case ".json":
            path.write_text(json.dumps([{"text": text} for text in texts], indent=1))
        case ".csv" | ".tsv":
            between = "," if path.suffix == ".csv" else "\t"
            path.write_text(
                "".join(f"{text}{between}{id}\n" for text, id in (("text", "id"), *((t, 1) for t in texts)))
            )
        case ".parquet":
            pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
        case ".arrow":
            arrow_file(path, pyarrow.table({"text": texts}))
        case _:
            path.write_text("".join(f"{text}\n" for text in texts))


def arrow_file(path: Path, table: pyarrow.Table) -> None:
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)


def card(*configs: str) -> str:
    return "---\nlicense: mit\nconfigs:\n" + "".join(configs) + "---\n# A data set\nmade of texts\n"
