"""A mixture of experts in place of a layer's MLP, on one device.

    y = sum over the chosen i of g_i down_i(act(gate_i(x)) * up_i(x))   + shared(x), times sigmoid(shared_gate(x))

Scores, choices and weights are computed in at least fp32. The weight g is applied to the input of `down`, and to its
bias if it has one, so that the outputs of experts are not saved for the backward. No token is dropped here.

Shape legend: B batch, S sequence, H hidden, T = B S tokens, E experts, I inner size of an expert, k experts of a token,
N = T k rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terrace.model.config import ModelConfig
from terrace.model.experts.gates import NO_SCORES, Choice, cosine, even, expert_choice, noisy, sigmoid, softmax
from terrace.model.experts.gating import Gating, Passage
from terrace.model.grouped import Order, add_biases, collect, grouped_linear, spread
from terrace.model.layers import MLP, gated_by

_SENT, _RECEIVED, _MULTIPLIED = -3, -2, -1  # indices after the experts' counters


class Tally:
    """Adds counts of a step to `numbers` (E + 3), int64. Without `numbers` it stays closed and counts nothing.

    It is open only during the first forward of a training micro-batch: recomputation and evaluation are not counted.
    """

    def __init__(self, numbers: Tensor | None = None) -> None:
        self._numbers, self.is_open = torch.empty(0) if numbers is None else numbers, False

    def choose(self, experts: Tensor) -> None:
        """Count choices (T, k); -1 is none."""
        if self.is_open:
            flat = experts.flatten()
            self._numbers.scatter_add_(0, flat.clamp(min=0), (flat >= 0).to(torch.int64))

    def move(self, sent: int, received: int) -> None:
        """Count rows that left this rank for their experts, and rows that arrived."""
        if self.is_open:
            self._numbers[_SENT] += sent
            self._numbers[_RECEIVED] += received

    def multiply(self, counts: Sequence[int]) -> None:
        """Count the rows of each expert that this rank multiplied."""
        if self.is_open:
            self._numbers[_MULTIPLIED] += sum(counts)


# Gates where tokens choose; noisy and cosine differ from softmax only in the logits.
GATES = {"softmax": softmax.choose, "sigmoid": sigmoid.choose, "noisy": softmax.choose, "cosine": softmax.choose}


class Router(nn.Module):
    """Scores all experts for every token and applies the gate."""

    def __init__(self, config: ModelConfig, **where: Any) -> None:
        super().__init__()
        self.config = config.own_experts
        num_experts, hidden, size = self.config.num_experts, config.hidden_size, self.config.router_size
        self.weight = nn.Parameter(torch.empty(num_experts, size or hidden, **where))
        self.logit_bias: nn.Parameter | None = None
        if self.config.has_biases:
            self.logit_bias = nn.Parameter(torch.empty(num_experts, **where))
        if self.config.gate == "noisy":
            self.noise = nn.Parameter(torch.empty(num_experts, hidden, **where))
        if self.config.gate == "cosine":
            self.projection = nn.Parameter(torch.empty(size, hidden, **where))
            self.temperature = nn.Parameter(torch.empty(1, **where))
        self.bias: nn.Parameter | None = None
        if self.config.biased:
            self.bias = nn.Parameter(torch.empty(num_experts, **where), requires_grad=False)
        self.gating: Gating | None = None
        self.layer = 0  # index of its block in the model

    def forward(self, x: Tensor, passage: Passage) -> Choice:
        """Choose experts for the routed tokens x (T, H)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        logits, gating = self._logits(x.to(wide), passage), self.gating  # (T, E)
        choice = self._chosen(logits, passage, None if gating is None else gating.replayed())
        if gating is not None:
            chosen, kept = choice.experts, gating.kept
            choice = gating.balanced(choice, logits, passage, self.config, self.layer)
            if kept is not None and kept.experts is None:
                kept.keep(chosen, choice.experts)
        return choice._replace(scores=NO_SCORES)  # frees the scores before the experts run

    def _chosen(self, logits: Tensor, passage: Passage, replayed: Tensor | None) -> Choice:
        config = self.config
        if config.gate == "expert_choice":
            return expert_choice.choose(logits, passage.sequences, passage.num_sequences, config, replayed)
        bias = None if self.bias is None else self.bias.to(logits.dtype)
        if replayed is not None:
            replayed = torch.where(replayed < 0, ~replayed, replayed)  # undo the marks of dropped choices
        choice = GATES[config.gate](logits, bias, config, replayed)
        return even.instead(choice, config) if config.route == "even" else choice

    def _logits(self, x: Tensor, passage: Passage) -> Tensor:
        weight = self.weight.to(x.dtype)
        if self.config.gate == "noisy":
            noise = None if self.gating is None else self.gating.noise(self.layer, passage, len(weight))
            return noisy.logits(x, weight, self.noise.to(x.dtype), noise)
        if self.config.gate == "cosine":
            return cosine.logits(x, self.projection.to(x.dtype), weight, self.temperature.to(x.dtype))
        return F.linear(x, weight, None if self.logit_bias is None else self.logit_bias.to(x.dtype))


