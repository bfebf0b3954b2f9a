"""Training steps by `transformers` and torch alone, in fp64 on one device: the independent reference.

It shares no code with Terrace and was written from the docs and the papers they name. Every document of a batch runs
alone, so there are no masks, no packing, no micro-batches and no loss in chunks; gradients are torch's.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.support.independent_experts import PlainMixture, Routing, use_plain_mixtures

IGNORED = -100

Document = tuple[Tensor, Tensor]  # tokens and labels, each (S)


def causal_model(family: str, config: Mapping[str, Any], seed: int) -> nn.Module:
    """A decoder of `transformers` in fp64 with random biases and norms, and no step of its forward in fp32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    keys_of_terrace = ("gate", "router_size")
    known = {name: value for name, value in config.items() if name not in keys_of_terrace}
    settings = AutoConfig.for_model(family, **known)
    factory: Any = AutoModelForCausalLM  # untyped
    model: nn.Module = factory.from_config(settings, attn_implementation="sdpa").double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    exact(model)
    if "num_experts_per_tok" in config:
        routed: Any = model
        routed.routing = Routing()
        routed.mixtures = use_plain_mixtures(model, {**config, "model_type": family}, routed.routing)
    return model


def exact(model: nn.Module) -> None:
    """Norms and rotary angles of the model in fp64: `transformers` computes them in fp32 whatever the dtype."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = _Norm(module)
        elif type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = _Rotary(model.config)


class _Norm:
    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, hidden: Tensor) -> Tensor:
        mean = hidden.square().mean(-1, keepdim=True)
        normed: Tensor = hidden / (mean + self.module.variance_epsilon).sqrt() * self.module.weight
        return normed


class _Rotary:
    def __init__(self, config: Any) -> None:
        rope = config.rope_parameters
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        size = int(size * rope.get("partial_rotary_factor", 1.0))
        frequencies = rope["rope_theta"] ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
        self.frequencies = _SCALINGS[rope["rope_type"]](frequencies, rope)

    def __call__(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].double() * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def _llama3(frequencies: Tensor, rope: Mapping[str, Any]) -> Tensor:
    # Llama 3.1: long waves are stretched by the factor, short ones left, those between interpolated
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    scaled: Tensor = kept * frequencies + (1 - kept) * frequencies / rope["factor"]
    return scaled


_SCALINGS: dict[str, Callable[[Tensor, Mapping[str, Any]], Tensor]] = {
    "default": lambda frequencies, rope: frequencies,
    "linear": lambda frequencies, rope: frequencies / rope["factor"],
    "llama3": _llama3,
}


@dataclass(frozen=True)
class StepResult:
    loss: float
    grad_norm: float
    router_losses: Mapping[str, float] = field(default_factory=dict)
    dropped: int = 0


class Reference:
    """A model of `transformers` and an optimizer: a table with the keys of `[optimizer]` in docs/training.md.

    With `splits_heads`, query, key and value that a model stores as one matrix are three matrices to Muon. `balance` is
    the section of that name of a run.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Mapping[str, Any],
        *,
        splits_heads: bool = False,
        balance: Mapping[str, float] | None = None,
    ) -> None:
        self.model = model
        self.routing: Routing = getattr(model, "routing", Routing())
        self.mixtures: Sequence[PlainMixture] = getattr(model, "mixtures", ())
        self.routing.balance = balance or {}
        self.trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self.clip = float(optimizer.get("clip", 1.0))
        self.optimizer = optimizer_of(optimizer)
        if isinstance(self.optimizer, _Muon) and splits_heads:
            config: Any = model.config
            self.optimizer.num_heads = config.num_attention_heads

    def step(self, documents: Sequence[Document], lr: float) -> StepResult:
        count = sum(int((labels != IGNORED).sum()) for _, labels in documents)
        total, of_routers = 0.0, dict.fromkeys(self.routing.names, 0.0)
        self.routing.dropped = 0
        for value in self.trained.values():
            value.grad = None
        for tokens, labels in documents:
            self.routing.begin(counts=bool((labels != IGNORED).any()))
            positions = torch.arange(len(tokens))[None]
            logits = self.model(input_ids=tokens[None], position_ids=positions, use_cache=False).logits[0]
            loss = cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum") / count
            # Each token of a document counts its labels over its tokens.
            share = int((labels != IGNORED).sum()) / len(tokens)
            losses = {name: share * each / count for name, each in self.routing.losses.items()}
            whole = torch.stack([loss, *losses.values()]).sum()
            if whole.requires_grad:
                torch.autograd.backward(whole)
            total += float(loss.detach())
            for name, each in losses.items():
                of_routers[name] += float(each.detach())
            self.routing.end(len(tokens))
        gradients = {
            name: torch.zeros_like(value) if value.grad is None else value.grad for name, value in self.trained.items()
        }
        norm = math.sqrt(math.fsum(float(gradient.square().sum()) for gradient in gradients.values()))
        # as torch.nn.utils.clip_grad_norm_
        scale = min(1.0, self.clip / (norm + 1e-6)) if self.clip else 1.0
        with torch.no_grad():
            for name, value in self.trained.items():
                self.optimizer.update(name, value, gradients[name] * scale, lr)
            for mixture in self.mixtures:
                mixture.end_step()
        return StepResult(total, norm, of_routers, self.routing.dropped)


def learning_rate(step: int, train: Mapping[str, Any], lr: float) -> float:
    """The rate of a step, from 0, by docs/optimizers.md; `train` is the table `[train]`."""
    warmup, last, name = train["warmup_steps"], train.get("final_lr_fraction", 0.1), train["schedule"]
    if step < warmup:
        return float(lr * (step + 1) / warmup)
    first = train["steps"] - train["decay_steps"] if name == "wsd" else warmup
    done = max(0.0, (step - first) / (train["steps"] - first))
    left = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "constant": 1.0}
    left["wsd"] = 1 - math.sqrt(done) if train.get("decay", "sqrt") == "sqrt" else 1 - done
    return float(lr * (last + (1 - last) * left[name]))


