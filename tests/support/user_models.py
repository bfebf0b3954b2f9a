"""Blocks as a user may have them, odd ones among them, and plain PyTorch training of the same for comparison."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terrace.runtime.settings import OptimizerConfig

ADAMW = OptimizerConfig(lr=1e-2)
SEQUENCE, HIDDEN, VOCAB = 5, 6, 13
NUM_STEPS = 3


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + torch.tanh(self.inner(self.norm(x)))
        return out


class _Output(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.bias = weight, nn.Parameter(torch.zeros(VOCAB))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def convolution() -> list[nn.Module]:
    """Images to classes: a convolution, a block without parameters, a frozen layer, a linear layer."""
    torch.manual_seed(3)
    frozen = nn.Linear(12, 7)
    frozen.requires_grad_(False)
    return [
        nn.Sequential(nn.Conv2d(1, 3, 3), nn.GroupNorm(3, 3)),
        nn.Sequential(nn.ReLU(), nn.Flatten()),
        frozen,
        nn.Linear(7, 4),
    ]


def tied() -> list[nn.Module]:
    """Tokens to tokens, with a tied head, a block without parameters and part of a block frozen."""
    torch.manual_seed(4)
    embedding, layers = nn.Embedding(VOCAB, HIDDEN), [_Residual() for _ in range(3)]
    layers[1].inner.weight.requires_grad = False
    return [embedding, layers[0], nn.Tanh(), layers[1], layers[2], _Output(cast(nn.Parameter, embedding.weight))]


def regression() -> list[nn.Module]:
    """Numbers to numbers; the first block has nothing to train."""
    torch.manual_seed(5)
    return [nn.Tanh(), nn.Linear(4, 9), nn.Sequential(nn.Linear(9, 9), nn.Tanh()), nn.Linear(9, 2)]


def summed_cross_entropy(output: Tensor, labels: Tensor) -> Tensor:
    """The summed cross entropy of (..., V) against labels (...)."""
    return F.cross_entropy(output.flatten(0, -2), labels.flatten(), reduction="sum", ignore_index=-100)


def summed_squares(output: Tensor, labels: Tensor) -> Tensor:
    """The summed squared error."""
    return F.mse_loss(output, labels, reduction="sum")


def batch_of(name: str, step: int, num: int = 8) -> tuple[Tensor, Tensor]:
    """The whole batch of a step."""
    generator = torch.Generator().manual_seed(step)
    if name == "convolution":
        images = torch.randn(num, 1, 4, 4, dtype=torch.float64, generator=generator)
        return images, torch.randint(0, 4, (num,), generator=generator)
    if name == "regression":
        inputs, targets = torch.randn(2, num, 4, dtype=torch.float64, generator=generator)
        return inputs, targets[:, :2].contiguous()
    tokens = torch.randint(0, VOCAB, (num, SEQUENCE), generator=generator)
    labels = tokens.roll(-1, dims=1)
    labels[0] = labels[3, :2] = -100
    return tokens, labels


@dataclass(frozen=True)
class UserModel:
    """How to build blocks, the same everywhere, and their loss."""

    build: Callable[[], list[nn.Module]]
    loss: Callable[[Tensor, Tensor], Tensor]


MODELS = {
    "convolution": UserModel(convolution, summed_cross_entropy),
    "tied": UserModel(tied, summed_cross_entropy),
    "regression": UserModel(regression, summed_squares),
}


@dataclass
class Trained:
    """Loss and gradient norm of every step, and the parameters after them."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def plain(
    run: Callable[[Tensor], Tensor],
    parameters: Sequence[nn.Parameter],
    loss_of: Callable[[Tensor, Tensor], Tensor],
    batches: Sequence[tuple[Tensor, Tensor]],
    adamw: OptimizerConfig = ADAMW,
) -> Trained:
    """Train in plain PyTorch on whole batches: torch's AdamW and clipping, losses divided once by the valid labels."""
    trained = [p for p in dict.fromkeys(parameters) if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": adamw.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=adamw.lr, betas=(adamw.beta1, adamw.beta2), eps=adamw.eps)
    found = Trained()
    for inputs, labels in batches:
        loss = loss_of(run(inputs), labels) / (labels != -100).sum()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        found.losses.append(float(loss.detach()))
        found.norms.append(float(nn.utils.clip_grad_norm_(trained, adamw.clip)))
        optimizer.step()
    return found


def plain_blocks(name: str, num_steps: int = NUM_STEPS) -> Trained:
    """The blocks of a model trained so in fp64, with parameters by block and name."""
    model = MODELS[name]
    blocks = [block.double() for block in model.build()]

    def run(x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x)
        return x

    parameters = [p for block in blocks for p in block.parameters()]
    found = plain(run, parameters, model.loss, [batch_of(name, step) for step in range(num_steps)])
    owners: dict[int, str] = {}
    for index, block in enumerate(blocks):
        for key, value in block.named_parameters():
            owners.setdefault(id(value), f"block.{index}.{key}")
            found.parameters[owners[id(value)]] = value.detach()
    return found


def deviation(mine: Trained, wanted: Trained) -> float:
    """The largest difference of any figure; infinite where something is missing."""
    if mine.parameters.keys() != wanted.parameters.keys() or len(mine.losses) != len(wanted.losses):
        return float("inf")
    pairs = [*zip(mine.losses, wanted.losses, strict=True), *zip(mine.norms, wanted.norms, strict=True)]
    worst = max(abs(a - b) for a, b in pairs)
    for name, value in wanted.parameters.items():
        worst = max(worst, float((mine.parameters[name].double() - value.double()).abs().max()))
    return worst
