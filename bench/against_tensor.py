"""Two and four gloo ranks on one machine: the engine's tensor axis against torch's own tensor parallelism.

    sequence   norms and residual stream are split over the ranks     SequenceParallel norms, Shard(1) between them
    whole      they are whole on every rank                           Replicate() between the parts

The same decoder, initial values and batches for all; both cut the output matrix and the loss over the vocabulary. Each
library has its own processes, since the engine changes the malloc settings of its process. They take turns step by
step, and the waiting one sits at a barrier. A step takes as long as its slowest rank; processor time and page faults
are sums over ranks. Torch's reduce-scatter is replaced (`torch_tensor.py`): gloo's own sends twice the bytes.

Target: the engine is at least as fast as torch in the same form, with the same losses and gradient norms.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch.distributed.device_mesh import init_device_mesh

from bench import turns
from bench.claims import Claim, compared, judge, print_table, ratio, versioned
from bench.common import (
    Batch,
    Step,
    Timing,
    alternate,
    bench_parser,
    engine_of,
    local_cluster,
    micro_batches,
    over_ranks,
    real_blocks,
)
from bench.models import llama_of
from bench.torch_tensor import counted_bytes, parallelised, replace_reduce_scatter, training_step
from bench.turns import DTYPES, LIBRARIES
from terrace.model.blocks import block_specs, num_params
from terrace.model.config import ModelConfig
from terrace.plan.presets import preset
from terrace.runtime.engine import Engine

FORMS = {"sequence": True, "whole": False}  # form -> whether it is sequence parallel
HEADER = ["ranks", "form", "who", "rounds", "median s", "min s", "CPU s", "MB sent", "faults"]
HEADER += ["engine / torch (quartiles)", "CPU ratio", "loss diff", "norm diff"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """Settings given to every process."""

    hidden: int = 512
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    intermediate: int = 1408
    vocab: int = 8192
    batch: int = 2  # sequences of a micro-batch
    sequence: int = 256
    micros: int = 2
    rounds: int = 10
    dtype: str = "fp32"
    forms: Sequence[str] = tuple(FORMS)
    libraries: Sequence[str] = LIBRARIES

    @property
    def model(self) -> ModelConfig:
        sizes = self.hidden, self.layers, self.heads, self.kv_heads, self.intermediate
        return llama_of(*sizes, self.vocab)

    def batches(self, step: int) -> list[Batch]:
        """The micro-batches of a step, the same for all ranks."""
        return micro_batches(step, 0, self.micros, (self.batch, self.sequence), self.vocab)


@dataclass
class Result(turns.Result):
    """Figures of one contestant on one rank, or over all of them."""

    sent_bytes: int = 0  # in a step, of one rank


def engine_for(job: Job, rank: int, num_ranks: int, form: str) -> Engine:
    """The engine on a tensor axis over all ranks."""
    cluster = local_cluster({"node": num_ranks})
    plan = replace(
        preset("ddp", cluster),
        mapping={"node": {"tensor": num_ranks}},
        sequence_parallel=FORMS[form],
        micro_batch=job.batch,
        compute=job.dtype,  # type: ignore[arg-type]
        master=job.dtype,  # type: ignore[arg-type]
        wire={},
    )
    blocks = real_blocks(job.model, DTYPES[job.dtype])
    return engine_of(
        blocks, cluster, plan, job.micros, rank=rank, declared=block_specs(job.model), sequence=job.sequence
    )


def contest(
    rank: int, num_ranks: int, job: Job, libraries: Sequence[str], turn: Callable[[], None]
) -> dict[str, Result]:
    """Let all contestants of `job` take turns; figures over all ranks of those in `libraries`, by "library form".

    The others live in other processes: this one waits during their steps. `turn` returns when every process has called
    it. Raises `ProgramError` when the engine sent other bytes than its plan declares.
    """
    mesh = init_device_mesh("cpu", (num_ranks,))
    if "torch" in libraries:
        replace_reduce_scatter()
    results: dict[str, Result] = {}
    steps: dict[str, Step] = {}
    engines: dict[str, Engine] = {}
    for form in job.forms:
        for library in job.libraries:
            name = f"{library} {form}"
            if library not in libraries:
                steps[name] = turns.sit_out
                continue
            results[name] = Result(Timing())
            if library == "torch":
                model = parallelised(real_blocks(job.model, DTYPES[job.dtype]), mesh, FORMS[form])
                train = training_step(model)
            else:
                engines[name] = engine_for(job, rank, num_ranks, form)
                train = turns.engine_train(engines[name])
            steps[name] = turns.step_of(train, job.batches, results[name])
    timings = alternate(steps, job.rounds, warmup=2, before=turn)
    for name, result in results.items():
        result.timing = over_ranks(timings[name])
        if name in engines:
            engines[name].check_bytes()
            result.sent_bytes = sum(engines[name].report({}).sent_bytes.values())
            engines[name].close()
        else:
            with counted_bytes(num_ranks) as count:
                steps[name](0)
                result.sent_bytes = count()
            result.norms.pop()
    return results


def rows(num_ranks: int, job: Job, results: dict[str, Result]) -> list[list[str]]:
    found = []
    for name, result in results.items():
        library, form = name.split()
        timing, other = result.timing, results.get(f"torch {form}")
        row = [str(num_ranks), form, library, str(job.rounds)]
        row += [*turns.time_cells(timing), f"{result.sent_bytes / 1e6:.1f}"]
        row += [f"{statistics.median(timing.faults):.0f}"]
        if library == "engine" and other is not None:
            row += [turns.ratio_cell(result, other), f"{ratio(timing.cpu_s, other.timing.cpu_s):.3f}"]
            row += turns.difference_cells(result, other)
        found.append(row + [""] * (len(HEADER) - len(row)))
    return found


def verdict(num_ranks: int, job: Job, results: dict[str, Result]) -> tuple[list[Claim], list[str]]:
    """A claim for each form that both libraries ran, and the faults of their numbers."""
    claims, wrong = [], []
    for form in job.forms:
        ours, theirs = results.get(f"engine {form}"), results.get(f"torch {form}")
        if ours is not None and theirs is not None:
            name = f"tensor axis of {num_ranks} ranks, {form}, hidden {job.hidden}"
            walls = ours.timing.wall_s, theirs.timing.wall_s
            claims.append(compared(name, *walls, turns.GOAL, rival=versioned("torch", "tensor parallelism")))
            wrong += turns.differences(name, ours, theirs, job.dtype)
    return claims, wrong


def main() -> int:
    """Print a table for each number of ranks; return 1 when --check is given and a target is missed."""
    defaults = Job()
    names = ("hidden", "layers", "heads", "kv_heads", "intermediate", "vocab", "batch", "sequence", "micros", "rounds")
    parser = bench_parser(__doc__, **{name: getattr(defaults, name) for name in names})
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--dtype", choices=DTYPES, default=defaults.dtype)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    options = parser.parse_args()
    given = {name: value for name, value in vars(options).items() if name not in ("check", "claims", "ranks")}
    job = Job(**given)
    tokens = f"{job.micros} micro-batches of {job.batch} x {job.sequence} tokens"
    print(f"{num_params(job.model) / 1e6:.2f} M parameters, {tokens}, {job.dtype}\n")
    table: list[list[str]] = []
    claims: list[Claim] = []
    wrong: list[str] = []
    for num_ranks in options.ranks:
        found = turns.hold(contest, job.libraries, num_ranks, job)
        order = [f"{library} {form}" for form in job.forms for library in job.libraries]
        results = {name: found[name] for name in order}
        table += rows(num_ranks, job, results)
        more, faults = verdict(num_ranks, job, results)
        claims += more
        wrong += faults
    print_table(HEADER, table)
    return judge(claims, options, wrong)


if __name__ == "__main__":
    sys.exit(main())
