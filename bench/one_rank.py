"""One rank without parallelism: the engine under several plans against a plain PyTorch training loop.

All train the same decoder from the same values on the same batches: forward, sum of the cross entropies over the valid
tokens, backward, clipping at norm 1, fused AdamW with weight decay on matrices. The plain loop is ordinary PyTorch
code; with `--recompute` it wraps every layer in torch.utils.checkpoint. In bf16 it keeps fp32 master parameters, as
the engine does. With `--model transformers` the plain loop calls a Llama of `transformers`, and the engine its blocks
from `terrace.blocks_of`.

Each contestant has a process of its own, and they take turns. With one rank every placement means the same, so every
plan has the same target: at most 2 % more processor time than the plain loop.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench import turns
from bench.claims import compared, judge, print_table, ratio, ratio_words
from bench.common import (
    ADAMW,
    Batch,
    Step,
    Timing,
    alternate,
    bench_parser,
    decoder,
    engine_of,
    local_cluster,
    loss_difference,
    micro_batches,
    real_blocks,
    torch_adamw,
)
from terrace.model.blocks import num_params
from terrace.model.config import ModelConfig
from terrace.model.decoder import token_loss
from terrace.plan.presets import PRESETS, preset
from terrace.runtime.engine import Engine
from terrace.runtime.setup import Blocks, Training, Workload

GOAL = 1.02
_BOUND = "rounds differ by more than what is left above the goal"
PLAIN = "plain"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LOSS_LIMITS = {"fp32": 1e-2, "bf16": 0.1}  # rounding, amplified by some twenty steps of training
HEADER = ["contestant", "rounds", "CPU ms", "wall ms", "faults", "CPU ratio (quartiles)", "wall ratio", "loss diff"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """The model and the batches of all contestants."""

    hidden: int = 512
    layers: int = 4
    vocab: int = 8192
    batch: int = 1
    sequence: int = 128
    micros: int = 1
    rounds: int = 20
    threads: int = 1
    dtype: str = "fp32"
    model: str = "own"
    recompute: bool = False
    plans: Sequence[str] = ("ddp", "zero3", "three-level")

    @property
    def config(self) -> ModelConfig:
        return decoder(self.hidden, self.layers, self.vocab)

    def batches(self, step: int) -> list[Batch]:
        """The micro-batches of a step."""
        return micro_batches(step, 0, self.micros, (self.batch, self.sequence), self.vocab)


def llama(config: ModelConfig) -> Any:
    """A Llama of `transformers` of the same sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            intermediate_size=config.intermediate_size,
            use_cache=False,
        )
    )


