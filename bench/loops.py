"""Plans across a slow tier whose learning `bench.local_steps` compares."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bench.common import local_cluster
from terrace.cluster.cluster import Cluster
from terrace.plan.plan import Plan
from terrace.plan.presets import parse_plan

NUM_RANKS, SLOW = 4, "system"
EVERY, RATE, MOMENTUM = 20, 0.7, 0.7

Table = dict[str, Any]


def loop(wire: str = "", **changes: Any) -> Table:
    """A plan of four islands that exchange every 20 steps; `wire` is the format of messages between islands."""
    table = {"preset": "ddp", "outer": {"every": EVERY, "lr": RATE, "momentum": MOMENTUM, **changes}}
    return table | ({"wire": {"outer": {SLOW: wire}}} if wire else {})


def co2(*, penalty: bool) -> Table:
    """CO2's loop: an island's steps during an exchange are thrown away."""
    return {"preset": "ddp", "outer": {"preset": "co2", "every": EVERY, "delay": EVERY, "penalty": penalty}}


def stages(onward: str, back: str) -> Table:
    """Two stages, each of two data ranks; activations and their gradients cross the slow tier in these formats."""
    wire = {"pipeline": {SLOW: onward}, "pipeline_backward": {SLOW: back}}
    return {"preset": "ddp", "mapping": {SLOW: {"pipeline": 2}}, "wire": wire}


@dataclass(frozen=True)
class Variant:
    """A plan's table, the variant that its loss is compared with, and the most that it may lie above, as a part."""

    label: str
    table: Table
    against: str = "every-20"
    most: float | None = None
    tiers: Mapping[str, int] = field(default_factory=lambda: {SLOW: NUM_RANKS})

    @property
    def cluster(self) -> Cluster:
        return local_cluster(self.tiers)

    def plan(self, batch: int) -> Plan:
        """The plan, in micro-batches of a quarter of the `batch`."""
        return parse_plan({**self.table, "micro_batch": batch // NUM_RANKS}, self.cluster)


_two = partial(Variant, against="synchronous", tiers={"node": 2, SLOW: 2})
MAIN = {
    "synchronous": Variant("every step synchronous", {"preset": "ddp"}, "synchronous"),
    "every-20": Variant("every 20 steps, waited for, fp32", loop(), "synchronous", 0.05),
    "int4": Variant("changes in int4 with feedback", loop("int4+feedback"), most=0.005),
    "turns": Variant("5 fragments, delay 4", loop(fragments=5, delay=4), most=0.01),
    "late": Variant("delay 20, keep 1", loop(delay=EVERY), most=0.03),
    "co2": Variant("CO2: delay 20, keep 0, penalty", co2(penalty=True)),
    "co2-bare": Variant("CO2 without its penalty", co2(penalty=False)),
    "stages-int8": _two("two stages, int8, back int4 with feedback", stages("int8", "int4+feedback"), most=0.005),
    "stages-int4": _two("two stages, int4 both ways", stages("int4", "int4")),
    "stages": _two("two stages, fp32", stages("fp32", "fp32")),
    "topk-32": Variant("changes in topk:32 with feedback", loop("topk:32+feedback")),
}
_every = {f"every-{every}": Variant(f"every {every} steps", loop(every=every), "synchronous") for every in (5, 10, 50)}
_rates = {
    f"rate-{rate}-{momentum}": Variant(f"outer rate {rate}, momentum {momentum}", loop(lr=rate, momentum=momentum))
    for rate, momentum in ((0.7, 0.9), (0.7, 0.5), (1.0, 0.5))
}
VARIANTS: dict[str, Variant] = {
    **MAIN,
    **_every,
    **_rates,
    "average": Variant("mean of the islands", {"preset": "ddp", "outer": {"every": EVERY, "optimizer": "average"}}),
    "late-0.5": Variant("delay 20, keep 1, momentum 0.5", loop(delay=EVERY, momentum=0.5)),
    "int4-turns": Variant("int4 with feedback, 5 fragments, delay 4", loop("int4+feedback", fragments=5, delay=4)),
    "int4-bare": Variant("changes in int4", loop("int4")),
    "topk-128": Variant("changes in topk:128 with feedback", loop("topk:128+feedback")),
    "topk-32-every-5": Variant("every 5 steps in topk:32 with feedback", loop("topk:32+feedback", every=5)),
}
