"""Qi et al. 2401.10241: profiled forward, input-gradient and weight-gradient passes of a pipeline stage."""

from dataclasses import replace

from bench.validation.rows import Row, Table, gpt, read_rows
from terrace.cluster.named_software import run_by, software_named
from terrace.cluster.presets import load_cluster
from terrace.model.blocks import block_specs
from terrace.simulate.layers import seconds_of
from terrace.simulate.work import Work

# The published sizes, 14.6 and 28.3 billion parameters with tied embeddings, need 25 to 33 thousand words. Their
# example has a SentencePiece tokenizer, which usually has 32,000.
_VOCAB = 32000

_TEXT = """
Milliseconds of one stage and micro-batch on A100 80 GB, no tensor axis: mean over the stages, embedding and head
included; all models of their table 6. Preset `dgx-a100`, and Megatron-LM's kernels as their source has them
(`megatron-2021` in `terrace/cluster/named_software.py`): dropout; attention that writes its scores, which the published
memory needs (30 GB of the 1.5B, 39 of the 6.2B under 1F1B); a bias of queries, keys and values in a kernel of its own;
a loss of one kernel an operation. A weight gradient is added to what is there inside the product.

The rows ran in fp16 (`--fp16` in the example of their repository), which is as fast as bf16 here. What the
published forwards take beyond the modelled ones is 30, 31, 22 and 28 ms of all stages of a pipeline together: as much
with 8 stages as with 32, with six sequences a micro-batch as with one. So it looks like a cost of one stage or two, and
not of layers or tokens. The first and the last stage fetch the micro-batch within the time of a forward (`get_batch` in
later versions of their `pretrain_gpt.py`; the others return at once), and the device is idle when a pass begins
(`Timer.start` waits for it). A fetch has no published price, so none is in the model; the other eight rows are within
6 %.
"""


def table() -> Table:
    """Return the published passes beside the modelled ones."""
    device = run_by(load_cluster("dgx-a100"), software_named("megatron-2021")).device
    device = replace(device, spread=0.0)  # the figures are means over devices
    rows = []
    for line in read_rows("zero_bubble.csv"):
        layers, sequence = int(line["layers"]), int(line["sequence"])
        specs = block_specs(gpt(layers, int(line["hidden"]), int(line["heads"]), sequence, _VOCAB))
        work = Work(
            layer=specs[1].operations,
            sequence=sequence,
            micro_batch=int(line["micro_batch"]),
            flash=False,
        )
        blocks = [seconds_of(device, work, block) for block in specs]
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
        mean_limit=0.05,
        max_limit=0.15,
    )