def plain_train(job: Job) -> turns.Train:
    """The step of a plain training loop; in bf16 with fp32 master parameters."""
    dtype = DTYPES[job.dtype]
    model: Any = nn.ModuleList(real_blocks(job.config)) if job.model == "own" else llama(job.config)
    masters = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
    model.to(dtype)
    working = list(model.parameters())
    if dtype is torch.float32:
        masters = working
    optimizer = torch_adamw(masters)

    def logits_of(tokens: Tensor) -> Tensor:
        if job.model != "own":
            return model(tokens).logits  # type: ignore[no-any-return]
        x = model[0](tokens)
        for layer in model[1:-1]:
            x = checkpoint(layer, x, use_reentrant=False) if job.recompute else layer(x)
        return model[-1](x)  # type: ignore[no-any-return]

    def train(batches: Sequence[Batch]) -> tuple[float, float]:
        total, count = torch.zeros(()), sum(int((labels >= 0).sum()) for _, labels in batches)
        for tokens, labels in batches:
            loss = token_loss(logits_of(tokens), labels) / count
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
            # Micro-batches are summed in fp32.
            for master, parameter in zip(masters, working, strict=True) if masters is not working else ():
                assert parameter.grad is not None
                if master.grad is None:
                    master.grad = parameter.grad.float()
                else:
                    master.grad += parameter.grad
                parameter.grad = None
        norm = nn.utils.clip_grad_norm_(masters, ADAMW.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if masters is not working:
            with torch.no_grad():
                for master, parameter in zip(masters, working, strict=True):
                    parameter.copy_(master)
        return total.item(), norm.item()

    return train


def engine_for(job: Job, name: str) -> Engine:
    """The engine under a preset on a world of one."""
    cluster = local_cluster({"package": 1, "node": 1, "system": 1})
    layers = ("layers.*",) if job.recompute else ()
    plan = replace(preset(name, cluster), recompute=layers, micro_batch=job.batch, compute=job.dtype)  # type: ignore[arg-type]
    if job.model == "own":
        return engine_of(real_blocks(job.config), cluster, plan, job.micros)
    import terrace

    blocks = terrace.blocks_of(llama(job.config))
    return Engine(
        Blocks(blocks),
        Workload(cluster=cluster, plan=plan, num_micros=job.micros),
        token_loss,
        Training(optimizer=ADAMW),
    )


def contest(
    rank: int, num_ranks: int, job: Job, libraries: Sequence[str], turn: Callable[[], None]
) -> dict[str, turns.Result]:
    """Let the contestants take turns, those of other processes there; the results of those in `libraries`."""
    torch.set_num_threads(job.threads)
    results: dict[str, turns.Result] = {}
    steps: dict[str, Step] = {}
    engines: list[Engine] = []
    for name in (PLAIN, *job.plans):
        steps[name] = turns.sit_out
        if name in libraries:
            results[name] = turns.Result(Timing())
            if name == PLAIN:
                train = plain_train(job)
            else:
                engines.append(engine_for(job, name))
                train = turns.engine_train(engines[-1])
            steps[name] = turns.step_of(train, job.batches, results[name])
    timings = alternate(steps, job.rounds, warmup=3, before=turn)
    for name, result in results.items():
        result.timing = timings[name]
    for engine in engines:
        engine.check_bytes()
        engine.close()
    return results


def main() -> int:
    """Print the table; return 1 when --check is given and the target is missed."""
    defaults = Job()
    names = ("hidden", "layers", "vocab", "batch", "sequence", "micros", "rounds", "threads")
    parser = bench_parser(__doc__, **{name: getattr(defaults, name) for name in names})
    parser.add_argument("--dtype", choices=DTYPES, default=defaults.dtype)
    parser.add_argument("--model", choices=("own", "transformers"), default=defaults.model)
    parser.add_argument("--recompute", action="store_true", help="recompute every layer (own decoder)")
    parser.add_argument("--plans", nargs="+", choices=PRESETS, default=list(defaults.plans))
    options = parser.parse_args()
    job = Job(**{name: value for name, value in vars(options).items() if name not in ("check", "claims")})
    size = num_params(job.config) / 1e6
    print(f"{size:.1f} M parameters, {job.micros} x {job.batch} x {job.sequence} tokens, {job.dtype}")
    print(f"{job.model} model, threads: {job.threads}{', layers recomputed' if job.recompute else ''}\n")
    found = turns.hold(contest, [PLAIN, *job.plans], 1, job)
    plain, rows, claims, wrong = found[PLAIN].timing, [], [], []
    for name in (PLAIN, *job.plans):
        timing = found[name].timing
        cpu, wall, faults = map(statistics.median, (timing.cpu_s, timing.wall_s, timing.faults))
        row = [name, str(job.rounds), f"{cpu * 1e3:.1f}", f"{wall * 1e3:.1f}", f"{faults:.0f}"]
        if name != PLAIN:
            row += [ratio_words(timing.cpu_s, plain.cpu_s), f"{ratio(timing.wall_s, plain.wall_s):.3f}"]
            row.append(f"{loss_difference(timing, plain):.0e}")
            about = f"processor time of one rank, {name}, {job.model} model, {job.dtype}"
            claims.append(compared(about, timing.cpu_s, plain.cpu_s, GOAL, rival="plain loop", bound=_BOUND))
            if not loss_difference(timing, plain) < LOSS_LIMITS[job.dtype]:
                wrong.append(f"{name}: losses differ by {loss_difference(timing, plain):.0e}")
        rows.append(row + [""] * (len(HEADER) - len(row)))
    print_table(HEADER, rows)
    return judge(claims, options, wrong)


if __name__ == "__main__":
    sys.exit(main())
