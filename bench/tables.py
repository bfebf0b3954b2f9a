"""What a language model gains from a table whose rows are on several ranks: memory, bytes and seconds of a step.

    python -m bench.tables                  262,144 ids of 128 elements, ddp on 4 ranks over gloo
    python -m bench.tables --hidden 64

The same decoder trains with the whole table on every rank and with the rows spread over ranks, one step of each in
turns in the same processes, on tokens that follow Zipf's law. Memory is the model state of rank 0, bytes are those of
its ledger, and seconds are medians over the steps: on a busy machine only their ratio says something.
"""

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from bench.common import decoder, engine_of, local_cluster, real_blocks
from terrace.launch.start import World, launch_local
from terrace.model.blocks import block_specs
from terrace.plan.presets import preset
from terrace.runtime.batch import Batch
from terrace.runtime.engine import Engine

WAYS = ("whole", "spread")


def tokens_of(rank: int, step: int, shape: tuple[int, int], vocab: int) -> torch.Tensor:
    """Ids by Zipf's law: the probability of id i is about proportional to 1 / (i + 1)."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (vocab ** torch.rand(shape, generator=generator)).long().clamp(max=vocab) - 1


def measure(world: World, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Figures of this rank, by way."""
    config = decoder(options.hidden, options.layers, options.vocab)
    cluster = local_cluster({"node": world.world_size})
    engines: dict[str, Engine] = {}
    for way in WAYS:
        spread = {"node": world.world_size} if way == "spread" else {}
        plan = replace(preset("ddp", cluster), vocabulary=spread, micro_batch=options.batch)
        declared = block_specs(config)
        engines[way] = engine_of(
            real_blocks(config), cluster, plan, 1, rank=world.rank, declared=declared, sequence=options.sequence
        )
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for step in range(options.steps):
        tokens = tokens_of(world.rank, step, (options.batch, options.sequence), options.vocab)
        for way in WAYS if step % 2 else WAYS[::-1]:
            dist.barrier()
            began = time.perf_counter()
            engines[way].step([Batch(tokens, tokens.roll(-1, 1))], 1e-3)
            engines[way].drain()
            dist.barrier()
            seconds[way].append(time.perf_counter() - began)
    found = {}
    for way, engine in engines.items():
        engine.check_bytes()
        found[way] = {
            "state_bytes": sum(engine.comm.meter.peak().values()),
            "sent_bytes": {str(key[0]): size / options.steps for key, size in engine.comm.ledger.total().items()},
            "step_s": statistics.median(seconds[way][1:]),
        }
        engine.close()
    return found


def lines_of(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What is printed of one rank's figures."""
    whole, spread = (found[way] for way in WAYS)
    lines = ["| | " + " | ".join(WAYS) + " |", "|---|---|---|"]
    for name, scale, unit in (("state_bytes", 1e6, "MB"), ("step_s", 1.0, "s")):
        lines.append(f"| {name} | {whole[name] / scale:.3g} {unit} | {spread[name] / scale:.3g} {unit} |")
    for way in WAYS:
        sent = found[way]["sent_bytes"].items()
        lines.append(f"{way}: " + ", ".join(f"{name} {size / 1e6:.3g} MB" for name, size in sent))
    return [*lines, f"a step takes {spread['step_s'] / whole['step_s']:.2f} of that with the whole table"]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=262_144)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--batch", type=int, default=2, help="sequences of a rank")
    parser.add_argument("--steps", type=int, default=6)
    return parser.parse_args(arguments)


def main() -> None:
    """Measure on ranks of this machine, and print the figures of rank 0."""
    options = parse()
    print("\n".join(lines_of(launch_local(options.ranks, measure, (options,), say=lambda line: None))))


if __name__ == "__main__":
    main()
