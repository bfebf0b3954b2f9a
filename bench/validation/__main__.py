"""Write `docs/validation.md` and the rows that predictions take their bands from; with `--check`, exit 1 when an error
passes its limit. With `--held-out`, price the steps that the model was not built on, leave out each source in turn, and
print how many of its steps are within the band of the others.
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
    held_out,
    megatron,
    mixtures,
    nearest,
    nemo,
    passes,
    recomputation,
)
from bench.validation.rows import Table, markdown_table
from terrace.simulate import bands
from terrace.simulate.bands import Validated

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "validation.md"
NEAREST = ROOT / "terrace" / "simulate" / bands.FILE

_HEAD = """# The cost model against published figures

Written by `python -m bench.validation`; `tests/bench/test_validation.py` fails when an error passes its limit. The
constants are those of the presets in `terrace/cluster/presets/`, which come from data sheets, from published
measurements of single kernels and links, or are assumed: each file says which. **None was fitted to a table of this
page.** But terms of the model were added after rows of these tables had been looked at, one constant was revised (the
share of products on Hopper, from 0.76 to the 0.72 of another profile than it had been taken from,
[clusters.md](clusters.md#presets)), and the software of the rows was described for them: all rows of the table below
are *seen*, and say how well the model explains them. How far it misses on [steps that it was not built
on](#steps-that-the-model-was-not-built-on) is what to expect of the next machine. An error is the modelled figure over
the published one, minus one; the mean and the largest are of its absolute value, the bias keeps the sign.

"""


def tables(every: int = 1) -> list[Table]:
    """Return every table of the page; of long ones each `every`-th row, if not all without FSMoE's 1,458 layers."""
    return [
        megatron.table(every),
        *fsdp.tables(every),
        *nemo.tables(every),
        passes.table(),
        recomputation.table(),
        bandwidth.table("perlmutter", mean_limit=0.03, max_limit=0.05),
        bandwidth.table("frontier", mean_limit=0.12, max_limit=0.42),
        balance.table(),
        fsmoe.table(),
        *([fsmoe_layers.table()] if every == 1 else []),
        mixtures.table(),
        co2.table(),
    ]


def page(every: Sequence[Table], unseen: Sequence[Validated]) -> str:
    """Return the text of `docs/validation.md`, of the tables `every` and of the rows that are held out."""
    heads = ("source, all seen", "rows", "mean error", "largest", "bias", "limits")
    summary = markdown_table(heads, [table.summary() for table in every])
    of_bands = nearest.section([*nearest.nearest_rows(every), *unseen])
    return _HEAD + "\n".join([summary, of_bands, held_out.section(unseen), *(t.markdown() for t in every)])


def main() -> int:
    """Write page and rows, and print the page's summary; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.validation", description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 when an error passes its limit")
    parser.add_argument("--held-out", action="store_true", help="print how bands hold for sources that are left out")
    options = parser.parse_args()
    unseen = held_out.held_out_rows()
    if options.held_out:
        print(held_out.held_table(unseen))
        print("as the software that ran each step:\n")
        print(held_out.held_table(unseen, named=True))
        return 0
    every = tables()
    PAGE.write_text(page(every, unseen), encoding="utf-8")
    NEAREST.write_text(bands.csv_text([*nearest.nearest_rows(every), *unseen]), encoding="utf-8")
    missed = False
    for table in every:
        print(": ".join((table.summary()[0], ", ".join(table.summary()[1:]))))
        missed |= not table.is_within
    return int(options.check and missed)


if __name__ == "__main__":
    raise SystemExit(main())
