"""Recorded steps and their pages and traces, parsed."""

import json
from collections import defaultdict
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from typing import Any

from terrace.cluster.cluster import Cluster, Tier
from terrace.cluster.presets import load_cluster
from terrace.model.params import ParamSpec
from terrace.model.spec import BlockSpec
from terrace.plan.presets import preset
from terrace.program.lowering import build
from terrace.program.program import Program
from terrace.program.recording import Recording
from terrace.simulate.cost import Costs, step_costs
from terrace.simulate.recording import record

LOCAL = load_cluster("local")
BLOCKS = tuple(BlockSpec(name=f"b{i}", params=(ParamSpec(name="w", shape=(64, 64 + i)),)) for i in range(5))


def price(program: Program) -> Costs:
    return step_costs(program, [2.0 * 64 * 64 * 256] * len(program.blocks))


def cluster_of(*names: str, size: int = 2, bandwidth: float = 5e7) -> Cluster:
    tiers = tuple(
        Tier(name=name, size=size, bandwidth_bytes_per_s=bandwidth / 2**i, latency_s=1e-5, source="a <b>guess</b>")
        for i, name in enumerate(names)
    )
    return replace(LOCAL, name="test", tiers=tiers)


@cache
def recorded(name: str, num_micros: int = 2, num_blocks: int = 5) -> Recording:
    cluster = cluster_of("package", "node", "system")
    blocks = tuple(BLOCKS[i % len(BLOCKS)] for i in range(num_blocks))
    program = build(cluster, preset(name, cluster), blocks, num_micros)
    return record(program, price(program))


class _Checker(HTMLParser):
    """Collects tags; every element must be closed in order."""

    VOID = frozenset({"meta", "path", "rect", "wbr"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def checked(page: str) -> _Checker:
    checker = _Checker()
    checker.feed(page)
    checker.close()
    assert not checker.open
    return checker


def events_of(text: str) -> dict[str, list[dict[str, Any]]]:
    table = json.loads(text)
    by_phase = defaultdict(list)
    for event in table["traceEvents"]:
        by_phase[event["ph"]].append(event)
    return by_phase
