"""A tied model of four blocks, and programs of it."""

from dataclasses import replace

from terrace.model.params import ParamSpec
from terrace.model.spec import BlockSpec
from terrace.plan.presets import preset
from terrace.program.lowering import build
from terrace.program.program import Program
from tests.support.toys import cluster_of

BLOCKS = tuple(
    BlockSpec(name=name, params=(ParamSpec(name="weight", shape=(8, 2)),), tied_to=tied_to)
    for name, tied_to in (("embedding", ()), ("layers.0", ()), ("layers.1", ()), ("head", (0,)))
)


def program_of(name: str = "zero3", num_micros: int = 2, **changes: object) -> Program:
    cluster = cluster_of(2, 2, 2)
    return build(cluster, replace(preset(name, cluster), **changes), BLOCKS, num_micros)  # type: ignore[arg-type]
