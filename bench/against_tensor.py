"""Two and four gloo ranks on one machine: the engine's tensor axis against torch's own tensor parallelism.

    sequence   norms and residual stream are split over the ranks     SequenceParallel norms, Shard(1) between them
    whole      they are whole on every rank                           Replicate() between the parts

The same decoder, initial values and batches for all; both cut the output matrix and the loss over the vocabulary. Each
library has its own processes, since the engine changes the malloc settings of its process. They take turns step by
step, and the waiting one sits at a barrier. A step takes as long as its slowest rank; processor time and page faults
are sums over ranks. Bytes are those a rank must send for its collectives: gloo itself sends twice as much for torch's
reduce-scatter.

Target: the engine is at least as fast as torch in the same form, with the same losses and gradient norms.
"""

import argparse
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn

from bench.common import (
    ADAMW,
    Batch,
    Step,
    Timing,
    alternate,
    block_names,
    free_port,
    local_cluster,
    loss_difference,
    micro_batches,
    norm_difference,
    over_ranks,
    print_table,
    ratio,
    real_blocks,
    spread,
)
from bench.torch_tensor import counted_bytes, parallelised, training_step
from terrace.model.config import ModelConfig, block_specs, num_params, parse_model
from terrace.model.decoder import token_loss
from terrace.plan.presets import preset
from terrace.runtime.batch import Batch as MicroBatch
from terrace.runtime.engine import Engine

TARGET = 1.0
FORMS = {"sequence": True, "whole": False}  # form -> whether it is sequence parallel
LIBRARIES = ("torch", "engine")
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
LIMITS = {"fp32": 1e-3, "fp64": 1e-10}  # largest difference of losses, and relative difference of norms
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
    forms: tuple[str, ...] = tuple(FORMS)
    libraries: tuple[str, ...] = LIBRARIES

    @property
    def model(self) -> ModelConfig:
        return parse_model(
            {
                "model_type": "llama",
                "vocab_size": self.vocab,
                "hidden_size": self.hidden,
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads,
                "intermediate_size": self.intermediate,
                "tie_word_embeddings": False,
            }
        )

    def batches(self, step: int) -> list[Batch]:
        """The micro-batches of a step, the same for all ranks."""
        return micro_batches(step, 0, self.micros, (self.batch, self.sequence), self.vocab)


@dataclass
class Result:
    """Figures of one contestant on one rank, or over all of them."""

    timing: Timing
    norms: list[float] = field(default_factory=list)
    sent_bytes: int = 0  # in a step, of one rank


def engine_for(job: Job, rank: int, num_ranks: int, form: str) -> Engine:
    """The engine on a tensor axis over all ranks."""
    blocks = real_blocks(job.model, DTYPES[job.dtype])
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
    return Engine(
        blocks,
        names=block_names(blocks),
        cluster=cluster,
        plan=plan,
        num_micros=job.micros,
        objective=token_loss,
        rank=rank,
        optimizer=ADAMW,
        timeout=timedelta(seconds=120),
        declared=block_specs(job.model),
        sequence=job.sequence,
    )


Train = Callable[[Sequence[Batch]], tuple[float, float]]  # micro-batches of a step -> mean loss, gradient norm


def contest(
    rank: int, num_ranks: int, job: Job, libraries: Sequence[str], turn: Callable[[], None]
) -> dict[str, Result]:
    """Let all contestants of `job` take turns; figures over all ranks of those in `libraries`, by "library form".

    The others live in other processes: this one waits during their steps. `turn` returns when every process has called
    it. Raises `ProgramError` when the engine sent other bytes than its plan declares.
    """
    mesh = init_device_mesh("cpu", (num_ranks,))
    results: dict[str, Result] = {}
    steps: dict[str, Step] = {}
    engines: dict[str, Engine] = {}
    for form in job.forms:
        for library in job.libraries:
            name = f"{library} {form}"
            if library not in libraries:
                steps[name] = _sit_out
                continue
            results[name] = Result(Timing())
            if library == "torch":
                model = parallelised(real_blocks(job.model, DTYPES[job.dtype]), mesh, FORMS[form])
                steps[name] = _step(job, training_step(model), results[name])
            else:
                engines[name] = engine_for(job, rank, num_ranks, form)
                steps[name] = _step(job, partial(_figures, engines[name]), results[name])
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


def _sit_out(number: int) -> float:
    return 0.0


def _step(job: Job, train: Train, result: Result) -> Step:
    def step(number: int) -> float:
        loss, norm = train(job.batches(number))
        result.norms.append(norm)
        return loss

    return step


