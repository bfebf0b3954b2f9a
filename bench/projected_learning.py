"""Do projected updates learn what AdamW learns? A trained model is trained on a second text by four methods.

The methods are AdamW for all parameters, LoRA, GaLore and LSP. First the model of `terrace train` (1.3 M parameters)
learns the source text of the Python standard library with AdamW. Then every method trains it on the text of Python's
reference, which it has not seen, with the same batches, several seeds, and a constant rate after a warm-up: the one of
`RATES` whose loss is lowest with the first seed.

The mean losses of the last tenth of the steps are compared (equal steps). A method with longer steps is also compared
at equal simulated time, by the tenth of the steps before the one that it reaches when full AdamW ends. The steps are
simulated on one device of the cluster of `terrace train`.

Target: within 1 % of full AdamW.
"""

import statistics
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path

from torch import Tensor

from bench.claims import Claim, judge, options_for_claims, print_table
from bench.common import engine_of, local_cluster
from bench.learning import Held, Job, Result, parser_of, tokens
from terrace.cluster.presets import load_cluster
from terrace.data.token_file import TokenFile
from terrace.data.tokenizer import load_tokenizer
from terrace.data.tokens import prepare_tokens
from terrace.model.config import ModelConfig, parse_model
from terrace.model.decoder import build_blocks
from terrace.model.init import initial_value
from terrace.model.lora.config import LoraConfig
from terrace.model.lora.modules import add_adapters
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.runtime.engine import Engine
from terrace.runtime.settings import OptimizerConfig
from terrace.simulate.step import Step, predict_step
from terrace.train.micro_batches import MicroBatches

FULL, LORA = "full", "lora"
VARIANTS = {
    FULL: OptimizerConfig(),
    LORA: OptimizerConfig(),
    "galore": OptimizerConfig(name="galore", rank=40, check_every=50, scale=1.0),
    "lsp": OptimizerConfig(name="lsp", rank=80, density=4, check_every=50),
}
RATES = {FULL: (1e-3, 2e-3, 5e-4), LORA: (4e-3, 8e-3, 2e-3), "galore": (2e-3, 4e-3, 1e-3), "lsp": (4e-3, 8e-3, 2e-3)}
ADAPTERS = LoraConfig(rank=16, alpha=32)
TARGET, WARM_UP, BASE_LR, ADAMW_LR = 0.01, 5, 2.5e-3, 2e-3
Values = Mapping[str, Tensor]  # by block and parameter


@dataclass(frozen=True)
class Found(Result):
    """Result of a run: its losses, bytes of its optimizer state and gradients, and simulated seconds of a step."""

    losses: list[float]
    num_bytes: int
    step_s: float


def model() -> ModelConfig:
    """The model of `terrace train`."""
    table = tomllib.loads(files("terrace.train").joinpath("default.toml").read_text(encoding="utf-8"))
    return parse_model(table["model"])


def reference_text(folder: Path) -> TokenFile:
    """The topics of Python's reference, in bytes."""
    from pydoc_data.topics import topics

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "python-reference.txt"
    path.write_text("\n\n".join(text for _, text in sorted(topics.items())), encoding="utf-8")
    return prepare_tokens(path, load_tokenizer("bytes"), folder)


def optimizer_of(job: Job) -> OptimizerConfig:
    found = replace(VARIANTS[job.variant], lr=job.lr)
    # Parameters that galore and lsp leave to AdamW have the rate of full AdamW.
    return found if found.name == "adamw" else replace(found, adamw_lr=ADAMW_LR)


def plan_of(job: Job) -> Plan:
    plan = preset("ddp", local_cluster({"package": 1}))
    return replace(plan, micro_batch=job.batch, update=optimizer_of(job).update)


def made(job: Job, base: Values) -> Engine:
    """The engine of a job. Parameters start from `base`; those that it lacks, such as adapters, are initialised."""
    config = model()
    blocks = build_blocks(config)
    if job.variant == LORA:
        add_adapters(blocks, config, ADAPTERS)

    def initial(block: str, name: str, shape: tuple[int, ...]) -> Tensor:
        known = base.get(f"{block}.{name}")
        return initial_value(config, block, name, shape, job.seed) if known is None else known

    how = {"optimizer": optimizer_of(job), "sequence": job.sequence, "initial": initial}
    return engine_of(blocks, local_cluster({"package": 1}), plan_of(job), 1, **how)


def losses_of(job: Job, engine: Engine) -> list[float]:
    """Losses of all steps, at a constant rate after a warm-up."""
    micros = MicroBatches(job.batches, engine.program, engine.rank, pinned=False)
    return [
        engine.step(micros.step(step).micros, job.lr * min(1.0, (step + 1) / WARM_UP)).loss for step in range(job.steps)
    ]


