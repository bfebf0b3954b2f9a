"""Narayanan et al. 2104.04473, Table 1: ten GPT models from 1.7 to 1008 billion parameters on 32 to 3072 A100.

Every row is evaluated as `terrace plan` evaluates a candidate: the row's mapping, batch, micro-batch and schedule, all
states replicated over the data ranks, and full recomputation. Differences of Megatron-LM from this project are in
`bench.validation.software`: attention that writes its scores, dropout, norms on every tensor rank, sends that hold up
the stages they join, and gradients that a pipeline sums after its last backward. Tensor ranks fill a node from inside,
and pipeline stages are nodes.
"""

from bench.validation.rows import Row, Table, gpt, read_rows
from bench.validation.software import megatron
from terrace.cluster.presets import load_cluster
from terrace.plan.mesh import Mesh
from terrace.planner.stages import SERIAL
from terrace.planner.task import Candidate, Placement, Task
from terrace.simulate.layers import hardware_flops

_SEQUENCE, _VOCAB = 2048, 51200
_NODE_SIZE = 8

_TEXT = """
Seconds of a training step. The published time is the operation count of the paper's equation 3 over the published
aggregate PFLOP/s, which has two to four digits (the first rows are rounded by up to 1 %). Preset `dgx-a100`. Every row
is evaluated by the planner, as `terrace plan` evaluates its choices, with what Megatron-LM does in another way stated
(`bench/validation/software.py`): attention that writes its scores, dropout, norms on every tensor rank, a bias and a
loss in kernels of their own, stages that wait while they exchange a micro-batch, and a pipeline's gradients summed
after its last backward. What the model does not know: data loading, checks of the loss scale.
"""


def table() -> Table:
    """Return Table 1 with the steps that the planner predicts."""
    rows = []
    for line in read_rows("megatron_table1.csv"):
        task, candidate = setting(line)
        published_s = hardware_flops(task.model, _SEQUENCE, task.batch) / (float(line["petaflops"]) * 1e15)
        estimate = megatron(task).evaluate(candidate)
        cells = (line["model"], str(task.cluster.world_size), line["tensor"], line["pipeline"], line["data"])
        rows.append(Row(cells=cells, published=published_s, modelled=estimate.step_s))
    return Table(
        title="Megatron-LM, Table 1",
        text=_TEXT,
        heads=("model", "GPUs", "tensor", "pipeline", "data"),
        unit="s",
        rows=rows,
        mean_limit=0.03,
        max_limit=0.06,
    )


def setting(line: dict[str, str]) -> tuple[Task, Candidate]:
    """The task of a published row, and its plan."""
    tensor, pipeline, data = (int(line[axis]) for axis in ("tensor", "pipeline", "data"))
    chunks = int(line["chunks"])
    num_nodes = tensor * pipeline * data // _NODE_SIZE
    task = Task(
        model=gpt(int(line["layers"]), int(line["hidden"]), int(line["heads"]), _SEQUENCE, _VOCAB),
        cluster=load_cluster("dgx-a100").resized(num_nodes),
        batch=int(line["global_batch"]),
        sequence=_SEQUENCE,
        operations=(),  # whole layers are recomputed
    )
    interleaved = "interleaved" if chunks > 1 else "1f1b"
    candidate = Candidate(
        recompute=1,
        unit=1,
        schedule=interleaved if pipeline > 1 else SERIAL,
        chunks=chunks,
        micro_batch=int(line["micro_batch"]),
        placement=Placement(-1, -1, -1),
        mesh=Mesh.build(
            2, data=(_NODE_SIZE // tensor, num_nodes // pipeline), rows=(tensor, 1), pipeline=(1, pipeline)
        ),
    )
    return task, candidate
