"""Processor seconds of a search: GPT-3 175B on 16,384 A100, every axis and placement; needs no torch.

Only the search is timed, in a process that has everything imported. Caches of the cost model would survive from one
round to the next, so every round begins in a process of its own. The best of a few rounds counts, since other jobs can
only slow one down.
"""

import argparse
import multiprocessing
import sys
import time

from bench.claims import judge, measured, options_for_claims
from terrace.cluster.presets import load_cluster
from terrace.model.config import parse_model
from terrace.planner.pins import parse_pins
from terrace.planner.search import Found, find
from terrace.planner.space import Space
from terrace.planner.task import Task

GOALS_S = {"": 0.5, "columns<=4": 1.0}  # by pin
BOUND = (
    "a quarter of it plays the programs of the five best plans, a tenth bounds groups of shapes, and the rest prices "
    "the shapes that these leave in question; it is spread over hundreds of functions in plain Python, of which none "
    "takes more than a fifteenth"
)
BATCH, SEQUENCE, NODES = 1536, 2048, 2048
# GPT-3 175B (Brown et al. 2005.14165, Table 2.1), without dropout, with the vocabulary padded to 51,200.
MODEL = {
    "model_type": "gpt2",
    "vocab_size": 51200,
    "n_embd": 12288,
    "n_layer": 96,
    "n_head": 96,
    "n_positions": 2048,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}


def main() -> int:
    """Print the seconds and the numbers of both searches; with --check, return 1 when one misses its goal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options_for_claims(parser)
    options = parser.parse_args()
    claims = []
    for pin, goal_s in GOALS_S.items():
        with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            rounds = [pool.apply(search_s, (pin,)) for _ in range(options.rounds)]
        found, seconds = rounds[0][1], [each for each, _ in rounds]
        name = f"search of all axes{f', {pin}' if pin else ''}, GPT-3 on 16,384 devices, fastest of {options.rounds}"
        print(
            f"{name}: {found.num_roots} shapes and micro-batches in groups, {found.num_opened} with a bound of their "
            f"own, {found.num_played} pipelines played, {found.num_evaluated} plans simulated, "
            f"{'proved' if found.proved else 'not proved'}; best step {found.best[0].step_s:.4f} s"
        )
        print("rounds: " + ", ".join(f"{each:.3f}" for each in seconds) + " s")
        claims.append(measured(name, [min(seconds)], goal_s, unit="s", bound=BOUND))
    return judge(claims, options)


def search_s(pin: str) -> tuple[float, Found]:
    """(processor seconds, result) of one search."""
    cluster = load_cluster("dgx-a100").resized(NODES)
    task = Task(model=parse_model(MODEL), cluster=cluster, batch=BATCH, sequence=SEQUENCE)
    space = Space(task=task, pins=parse_pins([pin] if pin else [], cluster, []))
    before = time.process_time()
    found, _ = find(space)
    return time.process_time() - before, found


if __name__ == "__main__":
    sys.exit(main())
