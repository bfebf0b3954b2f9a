"""When is ZeroPP faster than Megatron's three axes? Predicted on 64 devices; needs no torch.

Both sides are searched by the planner, in all their degrees, and priced by one evaluation under one limit of memory:

- Megatron 3D (Narayanan et al. 2104.04473): tensor x pipeline x data, any of them 1, schedules 1f1b and interleaved,
  parameters and gradients whole on every device, the optimizer whole or sharded (ZeRO-1);
- ZeroPP (2402.03791): no tensor axis, a pipeline in units of micro-batches with split backwards, parameters sharded
  over at least two data ranks inside the node.

Recomputation, micro-batch, chunks and the placement of the optimizer are free for both. A gain is Megatron's seconds
over ZeroPP's, less 1: above 0, ZeroPP is faster.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from terrace.cluster.cluster import Cluster
from terrace.cluster.named_software import run_by
from terrace.cluster.presets import load_cluster
from terrace.cluster.software import MessageForms, Software
from terrace.model.config import ModelConfig, parse_model
from terrace.planner.evaluate import Evaluator
from terrace.planner.pins import parse_pins
from terrace.planner.ranking import Estimate
from terrace.planner.search import find
from terrace.planner.space import Space
from terrace.planner.stages import SERIAL
from terrace.planner.task import Candidate, Task, schedule_text
from terrace.program.schedules.registry import schedule_names
from terrace.simulate.step import WAITS_ON_STAGES

WAITS = Software(name="waits", messages=MessageForms(exposed=frozenset(("tensor",))))
AXES = ("data", "tensor", "pipeline")
WHOLE = ("params=device", "grads=device")  # at most ZeRO-1
MEGATRON = (
    ("pipeline=1", *WHOLE),
    ("pipeline>=2", "schedule=1f1b", *WHOLE),
    ("pipeline>=2", "schedule=interleaved", *WHOLE),
)
ZEROPP = ("tensor=1", "pipeline>=2", "schedule=zeropp", "params=node")
_EVERYTHING = 10**6  # searches end by proof
_COUNT = 12  # plans of a search, of which the fastest is taken: they are ranked by their orders, and then played
# (hidden, layers, heads): the last three settings of Qi et al. 2401.10241, Table 3, and a row of Narayanan et al.
# 2104.04473, Table 1. Vocabulary 51,200, no dropout.
SHAPES = {
    "6.2B": (4096, 30, 32),
    "14.6B": (5120, 46, 40),
    "28.3B": (6144, 62, 48),
    "76.1B": (10240, 60, 80),
}
LENGTHS = ((1024, 64), (1024, 512), (4096, 64), (4096, 256), (8192, 64))  # (sequence, sequences a step)


def clusters() -> dict[str, Cluster]:
    """The clusters of 64 devices by name, fastest links first."""
    dgx, pcie = load_cluster("dgx-a100"), load_cluster("pcie-a100")
    return {
        "8 x 8 NVLink, 8 NICs": dgx.resized(8),
        "8 x 8 NVLink, 1 NIC": _linked(dgx.resized(8), node=8, nic=25e9),
        "16 x 4 NVLink, 4 NICs, 40 GB": load_cluster("perlmutter").resized(16),
        "32 x 2 NVLink, 1 NIC": _linked(dgx.resized(32), node=2, nic=25e9),
        # Two or four cards reach 0.69 of 30 GB/s, eight of them 0.42 (SimuMax, A100-PCIe system file).
        "16 x 4 PCIe, 1 NIC": _linked(pcie.resized(16), node=4, nic=25e9, efficiency=0.65),
        "8 x 8 PCIe, 1 NIC": pcie.resized(8),
    }


def _linked(cluster: Cluster, node: int, nic: float, efficiency: float | None = None) -> Cluster:
    """A cluster with nodes of `node` devices that share one adapter of `nic` bytes/s."""
    inner, outer = cluster.tiers
    inner = replace(inner, size=node, efficiency=efficiency or inner.efficiency)
    return replace(cluster, tiers=(inner, replace(outer, bandwidth_bytes_per_s=nic / node, shared=True)))


def model_of(name: str, positions: int) -> ModelConfig:
    """One of `SHAPES` with `positions` positions."""
    hidden, layers, heads = SHAPES[name]
    return gpt(hidden, layers, heads, positions)


def gpt(hidden: int, layers: int, heads: int, positions: int) -> ModelConfig:
    """A GPT without dropout."""
    sizes = {"vocab_size": 51200, "n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": positions}
    return parse_model({"model_type": "gpt2", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} | sizes)


@dataclass(frozen=True, kw_only=True)
class Contest:
    """The best of each side on one task; None where nothing fits.

    `with_tensor` is Megatron 3D with a tensor degree of 2 or more, `waiting` the same with exposed tensor messages, as
    in the software that the paper compares with; `best` is the best of all plans without context.
    """

    task: Task
    megatron: Estimate | None
    with_tensor: Estimate | None
    waiting: Estimate | None
    zeropp: Estimate | None
    best: Estimate | None

    def gain(self, other: Estimate | None) -> float:
        """Relative gain of ZeroPP over `other`; infinite where only ZeroPP fits, NaN without ZeroPP."""
        if self.zeropp is None:
            return math.nan if other is None else -1.0
        return math.inf if other is None else other.step_s / self.zeropp.step_s - 1


def contest(task: Task) -> Contest:
    """Search both sides of a task."""
    return Contest(
        task=task,
        megatron=_best([each for pins in MEGATRON for each in _found(task, pins)]),
        with_tensor=_best([each for pins in MEGATRON for each in _found(task, ("tensor>=2", *pins))]),
        waiting=_best(
            [
                each
                for pins in MEGATRON
                for each in _found(replace(task, cluster=run_by(task.cluster, WAITS)), ("tensor>=2", *pins))
            ]
        ),
        zeropp=_zeropp(task),
        best=_best([*_found(task, ()), *_found(task, ("schedule=zeropp",))]),
    )


def _found(task: Task, pins: Sequence[str], count: int = _COUNT) -> tuple[Estimate, ...]:
    """The best plans that satisfy the pins."""
    space = Space(task=task, axes=AXES, pins=parse_pins(pins, task.cluster, schedule_names()))
    found, _ = find(space, count=count, limit=_EVERYTHING)
    assert found.is_complete or not found.best, f"the search of {pins} stopped at its limit"
    return found.best


def _best(found: Sequence[Estimate]) -> Estimate | None:
    return min(found, key=lambda each: each.step_s, default=None)


def _zeropp(task: Task) -> Estimate | None:
    """The best plan that shards inside the node; pins do not say how many data ranks a node has."""
    count = _COUNT
    while True:
        found = _found(task, ZEROPP, count)
        sharded = [each for each in found if each.candidate.mesh.group("data")[0] > 1]
        # As many as a search of sharded plans alone would have, or all there are.
        if len(sharded) >= _COUNT or len(found) < count:
            return _best(sharded)
        count *= 4


def parts(task: Task, estimate: Estimate) -> dict[str, float]:
    """Shares of a plan's step on its slowest stage; they sum to 1.

    `idle` is waiting for other stages and their messages, `tensor` and `data` waiting for messages of these axes.
    """
    candidate = estimate.candidate
    played = Evaluator(task).played(candidate)
    time_s = dict(played.time_s)
    tensor_s = time_s.pop("wait tensor", 0.0)
    idle_s = math.fsum(time_s.pop(name, 0.0) for name in WAITS_ON_STAGES) if candidate.schedule != SERIAL else 0.0
    found = {
        "compute": time_s["forward"] + time_s["backward"],
        "tensor": tensor_s,
        "data": math.fsum(seconds for name, seconds in time_s.items() if name.startswith("wait ")),
        "idle": idle_s,
        "update": time_s.get("update", 0.0),
    }
    whole_s = math.fsum(found.values())
    return {name: seconds / whole_s for name, seconds in found.items()}


def plan_words(estimate: Estimate) -> str:
    """A plan in a few letters: t, p, d degrees; b micro-batch, M micro-batches; U unit; R recomputed layers."""
    candidate = estimate.candidate
    words = [f"{axis[0]}{candidate.mesh.total(axis)}" for axis in ("tensor", "pipeline", "data")]
    words += [schedule_text(candidate.schedule, candidate.chunks)] if candidate.schedule != SERIAL else []
    words += [f"b{candidate.micro_batch}", f"M{estimate.num_micros}"]
    words += [f"U{candidate.unit}"] if candidate.unit > 1 else []
    words += ["R"] if candidate.recompute else []
    return " ".join(words)


def crossed(task: Task, candidate: Candidate) -> str:
    """The outermost tier crossed by the tensor ranks of a plan."""
    tiers = candidate.mesh.tiers("tensor")
    return task.cluster.tiers[tiers[-1]].name if tiers else ""


def tasks(only: Sequence[str], models: Sequence[str]) -> Iterator[tuple[str, str, Task]]:
    """(cluster, model, task) of every setting of the chosen clusters and models."""
    for place, cluster in clusters().items():
        if not only or any(word in place for word in only):
            for model in models:
                for sequence, batch in LENGTHS:
                    config = model_of(model, sequence)
                    yield place, model, Task(model=config, cluster=cluster, batch=batch, sequence=sequence)


_SIDES = ("Megatron 3D", "s", "ZeroPP", "s", "gain", "gain, t >= 2", "gain, t >= 2 waits", "best of all", "s")
HEADER = ("model", "seq", "batch", *_SIDES)
PARTS_HEADER = ("model", "seq", "batch", "plan", "of", "s", "GB", "compute", "tensor", "data", "idle", "update")


def row(model: str, found: Contest) -> list[str]:
    """The row of a contest."""
    task = found.task
    return [
        *(model, str(task.sequence), str(task.batch)),
        *_cells(found.megatron),
        *_cells(found.zeropp),
        *(percent(found.gain(other)) for other in (found.megatron, found.with_tensor, found.waiting)),
        *_cells(found.best),
    ]


def parts_rows(model: str, found: Contest) -> Iterator[list[str]]:
    """The breakdown of the step for each side."""
    task = found.task
    for side, estimate in (("Megatron", found.megatron), ("with t >= 2", found.with_tensor), ("ZeroPP", found.zeropp)):
        if estimate is not None and not (side == "with t >= 2" and estimate == found.megatron):
            shares = [f"{100 * share:.1f}" for share in parts(task, estimate).values()]
            memory = f"{estimate.needed_bytes / 1e9:.0f}"
            words = [plan_words(estimate), side, f"{estimate.step_s:.3f}", memory]
            yield [model, str(task.sequence), str(task.batch), *words, *shares]


def percent(gain: float) -> str:
    """A gain in percent with its sign; words where a side has no plan."""
    if math.isnan(gain):
        return "neither fits"
    if math.isinf(gain):
        return "only ZeroPP fits"
    return "ZeroPP does not fit" if gain <= -1 else f"{100 * gain:+.1f} %"


def _cells(estimate: Estimate | None) -> tuple[str, str]:
    return ("-", "-") if estimate is None else (plan_words(estimate), f"{estimate.step_s:.3f}")


def summary(found: Sequence[Contest]) -> list[str]:
    """Number of settings won by each side, and the gains, against each form of Megatron 3D."""
    lines = []
    for words, others in (
        ("Megatron 3D", [each.megatron for each in found]),
        ("Megatron 3D with t >= 2", [each.with_tensor for each in found]),
        ("Megatron 3D with t >= 2 that waits for tensor messages", [each.waiting for each in found]),
    ):
        gains = [each.gain(other) for each, other in zip(found, others, strict=True)]
        both = sorted(gain for gain in gains if -1 < gain < math.inf)
        if both:
            wins, losses = sum(gain > 0.01 for gain in both), sum(gain < -0.01 for gain in both)
            lines.append(
                f"ZeroPP against {words}: faster by over 1 % in {wins}, slower in {losses} of {len(both)} settings; "
                f"from {percent(both[0])} to {percent(both[-1])}, median {percent(both[len(both) // 2])}"
            )
    return lines


def main() -> int:
    """Print a table for each cluster, breakdowns of the steps, and a summary; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="clusters whose name holds a word")
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    options = parser.parse_args()
    found: dict[str, list[tuple[str, Contest]]] = {}
    for place, model, task in tasks(options.only, options.models):
        found.setdefault(place, []).append((model, contest(task)))
        print(f"{place}: {model}, {task.batch} x {task.sequence}", file=sys.stderr, flush=True)
    for place, results in found.items():
        print(f"\n### {place}\n")
        print_table(HEADER, [row(model, each) for model, each in results])
        print()
        print_table(PARTS_HEADER, [line for model, each in results for line in parts_rows(model, each)])
        print("\n" + "\n".join(summary([each for _, each in results])))
    if len(found) > 1:
        print("\nAll clusters\n\n" + "\n".join(summary([each for results in found.values() for _, each in results])))
    return 0


def print_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print a table in Markdown."""
    widths = [max(len(line[i]) for line in (header, *lines)) for i in range(len(header))]
    for line in (header, ["-" * width for width in widths], *lines):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |")


if __name__ == "__main__":
    sys.exit(main())
