"""Configuration of a model's mixtures of experts. Needs no torch.

Instead of one MLP, such a layer has E experts (gated MLPs), of which every token uses k, and a router that scores all
experts (Shazeer et al. 1701.06538). A gate (terrace.model.experts.gates) chooses experts by score and computes weights.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from terrace.base.errors import ModelError, did_you_mean

Gate = Literal["softmax", "sigmoid", "noisy", "cosine", "expert_choice"]
Route = Literal["gate", "even"]
_MOST_EXPERTS = 2**16  # each has its own tensors in files
GATE_BIAS = "mlp.router.bias"  # always at least fp32, as its updates would be rounded away in 16 bits


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Configuration shared by all mixtures of a model, and the layers that have an MLP instead."""

    num_experts: int
    per_token: int  # experts per token: k
    intermediate_size: int  # of one expert
    gate: Gate = "softmax"
    router_size: int = 0  # dims that the gate "cosine" projects a token to; 0 for all others
    shares_choices: bool = False  # set by a run whose sequence loss needs whole sequences
    route: Route = "gate"  # "even": for benchmarks, experts depend only on a token's index on its rank
    normalized: bool = True  # divide the weights of a token's experts by their sum
    scale: float = 1.0  # factor of the weights, after normalisation
    num_groups: int = 1  # groups of adjacent experts; a token uses experts of `kept_groups` of them
    kept_groups: int = 1
    biased: bool = False  # bias of the choice, not of weights; updated by load, not by an optimizer (2408.15664)
    has_biases: bool = False  # of the router's logits, and of every expert's gate, up and down
    shared_size: int = 0  # inner size of the shared expert, which every token passes; 0: none
    shared_gate: bool = False  # multiply the output of the shared expert by a sigmoid gate of the token
    dense_layers: tuple[int, ...] = ()  # layers with an MLP, ascending

    def check(self, num_layers: int, names: Mapping[str, str]) -> None:
        """Raise `ModelError` for invalid values. `names` maps fields to the keys of the file, for messages."""

        def given(field: str) -> str:
            return f"{names.get(field, field)} = {getattr(self, field)}"

        for field in ("num_experts", "per_token", "intermediate_size", "num_groups", "kept_groups"):
            if not 1 <= getattr(self, field) < 2**31:
                raise ModelError(f"{given(field)} must be at least 1 and below {2**31}")
        if self.num_experts > _MOST_EXPERTS:
            raise ModelError(f"{given('num_experts')} must be at most {_MOST_EXPERTS}")
        if not 0 <= self.shared_size < 2**31:
            raise ModelError(f"{given('shared_size')} must be at least 0 and below {2**31}")
        if self.gate not in get_args(Gate):
            raise ModelError(f"{given('gate')} is not implemented{did_you_mean(self.gate, get_args(Gate))}")
        self._check_gate(given)
        if not 0 < self.scale < 1e30:
            raise ModelError(f"{given('scale')} must be positive and finite")
        if self.num_experts % self.num_groups:
            raise ModelError(f"{given('num_groups')} does not divide {given('num_experts')}: change one of them")
        if self.num_groups > 1 and self.num_experts < 2 * self.num_groups:
            fitting = max(each for each in range(1, self.num_experts // 2 + 1) if self.num_experts % each == 0)
            raise ModelError(
                f"{given('num_groups')} of {given('num_experts')} leaves a group fewer than the two experts by which "
                f"it is chosen: use at most {fitting}"
            )
        if self.kept_groups > self.num_groups:
            raise ModelError(f"{given('kept_groups')} must be at most {given('num_groups')}")
        reachable = self.num_experts // self.num_groups * self.kept_groups
        if self.per_token > reachable:
            where = f" in {given('kept_groups')} of {given('num_groups')}" if self.num_groups > 1 else ""
            raise ModelError(
                f"{given('per_token')} must be at most the {reachable} experts{where} that a token can choose from"
            )
        if self.num_groups > 1 and self.gate != "sigmoid":
            raise ModelError(
                f"{given('num_groups')}: groups of experts are of gate = 'sigmoid', not of {given('gate')}"
            )
        self._check_layers(num_layers, names)

    @property
    def is_noncausal(self) -> bool:
        """Whether the experts of a token depend on later tokens."""
        return self.gate == "expert_choice"

    @property
    def num_choices(self) -> int:
        """Columns of a token's choices: k, or E with expert choice."""
        return self.num_experts if self.gate == "expert_choice" else self.per_token

    def _check_gate(self, given: Callable[[str], str]) -> None:
        if (self.router_size > 0) != (self.gate == "cosine") or not 0 <= self.router_size < 2**31:
            raise ModelError(
                f'{given("router_size")} with {given("gate")}: the gate "cosine" projects tokens to 1 or more dims, '
                "and no other gate does"
            )
        if self.route not in get_args(Route):
            raise ModelError(f"{given('route')} is not implemented{did_you_mean(self.route, get_args(Route))}")
        if self.route == "even" and self.is_noncausal:
            raise ModelError(f"{given('route')} has tokens choose: leave it out with {given('gate')}")
        if self.gate == "noisy" and not self.normalized:
            raise ModelError(f"{given('normalized')}: the weights of {given('gate')} sum to 1; set it to true")
        if self.has_biases and self.gate not in ("softmax", "sigmoid"):
            raise ModelError(f"{given('has_biases')}: {given('gate')} has no bias of logits; use 'softmax'")
        if self.gate == "expert_choice" and (self.normalized or self.biased):
            field = "normalized" if self.normalized else "biased"
            raise ModelError(f"{given(field)}: {given('gate')} has the scores themselves as weights; set it to false")

    def _check_layers(self, num_layers: int, names: Mapping[str, str]) -> None:
        wrong = [layer for layer in self.dense_layers if not 0 <= layer < num_layers]
        if wrong:
            raise ModelError(
                f"{names.get('dense_layers', 'dense_layers')} names layer {wrong[0]} of {num_layers}, counted from 0"
            )
        if len(self.dense_layers) == num_layers:
            raise ModelError(
                f"{names.get('dense_layers', 'dense_layers')} leaves no layer its experts: "
                "name fewer, or use the dense model of the family"
            )
