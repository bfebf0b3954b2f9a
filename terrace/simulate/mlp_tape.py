"""Operations of a layer's MLP, or of the mixture of experts in its place, for `terrace.simulate.tape`.

With T tokens, hidden size H, k of E experts a token, N = T k rows and inner size I, a mixture keeps for its backward

    rows (N, H); gate, up, act(gate), the product of the last two and that times the weight, each (N, I); weights (N)
    in fp32 at least: the router's input (T, H) and matrix where these are narrower, scores (T, E), chosen scores (T, k)
    in int64: the chosen experts, the order of the choices and the place of each, (T, k) each

N is the same whatever the gate chooses, as every rank holds all experts: a skewed load takes longer, but no more
memory.
"""

from terrace.model.experts.config import ExpertsConfig
from terrace.simulate.block_tape import BlockTape

_INDEX_BYTES = 8


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
        tokens, rows = self.work.tokens, self.work.tokens * experts.per_token
        weights = self._weights(source, experts)
        hidden, inner = rows * self.hidden * self.item, rows * experts.intermediate_size * self.item
        self.sizes |= {"rows": hidden, "expert outputs": hidden, "weight of rows": rows * self.wide}
        self.sizes |= dict.fromkeys(("gate", "active", "up", "inner", "product"), inner)
        places = rows * _INDEX_BYTES
        self.sizes |= {"order": places, "places": places}
        self._add("spread", (source,), "rows", ("places",), forward_adds=places, backward_adds=hidden + places)
        stack = experts.num_experts * experts.intermediate_size * self.hidden
        self._product("gate", "rows", "gate", stack)
        self._activation("activation", "gate", "active")
        self._product("up", "rows", "up", stack)
        self._add("gating", ("active", "up"), "inner", ("active", "up"))
        self._add("weights", (weights,), "weight of rows", ("order",))
        weight = "weight of rows"
        if self.wide > self.item:
            weight = "rounded weight of rows"
            self.sizes[weight] = rows * self.item
            self._add("round weights", ("weight of rows",), weight)
        self._add("weighing", ("inner", weight), "product", ("inner", weight), backward_adds=inner)
        held = (weights, "experts", "order", "places", "rows", "inner", weight)  # by variables, to the end
        self._product("down", "product", "expert outputs", stack, held)
        output = "experts output" if experts.shared_size else target
        self.sizes[output] = tokens * self.hidden * self.item
        self._add("collect", ("expert outputs",), output, (), hidden, places, variables=(*held, source))
        if experts.shared_size:
            self._shared(source, output, target, experts, held)

    def _weights(self, source: str, experts: ExpertsConfig) -> str:
        """Router and gate; the name of the weights (T, k)."""
        tokens, router = self.work.tokens, experts.num_experts * self.work.model.hidden_size
        scores, chosen = tokens * experts.num_experts * self.wide, tokens * experts.per_token * self.wide
        self.sizes |= {"logits": scores, "scores": scores, "chosen": chosen, "sums": tokens * self.wide}
        self.sizes |= {"experts": tokens * experts.per_token * _INDEX_BYTES, "weights": chosen, "scaled": chosen}
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
            numbers = self.work.tokens * self.item
            self.sizes |= {"gate of shared": numbers, "share of shared": numbers, "gated output": self.sizes[output]}
            self._product("gate of shared", source, "gate of shared", self.hidden)
            self._add("share of shared", ("gate of shared",), "share of shared", ("share of shared",))
            keeps = ("share of shared", "shared output")
            self._add("gating of shared", keeps, "gated output", keeps, backward_adds=self.sizes[output])
            shared = "gated output"
        self._add("sum of experts", (output, shared), target, (), is_sum=True, variables=(*held, source))
