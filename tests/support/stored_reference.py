"""Optimizers with rounded states in one plain process: numpy and torch in fp64, no code of Terrace's optimizers.

Random bits and grids are written down here a second time, from their definitions. Where states lie in 8-bit blocks,
`num_slices` is the number of slices into which the ranks of the optimizer tier cut a flat buffer, and so its blocks.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from terrace.runtime.settings import OptimizerConfig
from tests.support.parity import Outcome, flatten
from tests.support.toys import MODELS, count_tokens, make_batch, run_blocks

Values = NDArray[np.float64]
MASK = (1 << 64) - 1
BLOCK = 256


def split_mix(counter: int, key: int) -> int:
    """SplitMix64 with Python's integers."""
    z = (counter * 0x9E3779B97F4A7C15 + key) & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def bits(seed: int, block: str, param: str, state: str, step: int, numel: int) -> NDArray[np.int64]:
    """The 16 bits of every element of a whole parameter."""
    name = hashlib.blake2b(f"{seed}:{block}.{param}/{state}".encode(), digest_size=8).digest()
    key = int.from_bytes(name, "little") ^ (step * 0xBF58476D1CE4E5B9 & MASK)
    return np.array([split_mix(place // 4, key) >> 16 * (place % 4) & 0xFFFF for place in range(numel)], dtype=np.int64)


def stochastic(values: Values, random: NDArray[np.int64]) -> Values:
    """Rounded to bf16: away from zero where the 16 bits that are dropped and the random ones carry."""
    words = values.astype(np.float32).view(np.uint32).astype(np.int64)
    return np.asarray((words + random & 0xFFFF0000).astype(np.uint32).view(np.float32), dtype=np.float64)


def points(signed: bool) -> Values:
    """Magnitudes that 8 bits can stand for, relative to the largest of a block."""
    found = [0.0]
    for exponent in range(-6, 1):
        number = 2 ** (exponent + 6 + (not signed))
        edges = np.linspace(0.1, 1.0, number + 1)
        found += list(10.0**exponent * (edges[1:] + edges[:-1]) / 2)
    return np.array([*found[:-1], 1.0] if signed else [*found, 1.0])


def coded(values: Values, signed: bool) -> Values:
    """One block, coded and decoded."""
    x = values.astype(np.float32)
    scale = np.abs(x).max() if len(x) else np.float32(0)
    if scale < np.finfo(np.float32).tiny:
        return np.zeros(len(x))
    grid, relative = points(signed), (np.abs(x) / scale).astype(np.float64)
    place = np.abs(relative[:, None] - grid[None]).argmin(1)
    if not signed:
        place = np.where((place == 0) & (relative > 0), 1, place)
    return np.asarray(np.sign(x) * (grid[place].astype(np.float32) * scale), dtype=np.float64)


def coded_buffer(values: Values, signed: bool, num_slices: int, start: int, total: int) -> Values:
    """Elements from `start` on of a flat buffer of `total`, which blocks of it and the slices of ranks cut."""
    stop, size = start + len(values), -(-total // num_slices)
    edges = {start, stop, *range(0, total, BLOCK), *range(0, total, size)}
    inside = sorted(edge - start for edge in edges if start <= edge <= stop)
    parts = [coded(values[first:last], signed) for first, last in pairwise(inside)]
    return np.concatenate(parts)


@dataclass
class Stored:
    """States of the trained parameters of a block, in the order of its flat buffer."""

    block: str
    names: Sequence[str]
    parameters: Sequence[nn.Parameter]
    states: str
    num_slices: int
    start: int = 0  # in the flat buffer of the block
    total: int = 0
    kept: dict[str, list[Tensor]] = field(default_factory=dict)

    def of(self, kind: str) -> list[Tensor]:
        return self.kept.setdefault(kind, [torch.zeros_like(parameter.data) for parameter in self.parameters])

    def round(self, kind: str, step: int) -> None:
        """Store one state as the plan says."""
        signed = kind != "exp_avg_sq"
        if self.states == "bf16":
            for name, value in zip(self.names, self.of(kind), strict=True):
                random = bits(0, self.block, name, kind, step, value.numel())
                value.copy_(torch.from_numpy(stochastic(value.flatten().numpy(), random)).view(value.shape))
        elif self.of(kind):
            flat = torch.cat([value.flatten() for value in self.of(kind)]).numpy()
            found = torch.from_numpy(coded_buffer(flat, signed, self.num_slices, self.start, self.total))
            sizes = [value.numel() for value in self.of(kind)]
            for value, part in zip(self.of(kind), torch.split(found, sizes), strict=True):
                value.copy_(part.view(value.shape))


def adamw(p: Tensor, g: Tensor, states: Sequence[Tensor], config: OptimizerConfig, decay: float, step: int) -> None:
    m, v = states
    m.copy_(config.beta1 * m + (1 - config.beta1) * g)
    v.copy_(config.beta2 * v + (1 - config.beta2) * g * g)
    direction = m / (1 - config.beta1**step) / ((v / (1 - config.beta2**step)).sqrt() + config.eps)
    p -= config.lr * (direction + decay * p)


def lion(p: Tensor, g: Tensor, states: Sequence[Tensor], config: OptimizerConfig, decay: float, step: int) -> None:
    (m,) = states
    p -= config.lr * (torch.sign(config.beta1 * m + (1 - config.beta1) * g) + decay * p)
    m.copy_(config.beta2 * m + (1 - config.beta2) * g)


def sgd(p: Tensor, g: Tensor, states: Sequence[Tensor], config: OptimizerConfig, decay: float, step: int) -> None:
    (v,) = states
    v.copy_((config.momentum or 0.0) * v + g)
    p -= config.lr * (decay * p + v)


def muon(p: Tensor, g: Tensor, states: Sequence[Tensor], config: OptimizerConfig, decay: float, step: int) -> None:
    (m,) = states
    momentum = config.momentum if config.momentum is not None else 0.95
    m.copy_(momentum * m + g)
    x = g + momentum * m
    x = x / (x.norm() + 1e-7)
    for _ in range(config.newton_schulz_steps):
        x = 3.4445 * x - 4.7750 * (x @ x.T) @ x + 2.0315 * (x @ x.T) @ (x @ x.T) @ x
    p -= config.lr * (0.2 * math.sqrt(max(p.shape)) * x + decay * p)


Rule = Callable[[Tensor, Tensor, Sequence[Tensor], OptimizerConfig, float, int], None]
KINDS: dict[str, tuple[Rule, tuple[str, ...]]] = {
    "adamw": (adamw, ("exp_avg", "exp_avg_sq")),
    "lion": (lion, ("momentum",)),
    "sgd": (sgd, ("momentum",)),
    "muon": (muon, ("momentum",)),
}


def serial(
    model_name: str, batch: int, num_steps: int, optimizer: OptimizerConfig, states: str, num_slices: int = 1
) -> Outcome:
    """Train on whole batches in this process."""
    model = MODELS[model_name]
    blocks = model.blocks(torch.float64)
    stored, seen = list[tuple[str, Stored]](), set[int]()
    for index, block in enumerate(blocks):
        own = [(name, p) for name, p in block.named_parameters() if p.requires_grad and id(p) not in seen]
        seen |= {id(p) for _, p in own}
        own.sort(key=lambda named: named[1].dim() < 2)  # matrices stand first in a flat buffer
        is_layer = 0 < index < len(blocks) - 1
        groups = {"adamw": own} if optimizer.name == "muon" else {optimizer.name: own}
        if optimizer.name == "muon" and is_layer:
            groups = {"muon": [each for each in own if each[1].dim() == 2]}
            groups["adamw"] = [each for each in own if each[1].dim() < 2]
        start, total = 0, sum(p.numel() for _, p in own)
        for rule, of_rule in groups.items():
            names, parameters = [name for name, _ in of_rule], [p for _, p in of_rule]
            stored.append((rule, Stored(f"block.{index}", names, parameters, states, num_slices, start, total)))
            start += sum(p.numel() for p in parameters)
    trained = [p for _, each in stored for p in each.parameters]
    losses, norms = [], []
    for step in range(1, num_steps + 1):
        tokens, labels = make_batch(step - 1, batch)
        loss = model.objective(run_blocks(blocks, tokens), labels) / count_tokens(labels)
        for p in trained:
            p.grad = None
        torch.autograd.backward(loss)
        norms.append(float(nn.utils.clip_grad_norm_(trained, optimizer.clip)))
        for rule, each in stored:
            update, kinds = KINDS[rule]
            for place, p in enumerate(each.parameters):
                assert p.grad is not None
                decay = optimizer.weight_decay if p.dim() >= 2 else 0.0
                update(p.data, p.grad, [each.of(kind)[place] for kind in kinds], optimizer, decay, step)
            for kind in kinds:
                each.round(kind, step)
        losses.append(float(loss.detach()))
    return Outcome(losses, norms, flatten(blocks))
