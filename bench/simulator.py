"""Speed of the simulator: instructions played per second of processor time; needs no torch.

A step is played twice, to be steady, so a program of n instructions is 2 n events. Pricing and the report are timed,
building the program is not: it has a column of its own. The best of a few rounds counts, since other jobs can only slow
one down.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from bench.claims import judge, measured, options_for_claims
from terrace.cluster.presets import load_cluster
from terrace.model.config import block_specs, forward_flops, parse_model
from terrace.plan.presets import preset
from terrace.program.lowering import build
from terrace.simulate.cost import step_costs
from terrace.simulate.events import simulate
from terrace.simulate.recording import record

GOAL = 1.0  # million events a second
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


def main() -> int:
    """Print one line per plan; with --check, return 1 when one misses the target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--micros", type=int, default=64, help="micro-batches of a step")
    parser.add_argument("--cluster", default="frontier")
    options_for_claims(parser)
    options = parser.parse_args()
    model, cluster = parse_model(MODEL), load_cluster(options.cluster)
    blocks = block_specs(model)
    flops = [forward_flops(model, block, 1, SEQUENCE) for block in range(model.num_blocks)]
    print(f"{'plan':<24}{'instructions':>13}{'build':>11}{'simulate':>11}{'record':>11}{'M events/s':>12}")
    claims = []
    for name in ("ddp", "zero3", "zero++", "three-level"):
        plan = replace(preset(name, cluster), compute="bf16")
        before = time.process_time()
        program = build(cluster, plan, blocks, options.micros)
        build_s = time.process_time() - before
        costs = step_costs(program, flops)
        simulate_s = _best_s(lambda: simulate(program, costs), options.rounds)  # noqa: B023
        record_s = _best_s(lambda: record(program, costs), options.rounds)  # noqa: B023
        rate = 2 * len(program.instructions) / simulate_s
        text = f"events played, llama of 7B under {name}, {options.micros} micro-batches"
        claims.append(measured(text, [rate / 1e6], GOAL, unit="M/s", at_least=True))
        cells = "".join(f"{1e3 * seconds:>8.1f} ms" for seconds in (build_s, simulate_s, record_s))
        print(f"{name:<24}{len(program.instructions):>13,}{cells}{rate / 1e6:>12.2f}")
    return judge(claims, options)


def _best_s(run: Callable[[], object], rounds: int) -> float:
    taken = []
    for _ in range(rounds):
        before = time.process_time()
        run()
        taken.append(time.process_time() - before)
    return min(taken)


if __name__ == "__main__":
    sys.exit(main())
