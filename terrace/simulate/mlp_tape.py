"""Operations of a layer's MLP, or of the mixture of experts in its place, for `terrace.simulate.tape`.

With T tokens, hidden size H, k of E experts a token, N = T k rows and inner size I, a mixture keeps for its backward

    rows (N, H); gate, up, act(gate), the product of the last two and that times the weight, each (N, I); weights (N)
    in fp32 at least: the router's input (T, H) and matrix where these are narrower, scores (T, E), chosen scores (T, k)
    in int64: the chosen experts, the order of the choices and the place of each, (T, k) each

Where every rank holds all experts, N is the same whatever the gate chooses: a skewed load takes longer, but no more
memory. With e ranks that hold different experts, each cut over w ranks, a rank multiplies

    N = w T k load rows of inner size I/w, and gets A = w T D(e) load tokens for them (terrace.plan.expert_traffic)

    at worst w e T min(k, E/e) rows of w e T tokens: all choices of all ranks fall on its experts

and keeps of each token that it got the place of every choice, and on the way the row that it was. Under tensor rows T
is the part of the tokens that a rank routes.
"""

import math

from terrace.model.experts.config import ExpertsConfig
from terrace.plan.expert_traffic import mean_units
from terrace.simulate.block_tape import BlockTape
from terrace.simulate.work import Work

_INDEX_BYTES = 8