class Stack(nn.Module):
    """One linear layer per expert; `weight` is (E, O, I), `bias` (E, O)."""

    def __init__(self, num_experts: int, inputs: int, outputs: int, has_bias: bool, **where: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, outputs, inputs, **where))
        self.bias = nn.Parameter(torch.empty(num_experts, outputs, **where)) if has_bias else None

    def forward(self, x: Tensor, order: Order, weights: Tensor | None = None) -> Tensor:
        """Rows x (N, I), sorted by expert, to (N, O). The bias of a row is multiplied by its weight, from (N)."""
        y = grouped_linear(x, self.weight, order.counts)
        return y if self.bias is None else add_biases(y, self.bias, order.counts, weights)


# (module, routed tokens (T, H), their choice, all tokens) -> weighted sums of expert outputs (T, H), and the output of
# the shared expert for all tokens if `overlaps_shared`
Spread = Callable[["Mixture", Tensor, Choice, Tensor], tuple[Tensor, Tensor | None]]


def here(mixture: "Mixture", tokens: Tensor, choice: Choice, all_tokens: Tensor) -> tuple[Tensor, None]:
    """The `Spread` for experts that are all on this rank."""
    passed: Tensor = (mixture.pass_through if mixture.joined is None else mixture.joined)(tokens, choice)
    return passed, None


class Mixture(nn.Module):
    """A router with its experts, and optionally a shared expert; (B, S, H) to (B, S, H).

    `spread` dispatches tokens to their experts, on other ranks or `here`, calls `pass_through` there and combines the
    results; with `overlaps_shared` it also calls `pass_shared`, to overlap with communication. `tally` counts choices
    and rows.
    """

    def __init__(self, config: ModelConfig, **where: Any) -> None:
        super().__init__()
        experts, hidden = config.own_experts, config.hidden_size
        self.spread: Spread = here
        self.tally = Tally()
        self.overlaps_shared = False
        self.gated = gated_by(config.activation)
        self.router = Router(config, **where)
        inner, has_biases = experts.intermediate_size, experts.has_biases
        self.gate = Stack(experts.num_experts, hidden, inner, has_biases, **where)
        self.up = Stack(experts.num_experts, hidden, inner, has_biases, **where)
        self.down = Stack(experts.num_experts, inner, hidden, has_biases, **where)
        # Replaces `pass_through` if terrace.model.arranged has joined the experts' matrices.
        self.joined: nn.Module | None = None
        self.shared: MLP | None = None
        self.shared_gate: nn.Linear | None = None
        if experts.shared_size:
            self.shared = MLP(replace(config, intermediate_size=experts.shared_size), **where)
        if experts.shared_gate:
            self.shared_gate = nn.Linear(hidden, 1, bias=False, **where)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the mixture to x (B, S, H)."""
        if self.router.config.is_noncausal and self.router.gating is None:
            output = torch.stack([self.routed(row) for row in x])
        else:
            output = self.routed(x.flatten(0, -2)).view_as(x)
        return output if self.shared is None or self.overlaps_shared else output + self.pass_shared(x)

    def pass_shared(self, x: Tensor) -> Tensor:
        """Output of the shared expert, times its gate if there is one."""
        assert self.shared is not None, "the layer has a shared expert"
        shared: Tensor = self.shared(x)
        return shared if self.shared_gate is None else self.shared_gate(x).sigmoid() * shared

    def routed(self, tokens: Tensor) -> Tensor:
        """Output (T, H) of the routed experts for tokens (T, H); zero for tokens that are not routed.

        Without a `gating` set by the runtime, all tokens are routed and form one sequence.
        """
        gating = self.router.gating
        passage = None if gating is None else gating.passage
        if passage is None:
            # Only expert choice needs the sequences of tokens.
            asks, row = self.router.config.is_noncausal, torch.Size((1, len(tokens)))
            passage = Passage.of_rows(row, tokens.device) if asks else Passage(None)
        kept = passage.kept
        taking = tokens if kept is None else tokens.index_select(0, kept)
        choice = self.router(taking, passage)
        self.tally.choose(choice.experts)
        passed, shared = self.spread(self, taking, choice, tokens)
        if kept is not None:
            passed = torch.zeros_like(tokens).index_copy(0, kept, passed)
        return passed if shared is None else passed + shared

    def pass_through(self, tokens: Tensor, choice: Choice) -> Tensor:
        """Weighted sum (T, H) of the outputs of this module's experts for tokens (T, H)."""
        order = Order.of(choice.experts, len(self.down.weight), is_whole=choice.is_whole)
        self.tally.multiply(order.counts)
        rows = spread(tokens, order)  # (N, H)
        inner = self.gated(self.gate(rows, order), self.up(rows, order))  # (N, I)
        weights = choice.weights.flatten().index_select(0, order.choices).to(inner.dtype)
        # Ranks that cut an expert add up their results, so each adds its part of the bias.
        part = self.down.weight.shape[2] / self.router.config.intermediate_size
        shares = weights if part == 1.0 else weights * part
        return collect(self.down(inner * weights.unsqueeze(-1), order, shares), order)
