"""A row is a published figure beside the modelled one; a table has a source, its errors and their limits."""

import csv
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from terrace.model.config import ModelConfig, parse_model

_DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published figure; `cells` says which, in the order of the table's heads. `limit` is on its absolute error."""

    cells: tuple[str, ...]
    published: float
    modelled: float
    limit: float = math.inf

    @property
    def error(self) -> float:
        """Modelled over published, minus one."""
        return self.modelled / self.published - 1


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of one source. A limit is on the absolute error; it guards `mean_error` and `max_error`, or one row."""

    title: str
    text: str
    heads: tuple[str, ...]
    unit: str
    rows: Sequence[Row]
    mean_limit: float
    max_limit: float

    @property
    def mean_error(self) -> float:
        """Mean of the absolute errors."""
        return statistics.fmean(abs(row.error) for row in self.rows)

    @property
    def max_error(self) -> float:
        """Largest absolute error."""
        return max(abs(row.error) for row in self.rows)

    @property
    def bias(self) -> float:
        """Mean of the signed errors: below zero the model is too low."""
        return statistics.fmean(row.error for row in self.rows)

    @property
    def is_within(self) -> bool:
        """Whether the errors are within their limits."""
        each = all(abs(row.error) <= row.limit for row in self.rows)
        return each and self.mean_error <= self.mean_limit and self.max_error <= self.max_limit

    def summary(self) -> tuple[str, ...]:
        """Return the cells of this table's line in the summary."""
        return (
            self.title,
            str(len(self.rows)),
            f"{self.mean_error:.1%}",
            f"{self.max_error:.1%}",
            f"{self.bias:+.1%}",
            f"{self.mean_limit:.1%}, {self.max_limit:.1%}",
        )

    def markdown(self) -> str:
        """Return the section of this table."""
        heads = (*self.heads, f"published, {self.unit}", f"modelled, {self.unit}", "error")
        return f"## {self.title}\n\n{self.text.strip()}\n\n{markdown_table(heads, self.body())}"

    def body(self) -> list[tuple[str, ...]]:
        """Return the cells of the rows in the section."""
        return [(*row.cells, f"{row.published:.4g}", f"{row.modelled:.4g}", f"{row.error:+.1%}") for row in self.rows]


def markdown_table(heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown, with a newline at its end."""
    lines = [heads, ["---"] * len(heads), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def read_rows(name: str, every: int = 1) -> list[dict[str, str]]:
    """Return each `every`-th row of a file in `data/`, without the lines that tell its source."""
    with open(_DATA / name, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))[::every]


def gpt(num_layers: int, hidden: int, heads: int, sequence: int, vocab: int) -> ModelConfig:
    """Return a GPT with learned positions, biases and tied embeddings."""
    return parse_model(
        {
            "model_type": "gpt2",
            "vocab_size": vocab,
            "n_embd": hidden,
            "n_layer": num_layers,
            "n_head": heads,
            "n_positions": sequence,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        }
    )
