"""Eight gloo ranks on one machine: the engine against torch's FSDP2 (`fully_shard`) at the same placement.

    zero3   every block sharded over all ranks          fully_shard over a mesh of 8
    hsdp    sharded inside a node of 4, replicated      fully_shard over a mesh of 2 x 4
            across 2 nodes

Each contestant has processes of its own. They take turns step by step, and the waiting ones sit at a barrier. A step
takes as long as its slowest rank, and ends when all of its work is done. FSDP2 frees parameters after the forward,
prefetches the next block in both directions, reduces after each backward (over the nodes only in the last micro-batch)
and is given the number of tokens. Gloo's reduce-scatter sends twice the bytes that are needed, so FSDP2 takes part
twice: with a ring, and with an all-to-all and a local sum; the faster of the two counts.

Target: the engine is at least as fast as FSDP2, with the same losses and gradient norms.
"""

import gc
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from bench import turns
from bench.claims import Claim, compared, judge, print_table, ratio, ratio_words, versioned
from bench.common import (
    Batch,
    Step,
    Timing,
    alternate,
    bench_parser,
    decoder,
    engine_of,
    local_cluster,
    micro_batches,
    over_ranks,
    real_blocks,
    torch_adamw,
    torch_trainer,
)
from bench.lab.ring import ring_reduce_scatter
from bench.torch_fsdp import exchange_reduce_scatter, sharded
from bench.turns import Result
from terrace.model.blocks import num_params
from terrace.model.decoder import token_loss
from terrace.plan.presets import preset
from terrace.runtime.engine import Engine

GOAL = 1.0
PLACEMENTS = ("zero3", "hsdp")
REDUCES = {"ring": ring_reduce_scatter, "all-to-all": exchange_reduce_scatter}
LIBRARIES = (*REDUCES, "engine")
HEADER = ["hidden", "placement", "micros", "rounds", "ring ms", "all-to-all ms", "engine ms"]
HEADER += ["engine / ring (quartiles)", "engine / all-to-all (quartiles)", "CPU ratio", "loss diff", "norm diff"]
_BOUND = "on two cores eight ranks compute one after the other: what is not arithmetic is Python and the loopback"


@dataclass(frozen=True)
class Job:
    """Settings given to every process."""

    world: int
    per_node: int
    hidden: Sequence[int]
    layers: int
    batch: int
    sequence: int
    rounds: int
    micros: Sequence[int]
    placements: Sequence[str]

    def cases(self) -> list["Case"]:
        return [
            Case(self, hidden, placement, micros)
            for hidden in self.hidden
            for placement in self.placements
            for micros in self.micros
        ]


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    job: Job
    hidden: int
    placement: str
    micros: int

    @property
    def name(self) -> str:
        return f"{self.placement}, hidden {self.hidden}, micro-batches a step: {self.micros}"

    def batches(self, step: int, rank: int) -> list[Batch]:
        """A rank's micro-batches of a step."""
        vocab = decoder(self.hidden, self.job.layers).vocab_size
        return micro_batches(step, rank, self.micros, (self.job.batch, self.job.sequence), vocab)


