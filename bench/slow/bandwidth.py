"""The bandwidth between islands at which 95 % of a step is the island's own: models of 1, 10 and 100 B parameters.

    python -m bench.slow.bandwidth

writes the table of docs/slow-networks.md, from predictions alone. Four islands of A100 (preset `dgx-a100`) train a GPT,
each on devices of its own; the link of an island to the others is shared by its devices. The step of an island by
itself is that of the same plan without exchanges. Needs no torch.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from bench.bisection import least
from bench.summary import table
from bench.validation.rows import gpt
from terrace.base.files import write_atomic
from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import load_cluster
from terrace.model.block_operations import layer_operations
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig
from terrace.plan.presets import parse_plan
from terrace.simulate.footprint import work_of
from terrace.simulate.step import Prediction, Step, predict_on, predict_step

UTILISATION = 0.95
PAGE = Path(__file__).parents[2] / "docs" / "slow-networks.md"
BEGIN, END = "<!-- python -m bench.slow.bandwidth -->\n", "<!-- end -->\n"
_ISLANDS, _SEQUENCE, _MICROS, _NODE = 4, 2048, 4, 8
_TIER = "world"
_LATENCY_S = 1e-4  # so that bandwidth alone counts
_BITS = 8
_RANGE = 1e6, 1e14  # bits/s of an island's link


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model, and the nodes of an island that trains it with `micro_batch` sequences a device in a micro-batch."""

    label: str
    layers: int
    hidden: int
    nodes: int
    micro_batch: int

    @property
    def model(self) -> ModelConfig:
        return gpt(self.layers, self.hidden, self.hidden // 128, _SEQUENCE, 50_304)


SIZES = (
    Size(label="1 B", layers=20, hidden=2048, nodes=2, micro_batch=2),
    Size(label="10 B", layers=48, hidden=4096, nodes=16, micro_batch=2),
    Size(label="100 B", layers=80, hidden=10240, nodes=128, micro_batch=1),
)

_INT4 = {"outer": {_TIER: "int4+feedback"}}
_STREAMS = {"preset": "streaming-diloco"}
FORMS: Mapping[str, Mapping[str, Any]] = {
    "synchronous": {},
    "synchronous, int4 gradients": {"wire": {"sync": {_TIER: "int4+feedback"}}},
    "`local-sgd`: every 8": {"outer": "local-sgd"},
    "`co2`: every 12, delay 12": {"outer": "co2"},
    "`diloco`: every 100": {"outer": "diloco"},
    "`diloco`, int4": {"outer": "diloco", "wire": _INT4},
    "`diloco`, topk:32": {"outer": "diloco", "wire": {"outer": {_TIER: "topk:32+feedback"}}},
    "`streaming-diloco`: every 100, 5 fragments, delay 5": {"outer": _STREAMS},
    "the same, int4": {"outer": _STREAMS, "wire": _INT4},
    "the same, int4, delay 20": {"outer": {**_STREAMS, "delay": 20}, "wire": _INT4},
    "the same, int4, delay 100": {"outer": {**_STREAMS, "delay": 100}, "wire": _INT4},
}


def cluster_of(size: Size) -> Cluster:
    """The islands; their links are set by `_with_link`."""
    node, system = load_cluster("dgx-a100").resized(size.nodes).tiers
    whole: dict[str, Any] = {"shared": True, "efficiency": 1.0, "half_bytes": 0.0}
    world = replace(system, name=_TIER, size=_ISLANDS, latency_s=_LATENCY_S, **whole)
    return replace(load_cluster("dgx-a100"), name="islands", tiers=(node, system, world))


def _with_link(cluster: Cluster, bits_per_s: float) -> Cluster:
    *inside, world = cluster.tiers
    devices = math.prod(tier.size for tier in inside)
    return replace(cluster, tiers=(*inside, replace(world, bandwidth_bytes_per_s=bits_per_s / _BITS / devices)))


def step_of(size: Size, form: Mapping[str, Any]) -> Step:
    """A step of the form, with all states over the island (ZeRO-3)."""
    cluster = _with_link(cluster_of(size), _RANGE[1])
    states = dict.fromkeys(("params", "grads", "optimizer"), cluster.tiers[-2].name)
    plan = parse_plan({**states, "compute": "bf16", "micro_batch": size.micro_batch, **form}, cluster)
    return Step(
        cluster=cluster,
        plan=plan,
        blocks=block_specs(size.model),
        num_micros=_MICROS,
        sequence=_SEQUENCE,
        work=work_of(cluster, plan, layer_operations(size.model), _SEQUENCE),
    )


@cache
def alone_s(size: Size) -> float:
    """Seconds of an island's step without the others."""
    cycle = predict_step(step_of(size, {"outer": "diloco"})).cycle
    assert cycle is not None, "a cycle is of islands"
    return cycle.plain_s


def utilisation(size: Size, start: Prediction, bits_per_s: float) -> float:
    """Seconds of an island's step by itself over those of the predicted mean step on links of this rate."""
    step = replace(start.step, cluster=_with_link(start.step.cluster, bits_per_s))
    return alone_s(size) / predict_on(start, step).step_s


def least_bits_per_s(size: Size, form: Mapping[str, Any]) -> float:
    """The least rate of an island's link at which its utilisation is `UTILISATION`; infinite if none is."""
    start = predict_step(step_of(size, form))
    reaches = partial(utilisation, size, start)
    return least(lambda bits_per_s: reaches(bits_per_s) >= UTILISATION, *_RANGE)


def words(bits_per_s: float) -> str:
    """A rate in Gbit/s with two digits."""
    return "none" if math.isinf(bits_per_s) else f"{float(f'{bits_per_s / 1e9:.2g}'):g}"


def section() -> str:
    """The table of the page."""
    steps = [f"{size.label}: {alone_s(size):.2f} s" for size in SIZES]
    header = ("Gbit/s of an island's link", *(f"{step} a step" for step in steps))
    rows = [(label, *(words(least_bits_per_s(size, form)) for size in SIZES)) for label, form in FORMS.items()]
    return table(header, rows) + "\n"


def with_section(page: str, text: str) -> str:
    """The page with this table in place of its own. Raises `ValueError` for a page without the marks of one."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has no table between {BEGIN!r} and {END!r}: put the two lines where it belongs")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def main() -> int:
    """Write the table into the page."""
    text = section()
    write_atomic(PAGE, with_section(PAGE.read_text(encoding="utf-8"), text))
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