def trained_base(job: Job) -> Values:
    """Values of the model after training on the first text."""
    engine = made(job, {})
    losses_of(job, engine)
    engine.drain()
    values = {
        f"{engine.program.blocks[block].name}.{name}": value.detach().clone()
        for block in engine.state.modules
        for name, value in engine.state.named_parameters(block)
    }
    engine.close()
    return values


def run(job: Job, base: Values) -> Found:
    engine = made(job, base)
    num_bytes = sum(engine.program.state_bytes[category] for category in ("grads", "optimizer"))
    step_s = simulated_s(engine, job)
    begin_s = time.process_time()
    losses = losses_of(job, engine)
    engine.check_bytes()
    engine.close()
    loss = statistics.mean(losses[-job.last :])
    seconds = time.process_time() - begin_s
    return Found(job.variant, job.seed, job.setting, loss, seconds, losses, num_bytes, step_s)


def simulated_s(engine: Engine, job: Job) -> float:
    """Predicted seconds of a step on one device of the cluster of `terrace train`."""
    local, program = load_cluster("local"), engine.program
    cluster = replace(local, tiers=(replace(local.tiers[0], name="package", size=1),))
    work = tuple(float(block.forward_flops(job.batch, job.sequence)) for block in program.blocks)
    step = Step(
        cluster=cluster,
        plan=program.plan,
        blocks=tuple(program.blocks),
        num_micros=1,
        sequence=job.sequence,
        work=work,
    )
    return predict_step(step).step_s


def at_equal_time(found: Found, full: Found) -> float:
    """The loss at the last step that ends before full AdamW has done all of its own, in simulated time."""
    number = int(len(full.losses) * full.step_s / found.step_s)
    return statistics.mean(found.losses[max(0, number - max(1, len(full.losses) // 10)) : number])


def claims_of(found: Mapping[tuple[str, int], Found], seeds: Sequence[int]) -> list[Claim]:
    """How each method's loss differs from that of full AdamW, at equal steps and at equal simulated time."""
    claims = list[Claim]()
    for variant in dict.fromkeys(name for name, _ in found if name != FULL):
        pairs = [(found[variant, seed], found[FULL, seed]) for seed in seeds if (FULL, seed) in found]
        compared = {"equal steps": [one.loss / full.loss - 1 for one, full in pairs]}
        # A method with shorter steps would need more of them than were run.
        if all(one.step_s >= full.step_s for one, full in pairs):
            compared["equal simulated time"] = [at_equal_time(one, full) / full.loss - 1 for one, full in pairs]
        for words, changes in compared.items() if pairs else ():
            name = f"rise of the loss, {variant}, {words}, mean over {len(pairs)} seeds"
            mean, low, high = statistics.mean(changes), min(changes), max(changes)
            claims.append(Claim(name=name, found=mean, low=low, high=high, goal=TARGET, rival=FULL))
    return claims


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; with --check return 1 when a target is missed."""
    parser = parser_of(__doc__, tuple(VARIANTS), hidden=model().hidden_size, lr=BASE_LR)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--base-steps", type=int, default=400, help="steps on the first text")
    parser.add_argument("--rates", type=int, default=3, help="how many rates of each row are tried with the first seed")
    options_for_claims(parser)
    parser.set_defaults(steps=150, sequence=128, layers=model().num_layers)
    options = parser.parse_args(arguments)
    sizes = (options.sequence, options.batch, options.hidden, options.layers)
    first = Job(FULL, 0, options.base_steps, *sizes, options.lr, tokens())
    base = trained_base(first)
    text, held = reference_text(Path(".terrace-cache")), Held(options.results, Found)
    found = dict[tuple[str, int], Found]()
    for variant in options.variants:
        rates = RATES[variant][: options.rates]
        for seed in options.seeds:
            tried = dict[float, Found]()
            for rate in rates:
                job = Job(variant, seed, options.steps, *sizes, rate, text)
                of = (plan_of(job), optimizer_of(job), ADAPTERS, first.setting)
                tried[rate] = held.result(job, of, partial(run, job, base))
            best = min(tried, key=lambda rate: tried[rate].loss)
            found[variant, seed], rates = tried[best], (best,)
    rows = [
        [str(seed), name, one.setting.rpartition(" ")[2], f"{one.loss:.4f}", f"{one.num_bytes / 1e6:.2f} MB"]
        for (name, seed), one in found.items()
    ]
    print_table(["seed", "run", "lr", "loss", "gradients and optimizer state"], rows)
    return judge(claims_of(found, options.seeds), options)


if __name__ == "__main__":
    sys.exit(main())
