"""Write `docs/validation.md` and the rows that predictions take their bands from; with `--check`, exit 1 when an error
passes its limit.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.validation import (
    balance,
    bandwidth,
    co2,
    fsdp,
    fsmoe,
    fsmoe_layers,
    megatron,
    mixtures,
    nearest,
    nemo,
    passes,
    recomputation,
)
from bench.validation.rows import Table, markdown_table
from terrace.simulate import bands

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "validation.md"
NEAREST = ROOT / "terrace" / "simulate" / bands.FILE

_HEAD = """# The cost model against published figures

Written by `python -m bench.validation`; `tests/bench/test_validation.py` fails when an error passes its limit. The
constants are those of the presets in `terrace/cluster/presets/`, which come from data sheets, from published
measurements of single kernels and links, or are assumed: each file says which. **None was fitted to a table of this
page.** One was revised after rows of this page had been seen: the share of products on Hopper, from 0.76 to the 0.72 of
another profile than it had been taken from ([clusters.md](clusters.md#presets)); for that share NVIDIA's rows on H100
are no independent test. An error is the modelled figure over the published one, minus one; the mean and the largest are
of its absolute value, the bias keeps the sign.

"""


def tables() -> list[Table]:
    """Return every table of the page."""
    return [
        megatron.table(),
        *fsdp.tables(),
        *nemo.tables(),
        passes.table(),
        recomputation.table(),
        bandwidth.table("perlmutter", mean_limit=0.03, max_limit=0.05),
        bandwidth.table("frontier", mean_limit=0.12, max_limit=0.42),
        balance.table(),
        fsmoe.table(),
        fsmoe_layers.table(),
        mixtures.table(),
        co2.table(),
    ]


def page(every: Sequence[Table]) -> str:
    """Return the text of `docs/validation.md`, of the tables `every`."""
    heads = ("source", "rows", "mean error", "largest", "bias", "limits")
    bands_section = nearest.section(nearest.nearest_rows(every))
    return _HEAD + "\n".join(
        [markdown_table(heads, [table.summary() for table in every]), bands_section, *(t.markdown() for t in every)]
    )


def main() -> int:
    """Write page and rows, and print the page's summary; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.validation", description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 when an error passes its limit")
    options = parser.parse_args()
    every = tables()
    PAGE.write_text(page(every), encoding="utf-8")
    NEAREST.write_text(bands.csv_text(nearest.nearest_rows(every)), encoding="utf-8")
    missed = False
    for table in every:
        print(": ".join((table.summary()[0], ", ".join(table.summary()[1:]))))
        missed |= table.mean_error > table.mean_limit or table.max_error > table.max_limit
    return int(options.check and missed)


if __name__ == "__main__":
    raise SystemExit(main())
