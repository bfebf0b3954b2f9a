"""Converts a dense model to a mixture of experts that computes the same function (sparse upcycling, 2212.05055).

Every MLP becomes N copies of itself. The weights of a token's copies sum to 1, so the output equals that of the MLP for
any router; the copies diverge in training. Each copy can be split into G experts, and a token then uses G times as
many: equal router rows keep the parts of a copy together, and their down projections are multiplied by G (fine-grained
upcycling with virtual groups, 2410.07524). If the family has a shared expert, it is a copy too: its gate is zero, so
that it has the weight 0.5, and the other experts are multiplied by 0.5.

Shape legend: N copies, G parts of a copy, E = N G experts, I inner size of the MLP, H hidden.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from terrace.base.errors import ModelError
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig, to_table
from terrace.model.experts.config import ExpertsConfig
from terrace.model.init import initial_value

TARGETS: Mapping[str, str] = {"llama": "mixtral", "mistral": "mixtral", "qwen2": "qwen2_moe", "qwen3": "qwen3_moe"}


@dataclass(frozen=True, kw_only=True)
class Upcycling:
    """Options of the conversion. Raises `ModelError` for values out of range."""

    num_copies: int  # of every MLP
    per_token: int = 2  # copies that a token uses
    num_parts: int = 1  # experts per copy
    noise: float = 0.02  # standard deviation of the router's rows
    seed: int = 0

    def __post_init__(self) -> None:
        for name, option in (("num_copies", "--experts"), ("per_token", "--per-token"), ("num_parts", "--parts")):
            if not 1 <= getattr(self, name) < 2**31:
                raise ModelError(f"{option} {getattr(self, name)} must be at least 1 and below {2**31}")
        if self.per_token > self.num_copies:
            raise ModelError(f"--per-token {self.per_token} must be at most --experts {self.num_copies}")
        # With equal router rows every token would use the same copies, and the others would never be trained.
        if not 0 < self.noise < 1e30:
            raise ModelError(
                f"--noise {self.noise} must be positive and below 1e30: by these rows the copies get different tokens"
            )
        if not 0 <= self.seed < 2**63:
            raise ModelError(f"--seed {self.seed} must be at least 0 and below 2^63")

    def config_of(self, dense: ModelConfig) -> ModelConfig:
        """Configuration of the mixture, in a family that supports it.

        Raises `ModelError` if there is no such family, or `num_parts` does not divide the inner size of the MLP.
        """
        family = TARGETS.get(dense.family)
        if dense.experts is not None:
            raise ModelError(f"a {dense.family} model has experts already: upcycle a dense one")
        if family is None:
            known = ", ".join(f"{source} ({target})" for source, target in TARGETS.items())
            raise ModelError(f"no family of mixtures has the layers of {dense.family}: upcycle one of {known}")
        if dense.mlp_bias:
            raise ModelError("the model's MLPs have biases, and experts have none: mlp_bias must be false")
        inner = dense.intermediate_size
        if inner % self.num_parts:
            raise ModelError(f"--parts {self.num_parts} does not divide the MLP's intermediate_size = {inner}")
        size, shared = inner // self.num_parts, family == "qwen2_moe"
        experts = ExpertsConfig(
            num_experts=self.num_copies * self.num_parts,
            per_token=self.per_token * self.num_parts,
            intermediate_size=size,
            shared_size=inner if shared else 0,
            shared_gate=shared,
        )
        # Mixtral has one key for both sizes; in other families this is the size of dense layers, and there are none.
        made = replace(dense, family=family, experts=experts, intermediate_size=size if family == "mixtral" else inner)
        try:
            to_table(made)
        except ModelError as error:
            raise ModelError(
                f"no family of mixtures has this {dense.family} model with experts: {error}; upcycle another model"
            ) from error
        return made

    def values(self, dense: ModelConfig, value: Callable[[str, str], Tensor]) -> Callable[[str, str], Tensor]:
        """Values of the mixture, by (block, parameter), computed from those of the dense model."""
        made = self.config_of(dense)
        routers = replace(made, init_std=self.noise)
        shapes = {(block.name, param.name): param.shape for block in block_specs(made) for param in block.params}

        def upcycled(block: str, param: str) -> Tensor:
            if param == "mlp.router.weight":
                rows = (self.num_copies, made.hidden_size)
                return initial_value(routers, block, param, rows, self.seed).repeat_interleave(self.num_parts, 0)
            if param == "mlp.shared_gate.weight":
                return torch.zeros(shapes[block, param])
            if len(shapes[block, param]) == 3:
                return self._experts(value(block, param), param, made)
            return value(block, param.replace("mlp.shared.", "mlp."))

        return upcycled

    def _experts(self, matrix: Tensor, param: str, made: ModelConfig) -> Tensor:
        if param == "mlp.down.weight":
            parts = torch.stack(matrix.chunk(self.num_parts, 1))  # (G, H, I / G)
            parts = parts * (self.num_parts * (0.5 if made.own_experts.shared_size else 1.0))
        else:
            parts = torch.stack(matrix.chunk(self.num_parts, 0))  # (G, I / G, H)
        return parts.repeat(self.num_copies, 1, 1)
