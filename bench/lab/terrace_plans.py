"""Terrace: one adapter for every plan."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any

from torch import Tensor

from bench.common import engine_of, local_cluster
from bench.lab.contest import Batch, Contestant, Result, Setting
from bench.lab.job import ADAMW, WIRE
from terrace.plan.presets import parse_plan
from terrace.runtime.batch import Batch as MicroBatch

TIMEOUT = timedelta(minutes=5)


def make(setting: Setting, *, preset: str, plan: Mapping[str, Any] = MappingProxyType({})) -> Contestant:
    """The training loop under a preset with some of its values replaced."""
    cluster = local_cluster(setting.job.tiers)
    table = {"preset": preset, "compute": WIRE, "micro_batch": setting.micro_batch, **plan}
    own: dict[str, Any] = {"rank": setting.rank, "optimizer": ADAMW, "timeout": TIMEOUT}
    engine = engine_of(setting.blocks, cluster, parse_plan(table, cluster), setting.num_micros, **own)
    expected: dict[str, int] = defaultdict(int)
    for (_, tier), num_bytes in engine.program.sent_bytes.items():
        expected[tier] += num_bytes

    def step(batches: Sequence[Batch]) -> Result:
        done = engine.step([MicroBatch(*batch) for batch in batches], ADAMW.lr)
        return Result(loss=done.loss, grad_norm=done.grad_norm, time_s=done.time_s)

    def states() -> list[Tensor]:
        owned = [flat.optimizer for flat in engine.state if flat.spec.trainable]
        return [value for one in owned for part in one.parts for value in part.values.values()]

    def close() -> None:
        engine.check_bytes()
        engine.close()

    return Contestant(step=step, states=states, finish=engine.drain, close=close, expected_bytes=dict(expected))
