"""How much do packed messages save on parameters, activations and gradients of a trained model, and do they fit?

One process trains a decoder on the source text of the Python standard library as `make train` does, in plain torch, and
packs what its messages would carry in bf16: parameters before and after training, their gradients, the activations
between blocks, inside attention and the MLP, and their gradients. A message is a whole tensor.

The size is fixed: 12.25 bits in place of 16, or 12.625 in blocks of 32, the size of a head here. The table also has the
share of exponents that are listed (there is room for one in 64), the number of messages that fit, and the ratio that an
entropy code of the exponents of each tensor would reach.

Target: every message fits in blocks of 32.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from bench.claims import judge, measured, options_for_claims, print_table
from bench.common import decoder, real_blocks
from bench.learning import tokens
from terrace.comm import codecs
from terrace.comm.codecs import packed
from terrace.data.batches import Batches
from terrace.plan.wire import WireFormat, parse_format

FORMATS = ("packed", "packed:32")


def trained(steps: int, hidden: int, layers: int, batch: int, sequence: int) -> Iterator[tuple[str, Tensor]]:
    """Everything that messages carry, by kind, after the last step; parameters also before the first."""
    blocks = real_blocks(decoder(hidden, layers))
    parameters = [each for block in blocks for each in block.parameters()]
    yield from (("parameters, initial", each) for each in parameters)
    optimizer = torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.1)
    batches, kept = Batches(tokens(), sequence, batch, 0), list[Tensor]()
    for step in range(steps):
        if step == steps - 1:
            keep_outputs(blocks, kept)
        inputs, labels = (torch.from_numpy(each) for each in batches.rows(step, np.arange(batch))[:2])
        x = inputs
        for block in blocks:
            x = block(x)
        loss = nn.functional.cross_entropy(x.flatten(0, -2).float(), labels.flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    print(f"loss {float(loss.detach()):.3f} after {steps} steps")
    yield from (("parameters, trained", each) for each in parameters)
    yield from (("gradients of parameters", each.grad) for each in parameters if each.grad is not None)
    yield from (("activations", each) for each in kept)
    yield from (("gradients of activations", each.grad) for each in kept if each.grad is not None)


def keep_outputs(blocks: Sequence[nn.Module], kept: list[Tensor]) -> None:
    """Keep the outputs of all blocks but the head and of all linear layers in them, with their gradients."""

    def keep(_: nn.Module, __: object, output: object) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            output.retain_grad()
            kept.append(output)

    for block in blocks[:-1]:
        for module in block.modules():
            if module is block or isinstance(module, nn.Linear):
                module.register_forward_hook(keep)


class Figures(NamedTuple):
    """Of one message: elements, listed exponents, whether it fits, entropy of its exponents in bits an element."""

    numel: int
    listed: int
    fits: bool
    entropy: float


def figures(values: Tensor, wire: WireFormat) -> Figures:
    row = values.detach().to(torch.bfloat16).reshape(1, -1)
    numel = row.numel()
    message = torch.empty(1, wire.message_bytes(numel), dtype=torch.uint8)
    codecs.encode(row, wire, message)
    fits = not packed.too_wide(message, wire, numel)
    blocks = -(-numel // wire.block)
    counts = message[0, blocks : 2 * blocks].to(torch.int64)
    # A message that does not fit has a mark in place of its first count.
    exponents = (row.view(torch.int16).to(torch.int32) >> 7) & 0xFF
    shares = torch.bincount(exponents[0]).double() / numel
    entropy = -float((shares * shares.clamp(min=1e-300).log2()).sum())
    return Figures(numel, int(counts[counts <= wire.block].sum()), fits, entropy)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; with --check return 1 when a message does not fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("steps", 100), ("hidden", 256), ("layers", 4), ("batch", 16), ("sequence", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options_for_claims(parser)
    options = parser.parse_args(arguments)
    found, wires = defaultdict[tuple[str, str], list[Figures]](list), [parse_format(text) for text in FORMATS]
    for kind, values in trained(options.steps, options.hidden, options.layers, options.batch, options.sequence):
        for wire in wires:
            found[kind, wire.name].append(figures(values, wire))
    rows = list[list[str]]()
    for (kind, name), each in found.items():
        numel, listed, fit = (sum(column) for column in list(zip(*each, strict=True))[:3])
        ideal = sum(one.numel * one.entropy for one in each) / numel + 8
        sent = sum(parse_format(name).message_bytes(one.numel) for one in each) / (2 * numel)
        rows.append([kind, name, f"{numel / 1e6:.2f}", f"{1 / sent:.3f}", f"{listed / numel:.1e}"])
        rows[-1] += [f"{fit} of {len(each)}", f"{16 / ideal:.2f}"]
    print_table(["values", "format", "million", "ratio", "listed", "fit", "ratio of an ideal code"], rows)
    all_fit = [one.fits for (_, name), each in found.items() if name == FORMATS[1] for one in each]
    share = sum(all_fit) / len(all_fit)
    return judge([measured(f"messages of a trained model that fit {FORMATS[1]}", [share], 1.0, at_least=True)], options)


if __name__ == "__main__":
    sys.exit(main())
