"""Korthikanti et al. 2205.05198, Table 4: a layer of a 22B model in five forms of recomputation and tensor messages."""

from dataclasses import replace

from bench.validation.rows import Row, Table, gpt, read_rows
from terrace.cluster.named_software import run_by, software_named
from terrace.cluster.presets import load_cluster
from terrace.model.block_operations import layer_operations
from terrace.model.blocks import block_specs
from terrace.plan.presets import preset
from terrace.program.instruction import Instruction, Op
from terrace.program.lowering import build
from terrace.simulate.activations import activations_of, recomputing
from terrace.simulate.cost import step_costs
from terrace.simulate.footprint import work_of

_LAYERS, _HIDDEN, _HEADS, _TENSOR, _MICRO_BATCH, _SEQUENCE, _VOCAB = 48, 6144, 64, 8, 4, 2048, 51200
_LAYER = 1  # block 0 is the embedding

_TEXT = """
Milliseconds of one layer of the 22B model, forward and backward, on eight tensor ranks of a node of A100 80 GB. Preset
`dgx-a100`. A form is a plan of this project (`recompute`, `sequence_parallel`), priced as `megatron-2022` runs it:
attention writes its scores, and dropout is recomputed with it. What a layer keeps
for a micro-batch is this project's: of attention with dropout Megatron-LM keeps masks, too.
"""


def table() -> Table:
    """Return the published forms beside the modelled ones."""
    rows = []
    for line in read_rows("korthikanti_table4.csv"):
        passes, kept_bytes = modelled(line)
        for name, seconds in passes.items():
            cells = (line["form"], name, f"{kept_bytes / 1e6:.0f} MB")
            rows.append(Row(cells=cells, published=float(line[f"{name}_ms"]), modelled=1e3 * seconds))
    return Table(
        title="Korthikanti, recomputation in a layer",
        text=_TEXT,
        heads=("form", "pass", "a layer keeps"),
        unit="ms",
        rows=rows,
        mean_limit=0.06,
        max_limit=0.09,
    )


def modelled(line: dict[str, str]) -> tuple[dict[str, float], int]:
    """Return the seconds of a form's passes, with messages, and the bytes that a layer keeps of a micro-batch."""
    cluster = run_by(load_cluster("dgx-a100").resized(1), software_named("megatron-2022"))
    model = gpt(_LAYERS, _HIDDEN, _HEADS, _SEQUENCE, _VOCAB)
    plan = replace(
        preset("ddp", cluster),
        compute="bf16",
        micro_batch=_MICRO_BATCH,
        mapping={"node": {"tensor": _TENSOR}},
        sequence_parallel=line["sequence_parallel"] == "true",
        recompute=(line["recompute"],) if line["recompute"] else (),
    )
    blocks = block_specs(model)
    work = work_of(cluster, plan, layer_operations(model), _SEQUENCE)
    program = build(cluster, plan, blocks, 1, _SEQUENCE)
    costs = step_costs(program, work)
    waits_s = [sum(costs.waits_inside(Instruction(op, _LAYER, 0)).values()) for op in (Op.FORWARD, Op.BACKWARD)]
    passes = {
        "forward": costs.forward_s[_LAYER] + waits_s[0],
        "backward": costs.backward_s[_LAYER] + costs.recompute_s(_LAYER) + waits_s[1],
    }
    kept = activations_of(recomputing(work, program.model.recomputed[_LAYER]), blocks[_LAYER], "cuda")
    return passes, kept.kept_bytes
