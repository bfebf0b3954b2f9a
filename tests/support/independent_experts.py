"""Mixtures of experts for the independent reference: one token after the other, one expert after the other, in fp64.

It shares no code with Terrace and was written from docs/experts.md and the papers named there. A `PlainMixture` takes
the place of the layer of `transformers`, whose gates go through fp32. Nothing is sorted into rows, nothing dispatched.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

LAYERS = ("SparseMoeBlock", "MoeMoE")  # how the names of layers with experts end
BIAS = "e_score_correction_bias"

Chosen = list[list[tuple[int, Tensor]]]  # of each token, its experts and their weights


@dataclass
class Routing:
    """The document that runs, for the mixtures of a model; the sums of their losses, and the choices dropped."""

    balance: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    first_place: int = 0  # of the document's first token among all tokens of the run
    counts: bool = True  # whether the document has a label: no other takes part
    losses: dict[str, Tensor] = field(default_factory=dict)
    dropped: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """The losses of routers that are on."""
        return tuple(name for name in ("sequence", "z") if self.balance.get(name))

    def begin(self, *, counts: bool) -> None:
        self.counts = counts
        self.losses = {name: torch.zeros(()).double() for name in self.names}

    def end(self, num_tokens: int) -> None:
        self.first_place += num_tokens


class PlainMixture:
    """The forward of a layer of `transformers` with experts, by a gate of docs/experts.md."""

    def __init__(self, module: Any, config: Mapping[str, Any], layer: int, routing: Routing) -> None:
        self.module, self.layer, self.routing = module, layer, routing
        self.gate = str(config.get("gate", "softmax"))
        self.groups = int(config.get("n_group", 1)), int(config.get("topk_group", 1))
        self.scale = float(config.get("routed_scaling_factor", 1.0))
        self.divides = bool(config.get("norm_topk_prob", config["model_type"] in ("mixtral", "glm4_moe")))
        if config["model_type"] == "glm4_moe":
            self.gate = "sigmoid"
        self.per_token, self.num_experts = int(config["num_experts_per_tok"]), len(module.experts.down_proj)
        self.bias: Tensor | None = getattr(module.gate, BIAS, None)
        self.tokens_of_experts = [0] * self.num_experts  # in the step
        self._add_parameters(config)

    def _add_parameters(self, config: Mapping[str, Any]) -> None:
        router = self.module.gate
        hidden, size = router.weight.shape[1], int(config.get("router_size") or max(1, self.num_experts // 2))
        if self.gate == "noisy":
            router.noise = nn.Parameter(0.2 * torch.randn(self.num_experts, hidden, dtype=torch.float64))
        if self.gate == "cosine":
            router.weight = nn.Parameter(torch.randn(self.num_experts, size, dtype=torch.float64))
            router.projection = nn.Parameter(torch.randn(size, hidden, dtype=torch.float64))
            router.temperature = nn.Parameter(torch.full((1,), math.log(0.3), dtype=torch.float64))
        if self.bias is not None:
            self.bias.copy_(0.1 * torch.randn(self.num_experts))

    def __call__(self, hidden: Tensor) -> Tensor:
        tokens = hidden[0]
        logits = [self._logits(token, self.routing.first_place + place) for place, token in enumerate(tokens)]
        chosen = self._bounded(self._chosen(logits))
        if self.routing.counts:
            self._count(logits, chosen)
        return torch.stack([self._passed(token, each) for token, each in zip(tokens, chosen[1], strict=True)])[None]

    def _logits(self, token: Tensor, place: int) -> Tensor:
        router = self.module.gate
        if self.gate == "cosine":
            projected = router.projection @ token
            cosines = [projected @ row / projected.norm() / row.norm() for row in router.weight]
            logits: Tensor = torch.stack(cosines) / router.temperature.exp()
            return logits
        logits = router.weight @ token
        if self.gate == "noisy" and self.routing.counts:
            drawn = noise(self.routing.seed, self.layer, place, self.num_experts)
            logits = logits + torch.tensor(drawn, dtype=torch.float64) * softplus(router.noise @ token)
        return logits

    def _chosen(self, logits: Sequence[Tensor]) -> Chosen:
        if self.gate == "expert_choice":
            return self._by_experts([each.softmax(0) for each in logits])
        return [self._by_token(each) for each in logits]

    def _by_token(self, logits: Tensor) -> list[tuple[int, Tensor]]:
        scores = logits.sigmoid() if self.gate == "sigmoid" else logits.softmax(0)
        ranked = (scores.detach() + (0.0 if self.bias is None else self.bias)).tolist()
        size = self.num_experts // self.groups[0]
        of_groups = [sorted(ranked[group * size : (group + 1) * size])[-2:] for group in range(self.groups[0])]
        kept = sorted(range(self.groups[0]), key=lambda group: (-sum(of_groups[group]), group))[: self.groups[1]]
        allowed = [expert for expert in range(self.num_experts) if self.groups[0] == 1 or expert // size in kept]
        best = sorted(allowed, key=lambda expert: (-ranked[expert], expert))[: self.per_token]
        total = sum((scores[expert] for expert in best), torch.zeros(()).double()) if self.divides else 1.0
        return [(expert, self.scale * scores[expert] / total) for expert in best]

    def _by_experts(self, scores: Sequence[Tensor]) -> Chosen:
        found: Chosen = [[] for _ in scores]
        most = math.ceil(self.per_token * len(scores) / self.num_experts)
        for expert in range(self.num_experts):
            order = sorted(range(len(scores)), key=lambda place: (-float(scores[place][expert].detach()), place))
            for place in order[:most]:
                found[place].append((expert, scores[place][expert]))
        return found

    def _bounded(self, chosen: Chosen) -> tuple[Chosen, Chosen]:
        """The choices, and those within the capacity of the experts."""
        factor = self.routing.balance.get("capacity")
        if not factor or not self.routing.counts:
            return chosen, chosen
        most = math.ceil(round(factor * self.per_token * len(chosen) / self.num_experts, 9))
        kept: Chosen = [[] for _ in chosen]
        for expert in range(self.num_experts):
            takers = [(place, weight) for place, each in enumerate(chosen) for one, weight in each if one == expert]
            takers.sort(key=lambda each: (-float(each[1].detach()), each[0]))
            for place, weight in takers[:most]:
                kept[place].append((expert, weight))
            self.routing.dropped += max(0, len(takers) - most)
        return chosen, kept

    def _count(self, logits: Sequence[Tensor], chosen: tuple[Chosen, Chosen]) -> None:
        for each in chosen[1]:
            for expert, _ in each:
                self.tokens_of_experts[expert] += 1
        losses, balance = self.routing.losses, self.routing.balance
        if "z" in losses:
            losses["z"] = losses["z"] + balance["z"] * sum(each.logsumexp(0) ** 2 for each in logits)
        if "sequence" in losses:
            scores = [each.sigmoid() if self.gate == "sigmoid" else each.softmax(0) for each in logits]
            for expert in range(self.num_experts):
                choices = sum(one == expert for each in chosen[0] for one, _ in each)
                load = self.num_experts * choices / (self.per_token * len(scores))
                shares = torch.stack([each[expert] / each.sum() for each in scores]).sum()
                losses["sequence"] = losses["sequence"] + balance["sequence"] * load * shares

    def _passed(self, token: Tensor, chosen: Sequence[tuple[int, Tensor]]) -> Tensor:
        module, total = self.module, torch.zeros_like(token)
        for expert, weight in chosen:
            gate, up = (module.experts.gate_up_proj[expert] @ token).chunk(2)
            total = total + weight * (module.experts.down_proj[expert] @ (silu(gate) * up))
        shared = getattr(module, "shared_expert", None) or getattr(module, "shared_experts", None)
        if shared is None:
            return total
        result: Tensor = shared(token)
        if hasattr(module, "shared_expert_gate"):
            result = (module.shared_expert_gate.weight @ token).sigmoid() * result
        return total + result

    def end_step(self) -> None:
        """Move the bias by the tokens of the step (2408.15664, algorithm 1)."""
        mean, step = sum(self.tokens_of_experts) / self.num_experts, self.routing.balance.get("bias", 0.0)
        for expert, number in enumerate(self.tokens_of_experts):
            if self.bias is not None:
                self.bias[expert] += step * ((mean > number) - (mean < number))
        self.tokens_of_experts = [0] * self.num_experts


def use_plain_mixtures(model: nn.Module, config: Mapping[str, Any], routing: Routing) -> list[PlainMixture]:
    """Put plain mixtures in the place of the model's own; `config` is its table, `model_type` included."""
    found, layers = (
        [],
        [module for name, module in model.named_modules() if name.rpartition(".")[0].endswith(".layers")],
    )
    for layer, module in enumerate(layers, start=1):  # the embedding is block 0
        for inner in module.children():
            if type(inner).__name__.endswith(LAYERS):
                plain: Any = PlainMixture(inner, config, layer, routing)
                inner.forward = plain
                found.append(plain)
    return found


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by name, and the biases of gates, which are buffers."""
    biases = ((name, value) for name, value in model.named_buffers() if name.endswith(BIAS))
    return {name: value.detach() for name, value in (*model.named_parameters(), *biases)}


def to_files(model: nn.Module, family: str) -> dict[str, Tensor]:
    """The tensors of a Hugging Face folder: one for each expert and projection."""
    found = dict[str, Tensor]()
    for name, value in parameters_of(model).items():
        for index, parts in _file_names(name, value, family):
            whole = value if index is None else value[index]
            found |= dict(zip(parts, (part.contiguous() for part in whole.chunk(len(parts))), strict=True))
    return found


def from_files(tensors: Mapping[str, Tensor], like: nn.Module, family: str) -> dict[str, Tensor]:
    """The values of the parameters of `like` in the tensors of a folder."""
    found = {}
    for name, value in parameters_of(like).items():
        places = _file_names(name, value, family)
        parts = [torch.cat([tensors[each] for each in names]) for _, names in places]
        found[name] = parts[0] if places[0][0] is None else torch.stack(parts)
    return found


def _file_names(name: str, value: Tensor, family: str) -> list[tuple[int | None, list[str]]]:
    """(Index of the expert, names of the tensors that hold its rows); no index where a tensor holds all."""
    module, _, ending = name.rpartition(".")
    found: list[tuple[int | None, list[str]]] = [(None, [name])]
    if module.endswith("mlp.experts"):
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[ending]
        found = [(index, [f"{module}.{index}.{part}.weight" for part in parts]) for index in range(len(value))]
    return [(index, [_in_mixtral(each) if family == "mixtral" else each for each in names]) for index, names in found]


def _in_mixtral(name: str) -> str:
    for here, there in ((".gate_proj.", ".w1."), (".down_proj.", ".w2."), (".up_proj.", ".w3.")):
        name = name.replace(here, there)
    return name.replace(".mlp.", ".block_sparse_moe.")


def noise(seed: int, layer: int, place: int, num_experts: int) -> list[float]:
    """The normal numbers of a token's logits: splitmix64 (Steele et al. 2014), Box and Muller (1958)."""
    key = _mixed(_mixed(seed + _GOLDEN) + layer + _GOLDEN)
    found = []
    for expert in range(num_experts):
        counter = 2 * (place * num_experts + expert)
        one, other = (((_mixed(key + (counter + half) * _GOLDEN) >> 11) + 0.5) / 2**53 for half in (0, 1))
        found.append(math.sqrt(-2 * math.log(one)) * math.cos(2 * math.pi * other))
    return found


_GOLDEN, _MASK = 0x9E3779B97F4A7C15, 2**64 - 1


def _mixed(bits: int) -> int:
    bits &= _MASK
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
    return bits ^ (bits >> 31)
