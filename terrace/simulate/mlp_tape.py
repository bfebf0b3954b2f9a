"""Operations of a layer's MLP, or of the mixture of experts in its place, for `terrace.simulate.tape`.

With T tokens, hidden size H, k of E experts a token, N = T k rows and inner size I, a mixture keeps for its backward

    rows (N, H); gate, up, act(gate), the product of the last two and that times the weight, each (N, I); weights (N)
    in int64: the order of the choices (N) and the place of each (T, k), or (T, E) where experts choose
    with products in 8 bits codes of the rows, and of the product that `down` takes, in their place
    and the tensors of its gate, listed below

Where every rank holds all experts, N does not depend on the choices: a skewed load takes longer, but no more memory.
With e ranks that hold different experts, each cut over w ranks, a rank multiplies

    N = w T k load rows of inner size I/w, and gets A = w T D(e) load tokens for them (terrace.plan.expert_traffic)

    at worst w e T min(k, E/e) rows of w e T tokens: all choices of all ranks fall on its experts

and keeps the place of every choice of the tokens that it got, and on the way their rows. Tokens in chunks keep as much.
Products are then of one piece of the tokens at a time, and messages of one chunk; all rows and results are counted as
there, since chunks arrive before the products of another. Peaks are up to 16 % above the measured ones.
Under tensor rows T is the part of the tokens that a rank routes.

Of T tokens that a rank routes, with E experts, hidden size H, D dims of a cosine gate's projection and w bytes of fp32
at least, a gate keeps for its backward, where the compute dtype is narrower also the router's input and matrices in
fp32:

    all             the router's input (T, H), scores (T, E)
    softmax, sigmoid, noisy, cosine
                    indexes of the chosen (T, k) in int64; where weights are divided, their scores (T, k) and sums (T)
    noisy           the numbers drawn and the logits of their size, (T, E) each
    cosine          projected tokens and their directions, (T, D) each, two norms (T), cosines (T, E); rows of experts
                    (E, D) with a length of 1, two norms (E)
    expert_choice   which choices are not taken, (T, E) in bool

A recomputed block keeps the choices (T, k) alone, in 4 bytes each (terrace.model.experts.gating).
"""

import math

from terrace.model.experts.config import ExpertsConfig
from terrace.plan.expert_traffic import NUMBER_BYTES, mean_units
from terrace.simulate.block_tape import BlockTape
from terrace.simulate.work import Work

_INDEX_BYTES = 8
_OTHERS = "other pieces"
# (T, E) in 8 bytes that live at once, counted in the code: while noise is drawn, and while tokens are ranked.
_DRAWING, _RANKING = 6, 7


