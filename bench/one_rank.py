"""One rank without parallelism: the engine against a plain PyTorch training loop.

Both train the same decoder from the same values on the same batches: forward, sum of the cross entropies over the valid
tokens, backward, clipping at norm 1, fused AdamW with weight decay on matrices. The plain loop is ordinary PyTorch
code; with recomputation it wraps every layer in torch.utils.checkpoint.

Target: the engine's step takes at most 5 % longer.
"""

import statistics
import sys
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.claims import print_table, ratio, ratio_words
from bench.common import (
    Batch,
    Step,
    alternate,
    bench_parser,
    decoder,
    engine_of,
    engine_step,
    local_cluster,
    loss_difference,
    micro_batches,
    real_blocks,
    torch_adamw,
    torch_trainer,
)
from terrace.model.config import ModelConfig, num_params
from terrace.model.decoder import token_loss
from terrace.plan.presets import preset

TARGET = 1.05
SEQUENCE = 128


def plain_step(config: ModelConfig, num_micros: int, batch: int, recompute: bool) -> Step:
    """The step of a plain training loop."""
    blocks = nn.ModuleList(real_blocks(config))
    parameters, num_tokens = list(blocks.parameters()), num_micros * batch * (SEQUENCE - 1)

    def loss_of(tokens: Tensor, labels: Tensor, is_last: bool) -> Tensor:
        x = blocks[0](tokens)
        for layer in blocks[1:-1]:
            x = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        return token_loss(blocks[-1](x), labels) / num_tokens

    train = torch_trainer(parameters, torch_adamw(parameters), loss_of)
    return lambda number: train(batches_of(config, number, num_micros, batch))[0]


def own_step(config: ModelConfig, num_micros: int, batch: int, recompute: bool) -> Step:
    """The step of the engine on a world of one."""
    cluster = local_cluster({"node": 1})
    plan = replace(preset("ddp", cluster), recompute=("layers.*",) if recompute else ())
    engine = engine_of(real_blocks(config), cluster, plan, num_micros)
    return engine_step(engine, lambda number: batches_of(config, number, num_micros, batch))


def batches_of(config: ModelConfig, step: int, num_micros: int, batch: int) -> list[Batch]:
    return micro_batches(step, 0, num_micros, (batch, SEQUENCE), config.vocab_size)


def main() -> int:
    """Print the table; return 1 when --check is given and the target is missed."""
    parser = bench_parser(__doc__, rounds=30, hidden=192, layers=6, batch=4)
    parser.add_argument("--micros", type=int, nargs="+", default=[1, 4])
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = decoder(options.hidden, options.layers)
    print(f"{num_params(config) / 1e6:.2f} M parameters, {options.batch} x {SEQUENCE} tokens, one thread, fp32\n")
    rows, worst = [], 0.0
    for recompute in (False, True):
        for micros in options.micros:
            arguments = (config, micros, options.batch, recompute)
            steps = {"plain": plain_step(*arguments), "engine": own_step(*arguments)}
            timings = alternate(steps, max(8, options.rounds // micros), warmup=3, before=lambda: None)
            plain, engine = timings["plain"], timings["engine"]
            found = ratio(engine.wall_s, plain.wall_s)
            worst = max(worst, found)
            rows.append(
                [
                    "layers" if recompute else "none",
                    str(micros),
                    str(len(plain.wall_s)),
                    f"{statistics.median(plain.wall_s) * 1e3:.1f}",
                    f"{statistics.median(engine.wall_s) * 1e3:.1f}",
                    ratio_words(engine.wall_s, plain.wall_s),
                    f"{ratio(engine.cpu_s, plain.cpu_s):.3f}",
                    f"{loss_difference(plain, engine):.0e}",
                ]
            )
    header = ["recompute", "micros", "rounds", "plain ms", "engine ms", "ratio (quartiles)", "CPU ratio", "loss diff"]
    print_table(header, rows)
    print(f"\nworst ratio {worst:.3f}, target {TARGET}: {'met' if worst <= TARGET else 'MISSED'}")
    return 1 if options.check and worst > TARGET else 0


if __name__ == "__main__":
    sys.exit(main())