def rows_of(work: Work, experts: ExpertsConfig) -> tuple[int, int]:
    """(Tokens that a rank gets for its experts, rows that these multiply) in a micro-batch; none under a load of 0."""
    tokens, per_token, ranks = work.routed, experts.per_token, work.expert
    if not work.load:
        return 0, 0
    if ranks * work.expert_rows == 1:
        return tokens, tokens * per_token
    most = work.expert_rows * ranks * tokens
    load = min(work.load, worst_load(work, experts)) if ranks > 1 else 1.0
    arrived = most // ranks * load * mean_units(experts.num_experts, per_token, ranks)
    return min(most, math.ceil(arrived)), math.ceil(most // ranks * load * per_token)


def worst_load(work: Work, experts: ExpertsConfig) -> float:
    """Rows of a rank's experts over their mean where all choices of all ranks fall on them."""
    return work.expert * min(experts.per_token, experts.num_experts // work.expert) / experts.per_token


class MlpTape(BlockTape):
    """A block's tape with the operations of terrace.model.layers.MLP and terrace.model.experts.mixture."""

    def _mlp(self, source: str, target: str, of: str = "") -> None:
        # Both matrices are cut by rows and columns; the inner tensors only by rows.
        weight, inner = self.inner * self.hidden, self.work.tokens * self.inner * self.item
        up, gate, active, product = (f"{of}{name}" for name in ("up", "gate", "active", "product"))
        self.sizes |= dict.fromkeys((up, gate, active, product), inner)
        beside = self.gathered_beside
        self._product(up, source, up, weight, whole=beside)
        if self.work.model.gated_mlp:
            self._product(gate, source, gate, weight, whole=beside)
            self._activation(f"{of}activation", gate, active)
            self._add(f"{of}gating", (active, up), product, (active, up))
            self._product(f"{of}down", product, target, weight, (source, up), self.whole)
        else:
            self._activation(f"{of}activation", up, active)
            self._product(f"{of}down", active, target, weight, (source, up), self.whole)

    def _activation(self, name: str, source: str, target: str) -> None:
        # relu's gradient needs its result alone, which the next operation keeps anyway.
        self._add(name, (source,), target, (target if self.work.model.activation == "relu" else source,))

    def _mixture(self, source: str, target: str) -> None:
        experts = self.work.model.experts
        assert experts is not None, "a layer without experts is no mixture"
        work, weights = self.work, self._weights(source, experts)
        tokens, rows = rows_of(work, experts)
        is_spread = work.expert * work.expert_rows > 1
        inner = rows * -(-experts.intermediate_size // work.expert_rows) * self.item
        hidden, token = rows * self.hidden * self.item, tokens * self.hidden * self.item
        self.sizes |= {"rows": hidden, "expert outputs": hidden, "weight of rows": rows * self.wide}
        self.sizes |= dict.fromkeys(("gate", "active", "up", "inner", "product"), inner)
        self.sizes |= {"order": rows * _INDEX_BYTES, "places": tokens * experts.num_choices * _INDEX_BYTES}
        places, source_of_rows = self.sizes["places"], source
        # Tensors that variables hold to the end of the mixture.
        held: tuple[str, ...] = (weights, "experts", "order", "places", "rows", "inner")
        if is_spread:
            of_token = experts.num_choices * (self.wide + _INDEX_BYTES)
            self.sizes |= {"tokens": token, "their choices": tokens * of_token, "way": tokens * _INDEX_BYTES}
            source_of_rows, held = "tokens", (*held, "tokens", "their choices")
            # Rows leave and arrive as bytes, and are put in order: what is sent, what arrives, and both together.
            adds = 3 * token + self.sizes["their choices"]
            self._add("way to experts", (source,), "tokens", ("their choices", "way"), adds, 2 * token + token)
        self._add("spread", (source_of_rows,), "rows", ("places",), places, hidden + places)
        self._stack("gate", "rows", "gate")
        self._activation("activation", "gate", "active")
        self._stack("up", "rows", "up")
        self._add("gating", ("active", "up"), "inner", ("active", "up"))
        self._add("weights", (weights,), "weight of rows", ("order",))
        weight = "weight of rows"
        if self.wide > self.item:
            weight = "rounded weight of rows"
            self.sizes[weight] = rows * self.item
            self._add("round weights", ("weight of rows",), weight)
        self._add("weighing", ("inner", weight), "product", ("inner", weight), backward_adds=inner)
        held = (*held, weight)
        self._stack("down", "product", "expert outputs", held)
        output = "experts output" if experts.shared_size else target
        # Of whole tokens each tensor row has routed a part.
        part = "part of the tokens" if self.cut < work.rows else output
        self.sizes |= {output: self.residual * self.item, part: work.routed * self.hidden * self.item}
        collected = "collected" if is_spread else part
        self.sizes[collected] = token
        adds = hidden
        if is_spread:  # summed in fp32 at least, one choice of all tokens after the other
            column = hidden // experts.per_token // self.item
            wider = self.wide if self.wide > self.item else 0
            adds = tokens * self.hidden * self.wide + column * (self.item + wider)
        self._add("collect", ("expert outputs",), collected, (), adds, places, variables=(*held, source))
        if is_spread:
            adds = 2 * token + work.routed * self.hidden * self.wide
            self._add("way back", (collected,), part, (), adds, 3 * token, variables=(*held, source))
        if part != output:
            self._add("gather of experts", (part,), output, variables=(*held, source))
        if experts.shared_size:
            self._shared(source, output, target, experts, held)

    def _stack(self, name: str, source: str, target: str, variables: tuple[str, ...] = ()) -> None:
        # The gradient of a stack is written where it is kept (terrace.runtime.weight_records).
        self._product(name, source, target, 0, variables)

    def _weights(self, source: str, experts: ExpertsConfig) -> str:
        """Router and gate; the name of the weights (T, k)."""
        tokens, router = self.work.routed, experts.num_experts * self.work.model.hidden_size
        scores, chosen = tokens * experts.num_experts * self.wide, tokens * experts.num_choices * self.wide
        self.sizes |= {"logits": scores, "scores": scores, "chosen": chosen, "sums": tokens * self.wide}
        self.sizes |= {"experts": tokens * experts.num_choices * _INDEX_BYTES, "weights": chosen, "scaled": chosen}
        keeps: tuple[str, ...] = (source,)
        if self.wide > self.item:
            self.sizes |= {"wide input": tokens * self.work.model.hidden_size * self.wide, "router": router * self.wide}
            self.fixed_bytes = self.sizes["router"]
            keeps = ("wide input", "router")
            self._add("widen", (source,), "wide input")
        self._add("router", (keeps[0],), "logits", keeps, backward_adds=router * self.wide)
        self._add("gate's scores", ("logits",), "scores", ("scores",))
        # What chooses: with bias, without the groups dropped, and sorted.
        ranked = scores * (1 + experts.biased + (experts.num_groups > 1)) + tokens * experts.num_experts * _INDEX_BYTES
        self._add("choice", ("scores",), "chosen", ("experts",), forward_adds=ranked)
        weights = "chosen"
        if experts.normalized:
            self._add("normalising", ("chosen",), "weights", ("chosen", "sums"), backward_adds=chosen)
            weights = "weights"
        if experts.scale != 1.0:
            self._add("scaling", (weights,), "scaled")
            weights = "scaled"
        return weights

    def _shared(self, source: str, output: str, target: str, experts: ExpertsConfig, held: tuple[str, ...]) -> None:
        self.sizes["shared output"] = self.sizes[output]
        self._mlp(source, "shared output", "shared ")
        shared = "shared output"
        if experts.shared_gate:
            numbers = self.work.stream_tokens * self.item
            self.sizes |= {"gate of shared": numbers, "share of shared": numbers, "gated output": self.sizes[output]}
            self._product("gate of shared", source, "gate of shared", self.hidden)
            self._add("share of shared", ("gate of shared",), "share of shared", ("share of shared",))
            keeps = ("share of shared", "shared output")
            self._add("gating of shared", keeps, "gated output", keeps, backward_adds=self.sizes[output])
            shared = "gated output"
        self._add("sum of experts", (output, shared), target, (), is_sum=True, variables=(*held, source))
