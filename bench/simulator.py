"""Speed of the simulator: instructions played and recorded per second of processor time, on one rank and in a pipeline,
and seconds of each rank of a large pipeline for its own program; needs no torch.

A step is played twice, to be steady, so a program of n instructions is 2 n events. Pricing and the report are timed,
building the program is not: it has a column of its own. The best of a few rounds counts, since other jobs can only slow
one down.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from bench.claims import Claim, judge, measured, options_for_claims
from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import load_cluster
from terrace.model.blocks import block_specs, forward_flops
from terrace.model.config import parse_model
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.program.lowering import build, build_stages
from terrace.program.program import Program
from terrace.simulate.cost import step_costs
from terrace.simulate.events import simulate
from terrace.simulate.recording import record
from terrace.simulate.stages import record_stages, simulate_stages

GOAL = 1.0  # million events a second
SHARE_S = 0.5  # of a rank of the large pipeline
BOUNDS = {
    "played": "in a pipeline each pass has its start and end by the wall's time, a sum over categories",
    "recorded": "every event leaves a span of seven values and every instruction two moments, made in plain Python",
}
SEQUENCE = 2048
# Llama 2 7B (Touvron et al. 2307.09288).
MODEL = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
}
STAGES = 4
# As many blocks as 64 stages have chunks: Llama 3.1 405B (2407.21783, Table 3) has 126 layers.
LARGE_MODEL = MODEL | {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126}
LARGE_STAGES, LARGE_MICROS = 64, 512


def main() -> int:
    """Print one line per plan; with --check, return 1 when one misses its goal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--micros", type=int, default=64, help="micro-batches of a step")
    parser.add_argument("--cluster", default="frontier")
    options_for_claims(parser)
    options = parser.parse_args()
    cluster = load_cluster(options.cluster)
    print(f"{'plan':<24}{'instructions':>13}{'build':>11}{'simulate':>22}{'record':>22}")
    claims = []
    for name in ("ddp", "zero3", "zero++", "three-level"):
        plan = replace(preset(name, cluster), compute="bf16")
        claims += _speeds(name, cluster, plan, options.micros, options.rounds)
    claims += _speeds(f"zero1, {STAGES} stages", *_pipeline(cluster, STAGES, "1f1b"), options.micros, options.rounds)
    claims.append(_share(cluster, options.rounds))
    return judge(claims, options)


def _speeds(name: str, cluster: Cluster, plan: Plan, micros: int, rounds: int) -> list[Claim]:
    model = parse_model(MODEL)
    before = time.process_time()
    programs = build_stages(cluster, plan, block_specs(model), micros, SEQUENCE)
    build_s = time.process_time() - before
    flops = [forward_flops(model, block, plan.micro_batch, SEQUENCE) for block in range(model.num_blocks)]
    costs = [step_costs(program, flops) for program in programs]
    plays: dict[str, Callable[[], object]] = {
        "played": lambda: simulate_stages(programs, costs) if len(programs) > 1 else simulate(programs[0], costs[0]),
        "recorded": lambda: record_stages(programs, costs) if len(programs) > 1 else record(programs[0], costs[0]),
    }
    size, cells, claims = _size(programs), f"{1e3 * build_s:>8.1f} ms", []
    for word, run in plays.items():
        seconds = _best_s(run, rounds)
        rate = 2 * size / seconds / 1e6
        text = f"events {word}, llama of 7B under {name}, {micros} micro-batches"
        claims.append(measured(text, [rate], GOAL, unit="M/s", at_least=True, bound=BOUNDS[word]))
        cells += f"{1e3 * seconds:>8.1f} ms{rate:>7.2f} M/s"
    print(f"{name:<24}{size:>13,}{cells}")
    return claims


def _pipeline(cluster: Cluster, num_stages: int, schedule: str) -> tuple[Cluster, Plan]:
    """The cluster with a stage on each member of its outermost tier."""
    cluster = cluster.resized(num_stages)
    mapping = {cluster.tiers[-1].name: {"pipeline": num_stages}}
    return cluster, replace(preset("zero1", cluster), compute="bf16", mapping=mapping, schedule=schedule)


def _share(cluster: Cluster, rounds: int) -> Claim:
    """Seconds in which a rank of a large pipeline builds its own program."""
    cluster, plan = _pipeline(cluster, LARGE_STAGES, "zbv")
    blocks = block_specs(parse_model(LARGE_MODEL))
    seconds = _best_s(lambda: build(cluster, plan, blocks, LARGE_MICROS, SEQUENCE, LARGE_STAGES // 2), rounds)
    text = f"a rank's own program at the start, zbv on {LARGE_STAGES} stages, {LARGE_MICROS} micro-batches"
    print(f"{text}: {seconds:.3f} s")
    return measured(text, [seconds], SHARE_S, unit="s")


def _size(programs: Sequence[Program]) -> int:
    return sum(len(program.instructions) for program in programs)


def _best_s(run: Callable[[], object], rounds: int) -> float:
    taken = []
    for _ in range(rounds):
        before = time.process_time()
        run()
        taken.append(time.process_time() - before)
    return min(taken)


if __name__ == "__main__":
    sys.exit(main())