def _figures(engine: Engine, batches: Sequence[Batch]) -> tuple[float, float]:
    result = engine.step([MicroBatch(*batch) for batch in batches], ADAMW.lr)
    return result.loss, result.grad_norm


def rows(num_ranks: int, job: Job, results: dict[str, Result]) -> list[list[str]]:
    found = []
    for name, result in results.items():
        library, form = name.split()
        timing, other = result.timing, results.get(f"torch {form}")
        row = [str(num_ranks), form, library, str(job.rounds)]
        row += [f"{statistics.median(timing.wall_s):.3f}", f"{min(timing.wall_s):.3f}"]
        row += [f"{statistics.median(timing.cpu_s):.2f}", f"{result.sent_bytes / 1e6:.1f}"]
        row += [f"{statistics.median(timing.faults):.0f}"]
        if library == "engine" and other is not None:
            low, high = spread(timing.wall_s, other.timing.wall_s)
            row += [f"{ratio(timing.wall_s, other.timing.wall_s):.3f} ({low:.3f} - {high:.3f})"]
            row += [f"{ratio(timing.cpu_s, other.timing.cpu_s):.3f}"]
            row += [f"{loss_difference(timing, other.timing):.0e}", f"{norm_difference(result.norms, other.norms):.0e}"]
        found.append(row + [""] * (len(HEADER) - len(row)))
    return found


def failures(job: Job, results: dict[str, Result]) -> list[str]:
    """The missed targets."""
    missed = []
    for form in job.forms:
        ours, theirs = results.get(f"engine {form}"), results.get(f"torch {form}")
        if ours is None or theirs is None:
            continue
        found = ratio(ours.timing.wall_s, theirs.timing.wall_s)
        if found > TARGET:
            missed.append(f"{form}: {found:.3f} of torch's time")
        difference = max(loss_difference(ours.timing, theirs.timing), norm_difference(ours.norms, theirs.norms))
        if difference > LIMITS[job.dtype]:
            missed.append(f"{form}: losses or norms differ by {difference:.0e}")
    return missed


def work(index: int, num_ranks: int, job: Job, ports: Sequence[int], turns: Any, found: Any) -> None:
    """One process: a rank of one of the libraries. The first rank of each leaves its results in `found`."""
    place, rank = divmod(index, num_ranks)
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{ports[place]}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=num_ranks)
    results = contest(rank, num_ranks, job, job.libraries[place : place + 1], turns.wait)
    if rank == 0:
        found.put(results)
    dist.barrier()
    dist.destroy_process_group()


def hold(num_ranks: int, job: Job) -> dict[str, Result]:
    """Run the contest in processes of its own."""
    context = multiprocessing.get_context("spawn")
    num_processes, found = num_ranks * len(job.libraries), context.SimpleQueue()
    ports = [free_port() for _ in job.libraries]
    spawn(  # type: ignore[no-untyped-call]
        work, (num_ranks, job, ports, context.Barrier(num_processes), found), nprocs=num_processes
    )
    results: dict[str, Result] = {}
    for _ in job.libraries:
        results |= found.get()
    return {name: results[name] for name in (f"{library} {form}" for form in job.forms for library in job.libraries)}


def main() -> int:
    """Print a table for each number of ranks; return 1 when --check is given and a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    defaults = Job()
    for name in ("hidden", "layers", "heads", "kv_heads", "intermediate", "vocab", "batch", "sequence", "micros"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(defaults, name))
    parser.add_argument("--rounds", type=int, default=defaults.rounds)
    parser.add_argument("--dtype", choices=DTYPES, default=defaults.dtype)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument("--check", action="store_true", help="exit 1 when a target is missed")
    options = vars(parser.parse_args())
    check, ranks = options.pop("check"), options.pop("ranks")
    job = Job(**{**options, "forms": tuple(options["forms"]), "libraries": tuple(options["libraries"])})
    tokens = f"{job.micros} micro-batches of {job.batch} x {job.sequence} tokens"
    print(f"{num_params(job.model) / 1e6:.2f} M parameters, {tokens}, {job.dtype}\n")
    table, missed = [], []
    for num_ranks in ranks:
        results = hold(num_ranks, job)
        table += rows(num_ranks, job, results)
        missed += [f"{num_ranks} ranks, {line}" for line in failures(job, results)]
    print_table(HEADER, table)
    print("\nmet" if not missed else "\nMISSED: " + "; ".join(missed))
    return 1 if check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
