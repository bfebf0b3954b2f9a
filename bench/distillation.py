"""What does a student gain from a teacher? Half the layers of the model of `make train`, taught by that model.

The teacher is the model that `terrace train` trains when it is told nothing (four layers, 1.3 M parameters, on the
source text of the Python standard library). The student has two of its layers and is trained with the same batches and
learning rates, with several seeds:

    alone        by the labels
    taught       by the teacher beside every step
    mixed        as taught, with rows mixed in pairs (MixKD)
    likeliest    by 64 kept tokens of each position, 48 of them its likeliest, found before the first step

Compared is the cross entropy of held-out text after the last step, which no run has as its loss, and of the last two
the loss itself.

Targets: the teacher lowers the cross entropy by at least 1 % in the mean over the seeds; the loss with the likeliest
tokens is within 0.3 % of that with the teacher.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.claims import Claim, judge, options_for_claims, print_table
from bench.learning import Held, Job, Result, parser_of, tokens

TEACHER = "teacher"
ALONE, TAUGHT, MIXED, LIKELIEST = "alone", "taught", "mixed", "likeliest"
BETA = 0.4  # of the shares of mixed rows, as in the paper
WIDE, HEADS = 160, 4  # hidden size of the model of `make train`; heads of others
DISTILL = ("--train.objective", "distill")
TARGET, NEAR = -0.01, 0.003
HELD_OUT = 256  # sequences
TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Found(Result):
    """Result of a run: `loss` is the cross entropy of held-out text, `own` the mean loss of the last steps."""

    own: float


def words_of(job: Job, ranks: int, teacher: Path, settings: Sequence[str]) -> list[str]:
    """The words of a run on the command line."""
    common = ["--ranks", str(ranks), "--plan", "ddp", "--plan.micro_batch", "8", "--train.log_every", "1"]
    common += ["--train.checkpoint_every", "50"]  # what a stopped call leaves, the next one resumes
    common += ["--train.steps", str(job.steps), "--train.batch", str(job.batch), "--train.sequence", str(job.sequence)]
    common += ["--data.holdout", str(HELD_OUT), "--train.eval_every", str(job.steps), "--train.eval_batches", "0"]
    common += ["--train.seed", str(job.seed), "--optimizer.lr", str(job.lr)]
    if job.hidden != WIDE:
        common += sizes_words(job.hidden)
    if job.variant == TEACHER:
        return common
    common += ["--model.num_hidden_layers", str(job.layers)]
    if job.variant == ALONE:
        return common
    common += [*DISTILL, "--teacher.model", str(teacher), "--teacher.plan", "ddp", *settings]
    more = {LIKELIEST: ["--teacher.top_k", "64"], MIXED: ["--teacher.mix", str(BETA)]}
    return common + more.get(job.variant, [])


def sizes_words(hidden: int) -> list[str]:
    """The words that give a model this hidden size."""
    sizes = {"hidden_size": hidden, "num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    sizes |= {"intermediate_size": 4 * hidden}
    return [word for name, size in sizes.items() for word in (f"--model.{name}", str(size))]


def terrace(*words: str) -> str:
    """What a command prints. Raises `RuntimeError` if it fails."""
    command = [sys.executable, "-m", "terrace", *words]
    done = subprocess.run(command, timeout=TIMEOUT_S, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    return done.stdout


def trained(folder: Path, words: Sequence[str]) -> list[dict[str, Any]]:
    """The metrics of a run in `folder`, which is resumed if it is there."""
    terrace("train", "--folder", str(folder), "--resume", "auto", *words)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def run(job: Job, ranks: int, folder: Path, teacher: Path, settings: Sequence[str]) -> Found:
    begin_s = time.monotonic()
    lines = trained(folder, words_of(job, ranks, teacher, settings))
    held_out = lines[-1]["eval"]["holdout"]["loss"]
    own = statistics.mean(line["loss"] for line in lines[-job.last :])
    return Found(job.variant, job.seed, job.setting, held_out, time.monotonic() - begin_s, own)


def claims_of(found: dict[tuple[str, int], Found]) -> list[Claim]:
    """How the teacher changes the cross entropy, and the likeliest tokens the loss, over the seeds with both runs."""
    claims = list[Claim]()
    compared = ((TAUGHT, ALONE, "loss", TARGET), (MIXED, ALONE, "loss", float("inf")), (LIKELIEST, TAUGHT, "own", NEAR))
    for variant, rival, of, goal in compared:
        seeds = [seed for name, seed in found if name == variant and (rival, seed) in found]
        changes = [getattr(found[variant, seed], of) / getattr(found[rival, seed], of) - 1 for seed in seeds]
        if variant == LIKELIEST:
            changes = list(map(abs, changes))
        if changes:
            name = f"{'rise of held-out cross entropy' if of == 'loss' else 'distance of the loss'}, {variant}"
            mean, low, high = statistics.mean(changes), min(changes), max(changes)
            claims.append(Claim(name=name, found=mean, low=low, high=high, goal=goal, rival=rival))
    return claims


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; with --check return 1 when a target is missed."""
    parser = parser_of(__doc__, (ALONE, TAUGHT, MIXED, LIKELIEST), hidden=160, lr=2.5e-3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--teacher", type=Path, help="a run folder or a Hugging Face folder; by default one is trained")
    parser.add_argument("--teacher-steps", type=int, help="steps of the teacher; by default those of a student")
    parser.add_argument("--weight", type=float, default=0.9)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--keep", type=Path, help="make run folders here, and resume those of a former call")
    options_for_claims(parser)
    parser.set_defaults(steps=150, sequence=128)
    options = parser.parse_args(arguments)
    settings = ["--teacher.weight", str(options.weight), "--teacher.temperature", str(options.temperature)]
    text, held, found = tokens(), Held(options.results, Found), dict[tuple[str, int], Found]()

    def job_of(variant: str, seed: int, steps: int, layers: int) -> Job:
        sizes = (steps, options.sequence, options.batch, options.hidden, layers)
        return Job(variant, seed, *sizes, options.lr, text)

    with tempfile.TemporaryDirectory() as made:
        folder = options.keep or Path(made)
        teacher = options.teacher
        if teacher is None:
            teacher, of_teacher = folder / TEACHER, job_of(TEACHER, 0, options.teacher_steps or options.steps, 4)
            print(f"teacher: {run(of_teacher, options.ranks, teacher, teacher, settings).loss:.4f}", flush=True)
        for seed in options.seeds:
            for variant in options.variants:
                job = job_of(variant, seed, options.steps, options.layers)
                where = folder / f"{variant}-{seed}"
                plans = (words_of(job, options.ranks, Path(TEACHER), settings), str(options.teacher or ""))
                found[variant, seed] = held.result(
                    job, plans, partial(run, job, options.ranks, where, teacher, settings)
                )
    rows = [[str(seed), name, f"{one.loss:.4f}", f"{one.own:.4f}"] for (name, seed), one in found.items()]
    print_table(["seed", "run", "held-out cross entropy", "own loss"], rows)
    return judge(claims_of(found), options)


if __name__ == "__main__":
    sys.exit(main())
