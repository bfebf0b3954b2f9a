"""CO2 (Sun et al. 2401.16265) over 80 Gb/s TCP/IP: its rows predicted from the rows of AdamW alone.

The row of AdamW on one node gives the rate of a device, and each row on several nodes the bandwidth between so many of
them: the one at which the predicted synchronous step takes as long as the published one. With these figures the cycle
of local steps, whose exchange may take as long as they, is predicted.
"""

from dataclasses import replace
from functools import cache

from bench.bisection import least
from bench.validation.rows import Row, Table, gpt, read_rows
from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import load_cluster
from terrace.model.blocks import block_specs, forward_flops
from terrace.plan.outer import co2
from terrace.plan.plan import Plan
from terrace.plan.presets import hsdp
from terrace.simulate.step import Prediction, Step, predict_on, predict_step

_NODE = 8
_SEQUENCE, _MICROS = 2048, 4  # a device's in a step: guesses, see the text
_MODEL = gpt(32, 4096, 32, _SEQUENCE, 64_000)  # 6.7 billion parameters

_TEXT = """
Words a second of a model of 7 billion parameters on nodes of eight A100, and their growth: those on 128 GPUs over eight
times those on 16. Predicted from the three rows of AdamW and nothing else: the row on 8 GPUs gives the rate of a
device, those on 16 and 128 the bandwidth between 2 and 16 nodes at which the synchronous step takes the published time.
Islands are nodes, with all states inside; both methods send two bytes a parameter. The batch is not known (a guess of
four sequences a device gives 5 and 7 % of the nominal link) and hardly matters: only how many compute steps an exchange
takes does, which is in the rows of AdamW.

`tau = 48` hides the exchange several times over, and so does 12 on 16 GPUs; on 128 the exchange is about as long as the
12 steps that hide it, so whatever makes steps or messages uneven is waited for, which is not in the model.
"""


def table() -> Table:
    """The published rates and growths of CO2 beside the predicted ones."""
    rows = []
    for line in read_rows("co2.csv"):
        if line["method"] == "adamw":
            continue
        tau = int(line["tau"])
        if line["words_per_s"]:
            cells = (f"tau = {tau}", "words/s on 128 GPUs")
            rows.append(Row(cells=cells, published=float(line["words_per_s"]), modelled=words_per_s(tau, 128)))
        growth = words_per_s(tau, 128) / (8 * words_per_s(tau, 16))
        rows.append(
            Row(cells=(f"tau = {tau}", "growth from 16 to 128"), published=float(line["growth"]), modelled=growth)
        )
    return Table(
        title="CO2, local steps over TCP",
        text=_TEXT,
        heads=("setting", "figure"),
        unit="as named",
        rows=rows,
        mean_limit=0.12,
        max_limit=0.20,
    )


def words_per_s(tau: int, num_gpus: int) -> float:
    """Words/s of CO2 with `tau` local steps; of AdamW where `tau` is 0."""
    calibrated = _calibrated(num_gpus).step
    if not tau:
        return _words_per_s(_calibrated(num_gpus))
    outer = replace(co2(calibrated.cluster.tiers[-1].name), every=tau, delay=tau)
    return _words_per_s(predict_step(replace(calibrated, plan=replace(calibrated.plan, outer=outer))))


@cache
def _calibrated(num_gpus: int) -> Prediction:
    """The synchronous step at AdamW's published rate."""
    wanted = next(
        float(line["words_per_s"])
        for line in read_rows("co2.csv")
        if line["method"] == "adamw" and int(line["gpus"]) == num_gpus
    )
    if num_gpus == _NODE:
        first = predict_step(_step(load_cluster("dgx-a100").resized(1)))

        def computing(flops_per_s: float) -> Prediction:
            device = first.step.cluster.device
            rated = replace(device, peak_flops_per_s={**device.peak_flops_per_s, "bf16": flops_per_s})
            return predict_on(first, replace(first.step, cluster=replace(first.step.cluster, device=rated)))

        return computing(least(lambda rate: _words_per_s(computing(rate)) >= wanted, 1e12, 1e15))
    device = _calibrated(_NODE).step.cluster.device
    cluster = replace(load_cluster("dgx-a100").resized(num_gpus // _NODE), device=device)
    start = predict_step(_step(cluster))

    def linked(bytes_per_s: float) -> Prediction:
        return predict_on(start, replace(start.step, cluster=_with_link(cluster, bytes_per_s)))

    return linked(least(lambda rate: _words_per_s(linked(rate)) >= wanted, 1e5, 1e12))


def _with_link(cluster: Cluster, bytes_per_s: float) -> Cluster:
    *inner, outer = cluster.tiers
    return replace(cluster, tiers=(*inner, replace(outer, bandwidth_bytes_per_s=bytes_per_s, half_bytes=0.0)))


def _step(cluster: Cluster) -> Step:
    plan: Plan = replace(hsdp(cluster), compute="bf16")
    flops = tuple(forward_flops(_MODEL, block, plan.micro_batch, _SEQUENCE) for block in range(_MODEL.num_blocks))
    blocks = block_specs(_MODEL)
    return Step(cluster=cluster, plan=plan, blocks=blocks, num_micros=_MICROS, sequence=_SEQUENCE, work=flops)


def _words_per_s(prediction: Prediction) -> float:
    step = prediction.step
    return step.cluster.world_size * step.num_micros * step.plan.micro_batch * step.sequence / prediction.step_s
