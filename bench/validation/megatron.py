"""Narayanan et al. 2104.04473, Table 1: ten GPT models from 1.7 to 1008 billion parameters on 32 to 3072 A100.

A row is its plan, with its batch, micro-batch and schedule, all states replicated over the data ranks, and full
recomputation, as the software `megatron-2021` runs it (terrace.cluster.named_software). Tensor ranks fill a node from
inside, and pipeline stages are nodes.
"""

from dataclasses import replace

from bench.validation.rows import Row, Table, gpt, read_rows
from terrace.cluster.named_software import run_by, software_named
from terrace.cluster.presets import load_cluster
from terrace.model.blocks import hardware_flops
from terrace.model.config import ModelConfig
from terrace.plan.mesh import Mesh
from terrace.planner.evaluate import step_of
from terrace.planner.stages import SERIAL
from terrace.planner.task import Candidate, Placement, Task, plan_of
from terrace.simulate.step import Step, predict_step

_SEQUENCE, _VOCAB = 2048, 51200
_NODE_SIZE = 8

_TEXT = """
Seconds of a training step. The published time is the operation count of the paper's equation 3 over the published
aggregate PFLOP/s, which has two to four digits (the first rows are rounded by up to 1 %). Preset `dgx-a100`. Every row
is predicted as any step is, run by `megatron-2021`: attention that writes its scores, dropout, norms on every tensor
rank, a bias and a loss in kernels of their own, messages inside blocks that are waited for, stages that compute nothing
while they send a micro-batch, and gradients summed after the last backward. What the model does not know: data loading,
checks of the loss scale.
"""


def table(every: int = 1) -> Table:
    """Return Table 1 with the predicted steps, of each `every`-th row."""
    rows = []
    for line in read_rows("megatron_table1.csv", every):
        step, batch = step_of_row(line)
        model = _model(line)
        published_s = hardware_flops(model, _SEQUENCE, batch) / (float(line["petaflops"]) * 1e15)
        cells = (line["model"], str(step.cluster.world_size), line["tensor"], line["pipeline"], line["data"])
        rows.append(Row(cells=cells, published=published_s, modelled=predict_step(step).step_s))
    return Table(
        title="Megatron-LM, Table 1",
        text=_TEXT,
        heads=("model", "GPUs", "tensor", "pipeline", "data"),
        unit="s",
        rows=rows,
        mean_limit=0.04,
        max_limit=0.08,
    )


def _model(line: dict[str, str]) -> ModelConfig:
    return gpt(int(line["layers"]), int(line["hidden"]), int(line["heads"]), _SEQUENCE, _VOCAB)


def step_of_row(line: dict[str, str], software: str = "megatron-2021") -> tuple[Step, int]:
    """The step of a published row as a software runs it, and its batch in sequences."""
    tensor, pipeline, data = (int(line[axis]) for axis in ("tensor", "pipeline", "data"))
    chunks = int(line["chunks"])
    num_nodes = tensor * pipeline * data // _NODE_SIZE
    task = Task(
        model=_model(line),
        cluster=run_by(load_cluster("dgx-a100").resized(num_nodes), software_named(software)),
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
    return step_of(task, replace(plan_of(task, candidate), sequence_parallel=False)), task.batch