class _AdamW:
    """Loshchilov and Hutter, arXiv 1711.05101, Algorithm 2; decay of matrices alone."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self.beta1, self.beta2 = table.get("beta1", 0.9), table.get("beta2", 0.95)
        self.eps, self.decay = table.get("eps", 1e-8), table.get("weight_decay", 0.1)
        self.state: dict[str, tuple[int, Tensor, Tensor]] = {}

    def update(self, name: str, value: Tensor, gradient: Tensor, lr: float) -> None:
        count, first, second = self.state.get(name, (0, torch.zeros_like(value), torch.zeros_like(value)))
        count += 1
        first = self.beta1 * first + (1 - self.beta1) * gradient
        second = self.beta2 * second + (1 - self.beta2) * gradient.square()
        self.state[name] = (count, first, second)
        direction = first / (1 - self.beta1**count) / ((second / (1 - self.beta2**count)).sqrt() + self.eps)
        if value.ndim > 1:
            direction = direction + self.decay * value
        value -= lr * direction


class _Lion:
    """Chen et al., arXiv 2302.06675, Algorithm 2; decay of matrices alone."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self.beta1, self.beta2 = table.get("beta1", 0.9), table.get("beta2", 0.95)
        self.decay = table.get("weight_decay", 0.1)
        self.state: dict[str, Tensor] = {}

    def update(self, name: str, value: Tensor, gradient: Tensor, lr: float) -> None:
        momentum = self.state.get(name, torch.zeros_like(value))
        direction = (self.beta1 * momentum + (1 - self.beta1) * gradient).sign()
        self.state[name] = self.beta2 * momentum + (1 - self.beta2) * gradient
        if value.ndim > 1:
            direction = direction + self.decay * value
        value -= lr * direction


class _Muon:
    """Jordan 2024 (Newton-Schulz of Nesterov's momentum), scaled as Liu et al., arXiv 2502.16982, section 2.2."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self.momentum, self.num_steps = table.get("momentum", 0.95), table.get("newton_schulz_steps", 5)
        self.decay = table.get("weight_decay", 0.1)
        self.adamw, self.ratio = _AdamW(table), table.get("adamw_lr", table["lr"]) / table["lr"]
        self.num_heads = 0  # 0: no matrix is split
        self.state: dict[str, Tensor] = {}

    def update(self, name: str, value: Tensor, gradient: Tensor, lr: float) -> None:
        if value.ndim < 2 or not (".layers." in name or ".h." in name):
            self.adamw.update(name, value, gradient, lr * self.ratio)
            return
        momentum = self.momentum * self.state.get(name, torch.zeros_like(value)) + gradient
        self.state[name] = momentum
        direction = self._direction(name, gradient + self.momentum * momentum)
        value -= lr * (direction + self.decay * value)

    def _direction(self, name: str, matrix: Tensor) -> Tensor:
        if ".experts." in name:  # (experts, outputs of gate and up, or of down, inputs)
            number = 2 if name.endswith("gate_up_proj") else 1
            of_experts = ([self._orthogonal(part) for part in each.chunk(number)] for each in matrix)
            return torch.stack([torch.cat(each) for each in of_experts])
        if self.num_heads and ".c_attn." in name:  # GPT-2: (inputs, query key value)
            return torch.cat([self._orthogonal(part) for part in matrix.chunk(3, dim=1)], dim=1)
        if self.num_heads and ".query_key_value." in name:  # GPT-NeoX: (heads, query key value, size of a head, inputs)
            parts = matrix.view(self.num_heads, 3, -1, matrix.shape[1]).unbind(1)
            found = [self._orthogonal(part.flatten(0, 1)).view_as(part) for part in parts]
            return torch.stack(found, dim=1).view_as(matrix)
        return self._orthogonal(matrix)

    def _orthogonal(self, matrix: Tensor) -> Tensor:
        wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
        wide = wide / (wide.norm() + 1e-7)
        for _ in range(self.num_steps):
            gram = wide @ wide.T
            wide = 3.4445 * wide + (-4.7750 * gram + 2.0315 * gram @ gram) @ wide
        orthogonal = wide if matrix.shape[0] <= matrix.shape[1] else wide.T
        scaled: Tensor = 0.2 * math.sqrt(max(matrix.shape)) * orthogonal
        return scaled


class _Sgd:
    """Steps against the gradient, with heavy-ball momentum where it is asked for; decoupled decay of matrices alone."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self.momentum, self.decay = table.get("momentum", 0.0), table.get("weight_decay", 0.1)
        self.state: dict[str, Tensor] = {}

    def update(self, name: str, value: Tensor, gradient: Tensor, lr: float) -> None:
        direction = gradient
        if self.momentum:
            direction = self.momentum * self.state.get(name, torch.zeros_like(value)) + gradient
            self.state[name] = direction
        if value.ndim > 1:
            direction = direction + self.decay * value
        value -= lr * direction


Optimizer = _AdamW | _Lion | _Muon | _Sgd

_OPTIMIZERS: dict[str, Callable[[Mapping[str, Any]], Optimizer]] = {
    "adamw": _AdamW,
    "lion": _Lion,
    "muon": _Muon,
    "sgd": _Sgd,
}


def optimizer_of(table: Mapping[str, Any]) -> Optimizer:
    """The plain optimizer of a table with the keys of `[optimizer]` in docs/optimizers.md."""
    return _OPTIMIZERS[table.get("name", "adamw")](table)