def fsdp_train(case: Case, library: str) -> Callable[[Sequence[Batch]], tuple[float, Any]]:
    """One step of a training loop on FSDP2: loss of this rank, norm as a DTensor."""
    job = case.job
    if case.placement == "hsdp":
        shape, names = (job.world // job.per_node, job.per_node), ("replicate", "shard")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    else:
        mesh = init_device_mesh("cpu", (job.world,), mesh_dim_names=("shard",))
    model = sharded(real_blocks(decoder(case.hidden, job.layers)), mesh, REDUCES[library])
    parameters = list(model.parameters())
    num_tokens = case.micros * job.batch * (job.sequence - 1)  # of one rank; FSDP2 averages over ranks

    def loss_of(tokens: Tensor, labels: Tensor, is_last: bool) -> Tensor:
        model.set_requires_all_reduce(is_last)
        return token_loss(model(tokens), labels) / num_tokens

    return torch_trainer(parameters, torch_adamw(parameters), loss_of)


def engine_for(case: Case, rank: int) -> Engine:
    """The engine at this placement."""
    job = case.job
    if case.placement == "zero3":
        cluster = local_cluster({"node": job.world})  # one level, as the mesh of FSDP2
    else:
        cluster = local_cluster({"node": job.per_node, "system": job.world // job.per_node})
    blocks = real_blocks(decoder(case.hidden, job.layers))
    return engine_of(blocks, cluster, preset(case.placement, cluster), case.micros, rank=rank)


def contest(
    rank: int, num_ranks: int, job: Job, libraries: Sequence[str], turn: Callable[[], None]
) -> dict[str, Result]:
    """Results over all ranks of the contestants in `libraries`, by "library case"; the others live elsewhere.

    `turn` returns when every process has called it. Raises `ProgramError` when the engine sent other bytes than its
    plan declares.
    """
    results: dict[str, Result] = {}
    for case in job.cases():
        for library, result in _case(rank, case, libraries, turn).items():
            results[f"{library} {case.name}"] = result
        gc.collect()
    return results


def _case(rank: int, case: Case, libraries: Sequence[str], turn: Callable[[], None]) -> dict[str, Result]:
    steps: dict[str, Step] = dict.fromkeys(LIBRARIES, turns.sit_out)
    results = {library: Result(Timing()) for library in libraries}
    engine = engine_for(case, rank) if "engine" in libraries else None
    for library, result in results.items():
        train = fsdp_train(case, library) if engine is None or library != "engine" else turns.engine_train(engine)
        steps[library] = turns.step_of(train, lambda number: case.batches(number, rank), result)
    timings = alternate(steps, case.job.rounds, warmup=2, before=turn)
    for library, result in results.items():
        result.timing = over_ranks(timings[library])
        if engine is not None and library == "engine":
            engine.check_bytes()
            engine.close()
            continue
        result.timing.losses = turns.mean_over_ranks(result.timing.losses)
        result.norms = [float(norm.full_tensor()) for norm in result.norms]  # type: ignore[attr-defined]
    return results


def row(case: Case, found: Mapping[str, Result]) -> list[str]:
    """The row of a case."""
    ours, theirs = found["engine"], [found[name] for name in REDUCES]
    walls = [one.timing.wall_s for one in (*theirs, ours)]
    return [
        str(case.hidden),
        case.placement,
        str(case.micros),
        str(len(ours.timing.wall_s)),
        *(f"{statistics.median(wall_s) * 1e3:.0f}" for wall_s in walls),
        *(ratio_words(ours.timing.wall_s, one.timing.wall_s) for one in theirs),
        f"{ratio(ours.timing.cpu_s, faster(found).timing.cpu_s):.3f}",
        *turns.difference_cells(ours, faster(found)),
    ]


def faster(found: Mapping[str, Result]) -> Result:
    """FSDP2 with the reduce-scatter that suits the case better."""
    return min((found[name] for name in REDUCES), key=lambda one: statistics.median(one.timing.wall_s))


def claim(case: Case, found: Mapping[str, Result]) -> Claim:
    rival = versioned("torch", "FSDP2, prefetch in both directions, half of gloo's reduce-scatter bytes")
    ours, theirs = found["engine"].timing.wall_s, faster(found).timing.wall_s
    return compared(f"step of {case.job.world} ranks, {case.name}", ours, theirs, GOAL, rival=rival, bound=_BOUND)


def main() -> int:
    """Print the table; return 1 when --check is given and the target is missed."""
    parser = bench_parser(__doc__, world=8, per_node=4, layers=4, batch=2, sequence=64, rounds=8)
    parser.add_argument("--hidden", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--micros", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--placements", nargs="+", choices=PLACEMENTS, default=list(PLACEMENTS))
    options = parser.parse_args()
    given = {name: value for name, value in vars(options).items() if name not in ("check", "claims")}
    job = Job(**given)
    sizes = " and ".join(f"{num_params(decoder(hidden, job.layers)) / 1e6:.1f}" for hidden in job.hidden)
    print(f"{sizes} M parameters, {job.batch} x {job.sequence} tokens a rank, {job.world} gloo ranks, fp32\n")
    found = dict[str, Result]()
    for case in job.cases():
        # In new processes: those of a finished case keep its memory, and three times eight ranks have no room for that.
        alone = replace(job, hidden=[case.hidden], placements=[case.placement], micros=[case.micros])
        found |= turns.hold(contest, LIBRARIES, job.world, alone)
    cases = [(case, {library: found[f"{library} {case.name}"] for library in LIBRARIES}) for case in job.cases()]
    print_table(HEADER, [row(case, results) for case, results in cases])
    wrong = [
        line
        for case, results in cases
        for line in turns.differences(case.name, results["engine"], faster(results), "fp32")
    ]
    return judge([claim(case, results) for case, results in cases], options, wrong)


if __name__ == "__main__":
    sys.exit(main())
