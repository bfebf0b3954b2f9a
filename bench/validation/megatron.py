"""Narayanan et al. 2104.04473, Table 1: ten GPT models from 1.7 to 1008 billion parameters on 32 to 3072 A100.

Unfused attention, dropout, full recomputation, no sequence parallelism; tensor ranks fill a node from inside.
With v chunks a stage, M micro-batches and hops that nothing hides (a send of each rank's slice, then a gather inside
the node; activation and gradient), an interleaved 1F1B step of p stages takes

    M (slowest stage + v hop) + (p - 1) (mean stage / v + hop) + gradients + optimizer

with the embedding on the first stage and the head on the last. Rows without a pipeline hide the gradients' all-reduce
behind the last backward, but for the tied embedding, which is complete at its very end; the others hide nothing.
"""

from dataclasses import dataclass

from bench.validation.rows import Row, Table, gpt, read_rows
from terrace.cluster import Cluster, load_cluster
from terrace.model.config import block_specs
from terrace.simulate.layers import block_seconds, hardware_flops, optimizer_s
from terrace.simulate.links import all_gather_s, all_reduce_s, overlapped_s, send_s, tensor_messages
from terrace.simulate.work import Work

_SEQUENCE, _VOCAB = 2048, 51200
_NODE, _SYSTEM = 0, 1
_NODE_SIZE = 8
_NIC_PENALTY = 0.02  # of compute while an adapter works: Calculon's a100_80g.json (Isaev et al., SC 2023)
_ITEM_BYTES = 2

_TEXT = """
Seconds of a training step. The published time is the operation count of the paper's equation 3 over the published
aggregate PFLOP/s, which has two to four digits (the first rows are rounded by up to 1 %). Preset `dgx-a100`.
Interleaved 1F1B in closed form; what the model does not know: data loading, checks of the loss scale, stragglers.
"""


@dataclass(frozen=True, kw_only=True)
class _Setting:
    """One row of the published table."""

    work: Work
    pipeline: int
    data: int
    chunks: int
    num_micros: int
    global_batch: int

    @property
    def num_devices(self) -> int:
        return self.work.tensor * self.pipeline * self.data


def table() -> Table:
    """Return Table 1 with modelled steps."""
    rows = []
    for line in read_rows("megatron_table1.csv"):
        setting = _setting(line)
        published_s = hardware_flops(setting.work, setting.global_batch) / (float(line["petaflops"]) * 1e15)
        cells = (line["model"], str(setting.num_devices), line["tensor"], line["pipeline"], line["data"])
        rows.append(Row(cells=cells, published=published_s, modelled=step_s(setting)))
    return Table(
        title="Megatron-LM, Table 1",
        text=_TEXT,
        heads=("model", "GPUs", "tensor", "pipeline", "data"),
        unit="s",
        rows=rows,
        mean_limit=0.04,
        max_limit=0.07,
    )


def step_s(setting: _Setting) -> float:
    """Return the modelled seconds of a step."""
    work, pipeline, chunks = setting.work, setting.pipeline, setting.chunks
    cluster = load_cluster("dgx-a100").resized(setting.num_devices // _NODE_SIZE)
    layer_s, embedding_s, head_s, layer_backward_s = _pass_seconds(cluster, setting)
    stages = [work.model.num_layers / pipeline * layer_s] * pipeline
    stages[0] += embedding_s
    stages[-1] += head_s
    hop_s = 0.0
    if pipeline > 1:
        boundary = work.tokens * work.model.hidden_size * _ITEM_BYTES
        slice_s = send_s(cluster, _SYSTEM, boundary / work.tensor)
        hop_s = 2 * (slice_s + all_gather_s(cluster, (work.tensor,), boundary))
    busy_s = setting.num_micros * (max(stages) + chunks * hop_s)
    fill_s = (pipeline - 1) * (sum(stages) / pipeline / chunks + hop_s)
    backward_s = work.model.num_layers / pipeline * layer_backward_s
    return busy_s + fill_s + _end_s(cluster, setting, backward_s)


def _setting(line: dict[str, str]) -> _Setting:
    model = gpt(int(line["layers"]), int(line["hidden"]), int(line["heads"]), _SEQUENCE, _VOCAB)
    work = Work(
        model=model,
        sequence=_SEQUENCE,
        micro_batch=int(line["micro_batch"]),
        tensor=int(line["tensor"]),
        sequence_parallel=False,
        recompute="full",
        flash=False,
        dropout=True,
    )
    return _Setting(
        work=work,
        pipeline=int(line["pipeline"]),
        data=int(line["data"]),
        chunks=int(line["chunks"]),
        num_micros=int(line["num_micros"]),
        global_batch=int(line["global_batch"]),
    )


def _pass_seconds(cluster: Cluster, setting: _Setting) -> tuple[float, float, float, float]:
    """Return seconds of a layer, the embedding and the head (forward, backward, messages), and a layer's backward."""
    work, device = setting.work, cluster.device
    accumulate = setting.num_micros > 1
    embedding, layer, head = (
        block_seconds(device, work, block, accumulate=accumulate) for block in (0, 1, work.model.num_blocks - 1)
    )
    messages = tensor_messages(cluster, (work.tensor,), work)
    # The embedding's output is summed over the ranks that share its rows; so is the gradient that leaves the head.
    sum_s = all_reduce_s(cluster, (work.tensor,), work.tokens * work.model.hidden_size * _ITEM_BYTES)
    backward_s = layer.backward_s + messages.backward_s + messages.again_s
    return (
        layer.forward_s + messages.forward_s + backward_s,
        embedding.forward_s + embedding.backward_s + sum_s,
        head.forward_s + head.backward_s + sum_s,
        backward_s,
    )


def _end_s(cluster: Cluster, setting: _Setting, backward_s: float) -> float:
    """Return the seconds of gradients and optimizer that the step does not hide."""
    work = setting.work
    embedding, layer, *_ = block_specs(work.model)
    layers = work.model.num_layers / setting.pipeline * layer.num_trainable / work.tensor
    tied = embedding.num_trainable / work.tensor
    inside = min(_NODE_SIZE // work.tensor, setting.data)
    group = (inside, setting.data // inside)
    optimizer = optimizer_s(cluster.device, layers + tied)
    layers_s = all_reduce_s(cluster, group, _ITEM_BYTES * layers)
    tied_s = all_reduce_s(cluster, group, _ITEM_BYTES * tied)
    if setting.pipeline == 1:
        return overlapped_s(backward_s, layers_s, _NIC_PENALTY, tied_s) - backward_s + optimizer
    first_and_last_s = all_reduce_s(cluster, (1, 2), _ITEM_BYTES * tied)  # their copies of the tied matrix
    return layers_s + tied_s + first_and_last_s + optimizer
