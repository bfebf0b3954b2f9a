"""How much loss does pruning half the inner features add, and how much of it does further training recover?

A small decoder is trained on the source text of the Python standard library, and half the inner features of its MLPs
are removed by `terrace prune`, which measures them on held-out text. The smaller model is then trained, with several
seeds that draw other text:

    alone        by the labels
    taught       with the whole model as teacher
    magnitude    as taught, but the features that stay are those with the largest norms of their rows and columns, not
                 the most important ones in the evaluation

The cross entropy of held-out text after the last step is compared with that of the whole model. `--untrained` shows the
cross entropy of four halves without further training: the most important features, those with the largest norms, random
ones, and the least important.

Target: after 300 steps the taught model is at most 3 % above the whole one, in the mean over the seeds.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bench.claims import Claim, judge, options_for_claims, print_table
from bench.distillation import DISTILL, sizes_words, terrace, trained
from bench.learning import Held, Job, Result, parser_of, tokens
from terrace.model.blocks import block_specs
from terrace.model.hf.written import write_pretrained
from terrace.model.importance import Meter
from terrace.model.prune import Importance, Shares, pruned_values
from terrace.train.evaluate_own import evaluate_own, own_data
from terrace.train.prune import value_of
from terrace.train.trained import Trained, load_trained, with_values

ALONE, TAUGHT, MAGNITUDE = "alone", "taught", "magnitude"
WHOLE = "whole"
TARGET = 0.03
HELD_OUT = 256  # sequences


@dataclass(frozen=True)
class Found(Result):
    """Result of a run: `loss` is the cross entropy of held-out text."""


def words_of(options: argparse.Namespace, steps: int, seed: int, lr: float) -> list[str]:
    """The words of every run on the command line."""
    found = ["--ranks", str(options.ranks), "--plan", "ddp", "--train.log_every", "50"]
    found += ["--plan.micro_batch", str(options.batch // options.ranks)]
    found += ["--train.steps", str(steps), "--train.batch", str(options.batch)]
    found += ["--train.sequence", str(options.sequence), "--data.holdout", str(HELD_OUT)]
    found += ["--train.eval_every", str(steps), "--train.eval_batches", "0"]
    found += ["--train.checkpoint_every", "50"]  # what a stopped call leaves, the next one resumes
    return [*found, "--train.seed", str(seed), "--optimizer.lr", str(lr)]


def whole_words(options: argparse.Namespace) -> list[str]:
    keys = [*sizes_words(options.hidden), "--model.num_hidden_layers", str(options.layers)]
    return words_of(options, options.whole_steps, 0, options.lr) + keys


def untrained(folder: Path) -> dict[str, float]:
    """Held-out cross entropy of the whole model in `folder`, and of its halves, without training."""
    whole, sources, shares = load_trained(folder), own_data(folder, print), Shares(intermediate=0.5)
    config, meter = whole.config, Meter(whole.config)

    def loss(model: Trained) -> float:
        found = list(evaluate_own(model, sources))
        return sum(each.nats for each in found) / sum(each.num_tokens for each in found)

    with meter.attached(whole.blocks):
        losses = {"whole": loss(whole)}
    measured, generator = meter.importance, torch.Generator().manual_seed(0)
    rivals: dict[str, Callable[[int, Tensor], Tensor]] = {
        "most important": lambda _, scores: scores,
        "largest norms": lambda layer, _: norms_of(whole, layer),
        "random": lambda _, scores: torch.rand(scores.shape, generator=generator),
        "least important": lambda _, scores: -scores,
    }
    for name, scored in rivals.items():
        units = [
            {**each, "intermediate": scored(layer, each["intermediate"])} for layer, each in enumerate(measured.units)
        ]
        kept = shares.chosen(config, Importance(layers=measured.layers, units=tuple(units)))
        made, value = shares.config_of(config, kept.layers), pruned_values(config, kept, partial(value_of, whole))
        values = (
            (spec.name, one.name, value(spec.name, one.name)) for spec in block_specs(made) for one in spec.params
        )
        losses[name] = loss(replace(whole, config=made, blocks=with_values(made, values, "cpu", torch.float32, folder)))
    return losses


def norms_of(model: Trained, layer: int) -> Tensor:
    """Norms of the up projection's rows times those of the down projection's columns."""
    block = model.blocks[1 + layer]
    up, down = (block.get_parameter(f"mlp.{name}.weight").detach() for name in ("up", "down"))
    norms: Tensor = up.norm(dim=1) * down.norm(dim=0)
    return norms


def prune(whole: Path, folder: Path, variant: str) -> None:
    """Write the whole model without half its inner features, unless that was done before."""
    if folder.exists():
        return
    if variant != MAGNITUDE:
        print(terrace("prune", str(whole), str(folder), "--intermediate", "0.5", "--dtype", "fp32"), end="", flush=True)
        return
    model, shares = load_trained(whole), Shares(intermediate=0.5)
    config = model.config
    heads = torch.ones(config.num_kv_heads)
    norms = [{"intermediate": norms_of(model, layer), "heads": heads} for layer in range(len(model.blocks) - 2)]
    kept = shares.chosen(config, Importance(layers=torch.ones(len(norms)), units=tuple(norms)))
    made = shares.config_of(config, kept.layers)
    assert len(block_specs(made)) == len(block_specs(config)), "no layer goes"
    write_pretrained(folder, made, pruned_values(config, kept, partial(value_of, model)), "fp32")


def run(job: Job, options: argparse.Namespace, folder: Path) -> Found:
    """Train the pruned model of a variant."""
    begin_s, model = time.monotonic(), folder / f"half by {'norms' if job.variant == MAGNITUDE else 'evaluation'}"
    prune(folder / WHOLE, model, job.variant)
    words = [*words_of(options, job.steps, job.seed, options.heal_lr), "--model", str(model)]
    words += ["--data.tokenizer", "bytes", "--train.high_lr", "true"]  # small models take such rates
    if job.variant != ALONE:
        words += [*DISTILL, "--teacher.model", str(folder / WHOLE), "--teacher.plan", "ddp"]
    loss = trained(folder / f"{job.variant}-{job.seed}", words)[-1]["eval"]["holdout"]["loss"]
    return Found(job.variant, job.seed, job.setting, loss, time.monotonic() - begin_s)


def show(losses: dict[str, float]) -> None:
    whole = losses["whole"]
    print_table(
        ["", "cross entropy", ""], [[name, f"{one:.4f}", f"{one / whole - 1:+.2%}"] for name, one in losses.items()]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; with --check return 1 when a target is missed."""
    parser = parser_of(__doc__, (ALONE, TAUGHT, MAGNITUDE), hidden=64, lr=4e-3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--whole-steps", type=int, default=1200, help="steps of the whole model")
    parser.add_argument("--heal-lr", type=float, default=2e-3, help="learning rate of pruned models")
    parser.add_argument("--untrained", type=Path, help="show the halves of this run's model alone, and train nothing")
    parser.add_argument("--keep", type=Path, help="make run folders here, and resume those of a former call")
    options_for_claims(parser)
    parser.set_defaults(steps=300)
    options = parser.parse_args(arguments)
    if options.untrained is not None:
        show(untrained(options.untrained))
        return 0
    text, held, found = tokens(), Held(options.results, Found), dict[tuple[str, int], Found]()
    with tempfile.TemporaryDirectory() as made:
        folder = options.keep or Path(made)
        whole = trained(folder / WHOLE, whole_words(options))[-1]["eval"]["holdout"]["loss"]
        show(untrained(folder / WHOLE))
        plans = whole_words(options), words_of(options, options.steps, 0, options.heal_lr)
        for seed in options.seeds:
            for variant in options.variants:
                sizes = (options.steps, options.sequence, options.batch, options.hidden, options.layers)
                job = Job(variant, seed, *sizes, options.lr, text)
                found[variant, seed] = held.result(job, plans, partial(run, job, options, folder))
    rows = [[str(seed), name, f"{one.loss:.4f}", f"{one.loss / whole - 1:+.2%}"] for (name, seed), one in found.items()]
    print_table(["seed", "run", "held-out cross entropy", "above the whole"], rows)
    claims = []
    for variant in options.variants:
        rises = [one.loss / whole - 1 for (name, _), one in found.items() if name == variant]
        name, goal = f"rise of held-out cross entropy, {variant}", TARGET if variant == TAUGHT else float("inf")
        claims.append(
            Claim(name=name, found=statistics.mean(rises), low=min(rises), high=max(rises), goal=goal, rival=WHOLE)
        )
    return judge(claims, options)


if __name__ == "__main__":
    sys.exit(main())
