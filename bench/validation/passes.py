"""Qi et al. 2401.10241: profiled forward, input-gradient and weight-gradient passes of a pipeline stage."""

from dataclasses import replace

from bench.validation.rows import Row, Table, gpt, read_rows
from bench.validation.software import with_dropout
from terrace.cluster.presets import load_cluster
from terrace.model.config import block_specs
from terrace.simulate.layers import seconds_of
from terrace.simulate.work import Work

_VOCAB = 50304  # GPT-2's, padded to a multiple of 128: assumed

_TEXT = """
Milliseconds of one stage and micro-batch on A100 80 GB, no tensor axis: mean over eight stages, embedding and head
included. Preset `dgx-a100`; unfused attention and dropout are assumed, as the defaults of that software, which adds
a weight gradient to what is there inside the product. The published forward is slower than its own backward passes
let expect; what of it the model lacks is not known.
"""


def table() -> Table:
    """Return the published passes beside the modelled ones."""
    device = replace(load_cluster("dgx-a100").device, spread=0.0)  # the figures are means over devices
    rows = []
    for line in read_rows("zero_bubble.csv"):
        layers, sequence = int(line["layers"]), int(line["sequence"])
        work = Work(
            model=gpt(layers, int(line["hidden"]), int(line["heads"]), sequence, _VOCAB),
            sequence=sequence,
            micro_batch=int(line["micro_batch"]),
            flash=False,
        )
        blocks = [seconds_of(device, work, block) for block in block_specs(work.model)]
        blocks[1:-1] = [with_dropout(layer, device, work) for layer in blocks[1:-1]]
        passes = {
            "forward": sum(block.forward_s for block in blocks),
            "input": sum(block.input_s for block in blocks),
            "weight": sum(block.weight_s for block in blocks),
        }
        rows += [
            Row(
                cells=(line["model"], name),
                published=float(line[f"{name}_ms"]),
                modelled=1e3 * seconds / int(line["stages"]),
            )
            for name, seconds in passes.items()
        ]
    return Table(
        title="Zero bubble, passes of a stage",
        text=_TEXT,
        heads=("model", "pass"),
        unit="ms",
        rows=rows,
        mean_limit=0.08,
        max_limit=0.18,
    )