def rows_of(work: Work, experts: ExpertsConfig) -> tuple[int, int]:
    """(Tokens that a rank gets for its experts, rows that these multiply) in a micro-batch; none under a load of 0."""
    tokens, per_token, ranks = work.routed, experts.per_token, work.expert
    if not work.load:
        return 0, 0
    if ranks * work.expert_rows == 1:
        if experts.gate == "expert_choice":  # of every sequence as many for each expert, rounded up
            return tokens, work.micro_batch * experts.num_experts * -(-per_token * work.sequence // experts.num_experts)
        return tokens, tokens * per_token
    most = work.expert_rows * ranks * tokens
    load = min(work.load, worst_load(work, experts)) if ranks > 1 else 1.0
    arrived = most // ranks * load * mean_units(experts.num_experts, per_token, ranks)
    return min(most, math.ceil(arrived)), math.ceil(most // ranks * load * per_token)


def worst_load(work: Work, experts: ExpertsConfig) -> float:
    """Rows of a rank's experts over their mean where all choices of all ranks fall on them."""
    return work.expert * min(experts.per_token, experts.num_experts // work.expert) / experts.per_token


class _GateTape(BlockTape):
    """A block's tape with the operations of terrace.model.experts.mixture.Router."""

    def _weights(self, source: str, experts: ExpertsConfig) -> str:
        """Router and gate; the name of the weights of the choices."""
        tokens = self.work.routed
        scores, chosen = tokens * experts.num_experts * self.wide, tokens * experts.num_choices * self.wide
        self.choices_bytes = tokens * experts.num_choices * NUMBER_BYTES
        self.sizes |= {"logits": scores, "scores": scores, "chosen": chosen, "sums": tokens * self.wide}
        self.sizes |= {"experts": tokens * experts.num_choices * _INDEX_BYTES, "weights": chosen, "scaled": chosen}
        self._logits(source, experts)
        self._add("gate's scores", ("logits",), "scores", ("scores",))
        weights = "chosen"
        if experts.gate == "expert_choice":
            self.sizes["not taken"] = tokens * experts.num_experts
            ranking = _RANKING * tokens * experts.num_experts * _INDEX_BYTES
            self._add("choice", ("scores",), "chosen", ("not taken",), forward_adds=ranking)
        else:
            # What chooses: with bias, without the groups dropped, and sorted.
            indexes = tokens * experts.num_experts * _INDEX_BYTES
            ranked = scores * (1 + experts.biased + (experts.num_groups > 1)) + indexes
            self._add("choice", ("scores",), "chosen", ("experts",), forward_adds=ranked)
        if experts.normalized:
            self._add("normalising", ("chosen",), "weights", ("chosen", "sums"), backward_adds=chosen)
            weights = "weights"
        if experts.scale != 1.0:
            self._add("scaling", (weights,), "scaled")
            weights = "scaled"
        return weights

    def _logits(self, source: str, experts: ExpertsConfig) -> None:
        hidden = self.work.model.hidden_size
        if self.wide > self.item:
            self.sizes["wide input"] = self.work.routed * hidden * self.wide
            self._add("widen", (source,), "wide input")
            source = "wide input"
        if experts.gate == "cosine":
            self._cosines(source, experts)
            return
        target = "clean logits" if experts.gate == "noisy" else "logits"
        self.sizes[target] = self.sizes["logits"]
        self._matrix("router", source, target, experts.num_experts * hidden)
        if experts.gate == "noisy":
            names = ("size of noise before softplus", "size of noise", "numbers drawn", "noise")
            self.sizes |= dict.fromkeys(names, self.sizes["logits"])
            self._matrix("router of noise", source, names[0], experts.num_experts * hidden)
            self._add("softplus", names[:1], names[1], names[:1])
            drawing = _DRAWING * self.work.routed * experts.num_experts * _INDEX_BYTES
            self._add("noise", names[1:2], "noise", ("numbers drawn",), forward_adds=drawing)
            self._add("noisy logits", ("clean logits", "noise"), "logits", is_sum=True)

    def _cosines(self, source: str, experts: ExpertsConfig) -> None:
        tokens, size, number = self.work.routed, experts.router_size, experts.num_experts
        self.sizes |= dict.fromkeys(("projected", "directions"), tokens * size * self.wide)
        self.sizes |= {"norms": 2 * tokens * self.wide, "cosines": self.sizes["logits"]}
        self._matrix("projection", source, "projected", size * self.work.model.hidden_size)
        self._add(
            "directions", ("projected",), "directions", ("projected", "norms"), backward_adds=self.sizes["projected"]
        )
        # Rows of experts with a length of 1, two norms, and the temperature.
        own = number * size + 2 * number + 1
        own += number * size if self.wide > self.item else 0
        self.sizes["rows of experts"] = own * self.wide
        self.fixed_bytes += self.sizes["rows of experts"]
        self._add("cosines", ("directions",), "cosines", ("directions", "rows of experts"))
        self._add("temperature", ("cosines",), "logits", ("cosines",))

    def _matrix(self, name: str, source: str, target: str, numel: int) -> None:
        """A product with a matrix of the router, which is kept in fp32 if it is narrower."""
        keeps: tuple[str, ...] = (source,)
        if self.wide > self.item:
            self.sizes[f"wide {name}"] = numel * self.wide
            self.fixed_bytes += numel * self.wide
            keeps = (source, f"wide {name}")
        self._add(name, (source,), target, keeps, backward_adds=numel * self.wide)


class MlpTape(_GateTape):
    """A block's tape with the operations of terrace.model.layers.MLP and terrace.model.experts.mixture."""

    def _mlp(self, source: str, target: str, of: str = "") -> None:
        # Both matrices are cut by rows and columns; the inner tensors only by rows.
        entering, leaving = (self.hidden, self.inner), (self.inner, self.hidden)
        inner = self.work.tokens * self.inner * self.item
        up, gate, active, product = (f"{of}{name}" for name in ("up", "gate", "active", "product"))
        self.sizes |= dict.fromkeys((up, gate, active, product), inner)
        beside = self.gathered_beside
        self._linear(up, source, up, entering, whole=beside, returns=beside > 0)
        if self.work.model.gated_mlp:
            self._linear(gate, source, gate, entering, whole=beside, returns=beside > 0)
            if "gated activations" in self.work.served:
                # Its gradients are written over gate and up; they count as new here, so a peak is never too low.
                self._add(f"{of}gating", (gate, up), product, (gate, up))
            else:
                self._activation(f"{of}activation", gate, active)
                self._add(f"{of}gating", (active, up), product, (active, up))
            self._linear(f"{of}down", product, target, leaving, (source, up, gate), self.whole)
        else:
            self._activation(f"{of}activation", up, active)
            self._linear(f"{of}down", active, target, leaving, (source, up), self.whole)

    def _activation(self, name: str, source: str, target: str) -> None:
        # relu's gradient needs its result alone, which the next operation keeps anyway.
        self._add(name, (source,), target, (target if self.work.model.activation == "relu" else source,))

    def _mixture(self, source: str, target: str) -> None:
        experts = self.work.model.experts
        assert experts is not None, "a layer without experts is no mixture"
        work, weights = self.work, self._weights(source, experts)
        tokens, rows = rows_of(work, experts)
        is_spread = work.expert * work.expert_rows > 1
        forward, backward = work.expert_chunks if is_spread else (1, 1)
        pieces = max(forward, backward)
        # Products are of one piece of the tokens at a time; what the others keep is in `_OTHERS`.
        rows, piece = -(-rows // pieces), -(-tokens // pieces)
        inner = rows * -(-experts.intermediate_size // work.expert_rows) * self.item
        hidden, token = rows * self.hidden * self.item, tokens * self.hidden * self.item
        self.sizes |= {"rows": hidden, "expert outputs": hidden, "weight of rows": rows * self.wide}
        self.sizes |= dict.fromkeys(("gate", "active", "up", "inner", "product"), inner)
        self.sizes |= {"order": rows * _INDEX_BYTES, "places": piece * experts.num_choices * _INDEX_BYTES}
        places, source_of_rows = self.sizes["places"], source
        # Tensors that variables hold to the end of the mixture.
        held: tuple[str, ...] = (weights, "experts", "order", "places", "rows", "inner")
        output, shared = "experts output" if experts.shared_size else target, ""
        self.sizes[output] = self.residual * self.item
        if experts.shared_size and is_spread and work.rows == 1:  # while the first rows travel
            shared = self._shared(source, output, experts)
        if is_spread:
            of_token = experts.num_choices * (self.wide + _INDEX_BYTES)
            self.sizes |= {"tokens": token, "their choices": tokens * of_token, "way": tokens * _INDEX_BYTES}
            source_of_rows, held = "tokens", (*held, "tokens", "their choices")
            # Rows leave and arrive as bytes, and are put in order: what is sent, what arrives, and both together.
            adds = -(-(3 * token + self.sizes["their choices"]) // forward)
            self._add("way to experts", (source,), "tokens", ("their choices", "way"), adds, -(-3 * token // backward))
        summing, first = self._summing(piece, rows, experts), len(self.operations)
        back = summing if experts.looks_ahead else hidden + places
        self._add("spread", (source_of_rows,), "rows", ("places", _OTHERS), places, back)
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
        kept = {name for each in self.operations[first:] for name in each.keeps} - {_OTHERS}
        self.sizes[_OTHERS] = (pieces - 1) * sum(self.sizes[name] for name in kept)
        # Of whole tokens each tensor row has routed a part.
        part = "part of the tokens" if self.cut < work.rows else output
        self.sizes[part] = work.routed * self.hidden * self.item
        collected = "collected" if is_spread else part
        self.sizes[collected] = token
        adds = summing + self.sizes["experts"] if experts.looks_ahead else hidden  # which a variable holds
        if is_spread:
            adds = summing if self.wide > self.item else summing + piece * self.hidden * self.item
        self._add("collect", ("expert outputs",), collected, (), adds, places, variables=(*held, source))
        if is_spread:
            adds = -(-(2 * token + work.routed * self.hidden * self.wide) // forward)
            back = -(-3 * token // backward)
            self._add("way back", (collected,), part, (), adds, back, variables=(*held, source))
        if part != output:
            self._add("gather of experts", (part,), output, variables=(*held, source))
        if experts.shared_size:
            shared = shared or self._shared(source, output, experts)
            self._add("sum of experts", (output, shared), target, (), is_sum=True, variables=(*held, source))

    def _summing(self, tokens: int, rows: int, experts: ExpertsConfig) -> int:
        # Where a token may have fewer rows than choices: sums in fp32 at least, a choice of all tokens after the other.
        column = rows * self.hidden // experts.num_choices
        wider = self.wide if self.wide > self.item else 0
        return tokens * self.hidden * wider + column * (self.item + wider)

    def _stack(self, name: str, source: str, target: str, variables: tuple[str, ...] = ()) -> None:
        # The gradient of a stack is written where it is kept, one matrix after the other.
        experts = self.work.model.experts
        assert experts is not None, "a stack is of experts"
        inner = -(-experts.intermediate_size // self.work.expert_rows)
        features = (inner, self.hidden) if name == "down" else (self.hidden, inner)
        rows = self.sizes["expert outputs"] // (self.hidden * self.item)
        stack = experts.num_experts // self.work.expert, rows
        self._linear(name, source, target, features, variables, stack=stack)

    def _shared(self, source: str, output: str, experts: ExpertsConfig) -> str:
        """The shared expert; the name of its result."""
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
        return shared
