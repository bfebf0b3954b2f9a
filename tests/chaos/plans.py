"""Plans of the campaign: every kind of placement, axis, schedule and wire format on 2 to 8 ranks."""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from terrace.base.schema import merge
from tests.support.tiny_runs import write_run

STEPS, EVERY = 8, 2
# A rank that does not move for so long is named: longer than a busy machine keeps a rank from the processor.
TIMEOUT_S = 6.0


@dataclass(frozen=True)
class Case:
    """A plan, the tier sizes of its cluster, and keys of the run's other sections."""

    name: str
    sizes: tuple[int, ...]
    plan: Mapping[str, Any]
    keys: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        return math.prod(self.sizes)


def _preset(name: str, *sizes: int, **keys: Any) -> Case:
    return Case(f"{name} on {math.prod(sizes)}", sizes, {"preset": name}, keys)


def _pipeline(schedule: str, *sizes: int, **plan: Any) -> Case:
    mapping = {"node": {"pipeline": 2}}
    return Case(f"pipeline {schedule}", sizes, {"preset": "ddp", "mapping": mapping, "schedule": schedule} | plan)


def _axis(name: str, plan: Mapping[str, Any], *sizes: int) -> Case:
    return Case(name, sizes, {"preset": "zero1", **plan})


_FEEDBACK = {"package": "int8+feedback", "node": "int4+feedback"}
_RING = {"mapping": {"node": {"context": {"ring": 2}}}}

CASES = (
    _preset("ddp", 2),
    _preset("zero1", 3, train={"batch": 12}),
    _preset("zero2", 2, 2),
    _preset("zero3", 2, 2),
    _preset("zero3", 2, 2, 2),
    _preset("zero++", 2, 2),
    _preset("hsdp", 2, 3, train={"batch": 12}),
    _preset("three-level", 2, 1, 2, train={"background_save": False}),
    _preset("three-level-compressed", 2, 1, 2),
    Case("ddp, feedback", (2, 2), {"preset": "ddp", "wire": {"sync": _FEEDBACK}}),
    Case("zero2, feedback", (2, 2), {"preset": "zero2", "wire": {"reduce": _FEEDBACK}}),
    Case("accumulation, units of 2", (2,), {"preset": "zero3", "micro_batch": 1, "unit": 2}),
    Case("zero1, muon", (2, 2), {"preset": "zero1"}, {"optimizer": {"name": "muon"}}),
    _axis("tensor rows", {"mapping": {"package": {"tensor": 2}}}, 2, 2),
    _axis("tensor columns", {"mapping": {"package": {"tensor": {"columns": 2}}}}, 2),
    _pipeline("gpipe", 1, 2),
    _pipeline("1f1b", 2, 2, params="package", grads="package", optimizer="package"),
    _pipeline("interleaved:2", 1, 2, micro_batch=2),
    _pipeline("zb-h1", 1, 2, micro_batch=2),
    _pipeline("zbv", 2, 2, micro_batch=1),
    Case(
        "pipeline and tensor on 8",
        (2, 2, 2),
        {"preset": "ddp", "mapping": {"package": {"tensor": 2}, "node": {"pipeline": 2}}, "micro_batch": 2},
    ),
    _axis("context ulysses", {"mapping": {"package": {"context": {"ulysses": 2}}}}, 2, 2),
    _axis("context ring", _RING, 2, 2),
)


SOAK = Case(
    "soak",
    (2, 2),
    {
        "preset": "zero3",
        "mapping": {"node": {"pipeline": 2}},
        "schedule": "1f1b",
        "wire": {"reduce": {"package": "int4+feedback"}},
    },
)


def write_case(folder: Path, case: Case, **train: Any) -> None:
    """Text, cluster, model and run files of a case in `folder`: `--config run.toml` there."""
    folder.mkdir(parents=True, exist_ok=True)
    each = {"steps": STEPS, "checkpoint_every": EVERY, "timeout_s": TIMEOUT_S, "log_every": 1}
    path = write_run(folder, *case.sizes, **(each | train))
    model = folder / "config.json"
    # As many layers as two stages of two chunks need.
    if "pipeline" in str(case.plan):
        model.write_text(model.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 4'))
    table = tomllib.loads(path.read_text())
    table["plan"] |= case.plan
    path.write_text(tomli_w.dumps(merge(table, case.keys)))
