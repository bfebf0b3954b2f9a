"""The tape of attention in a decoder layer: its products, norms of heads, RoPE and core (terrace.simulate.activations).

Where no kernel caps scores, capped scores are kept twice: as they are, and as weights after the softmax.
"""

import math

from terrace.simulate.masks import CPU_PLAIN_SEQUENCE, copied_bytes, piece_tokens
from terrace.simulate.mlp_tape import MlpTape


class AttentionTape(MlpTape):
    """A tape with the operations of attention."""

    def _attention(self, source: str, target: str) -> None:
        model, tokens = self.work.model, self.work.tokens
        key = tokens * self.kv_heads * model.head_dim
        rotary = model.rotary_dim > 0
        sizes = {"query": self.query, "key": key, "value": key}
        self.sizes |= {name: numel * self.item for name, numel in sizes.items()}
        parts = {"query": self.heads, "key": self.kv_heads, "value": self.kv_heads}
        stages = {name: [name] for name in parts}  # the tensors that a product's result passes, the last one first
        for name in ("query", "key"):
            if rotary:
                stages[name].append(f"{name} before RoPE")
            if name == "query" and model.query_factor != 1.0:
                stages[name].append("query before scale")
            if model.qk_norm:
                stages[name].append(f"{name} before norm")
        for name, heads in parts.items():
            self.sizes |= dict.fromkeys(stages[name], self.sizes[name])
            features, beside = (self.hidden, heads * model.head_dim), self.gathered_beside
            self._linear(name, source, stages[name][-1], features, whole=beside, returns=beside > 0)
            if model.qk_norm and name != "value":
                rows = tokens if model.whole_qk_norm else tokens * heads
                self._head_norm(f"{name} norm", stages[name][-1], stages[name][-2], rows)
            if "query before scale" in stages[name]:
                self._add("scale query", ("query before scale",), stages[name][1 if rotary else 0])
        if rotary:
            for name in ("query", "key"):
                whole = self.sizes[name]
                self._add("RoPE", (f"{name} before RoPE",), name, forward_adds=whole, backward_adds=whole)
        self.sizes["mixed"] = self.query * self.item
        self._core()
        # Fused kernels write heads merged already; plain products and pieces need a contiguous copy.
        merged = "mixed"
        if (self._plain or self.in_pieces) and not self.work.is_spread:
            merged = "merged"
            self.sizes[merged] = self.sizes["mixed"]
            self._add("merge heads", ("mixed",), merged)
        features = self.heads * model.head_dim, self.hidden
        self._linear("attention output", merged, target, features, (source, "query", "key", "value"), self.whole)

    @property
    def _plain(self) -> bool:
        return not self.work.flash

    def _seen(self) -> tuple[str, ...]:
        # Windows and masks make attention copy its keys and values.
        copied = copied_bytes(self.work, self.backend, self.sizes["key"], self.sizes["query"])
        if not copied:
            return "query", "key", "value"
        for name in ("key", "value"):
            self.sizes[f"copied {name}"] = copied
            self._add(f"copy {name}", (name,), f"copied {name}")
        return "query", "key", "value", "copied key", "copied value"

    def _core(self) -> None:
        if self.work.is_spread:
            self._spread_core()
            return
        model, reads = self.work.model, self._seen()
        statistics = self.work.tokens * self.heads * self.wide
        if not self._plain:
            self.sizes["log-sums"] = statistics
            # The gradient of the output, times the output, is summed per token and head.
            self._add("attention", reads, "mixed", (*reads, "mixed", "log-sums"), backward_adds=statistics)
            return
        capped, own_form = model.scales.attention_cap > 0, self.backend == "cpu" or model.scales.attention_cap > 0
        # In fp32, with scaled queries; torch repeats keys for every query head, the form for a CPU does not.
        inputs: tuple[str, ...] = ("scaled query", "scaled key", "wide value")
        keyed = self.sizes["key"] // self.item if own_form else self.query
        sequence = self.work.sequence
        keys = min(sequence, CPU_PLAIN_SEQUENCE) if self.in_pieces else sequence
        if capped and self.in_pieces:  # of any length; under a window each also sees the piece before
            length = piece_tokens(model.sliding_window, sequence)
            keys, keyed = min(sequence, 2 * length), keyed * (2 if length < sequence else 1)
        scores = self.work.tokens * self.heads * keys
        self.sizes |= dict.fromkeys(inputs[1:], keyed * self.wide)
        self.sizes |= {"scaled query": self.query * self.wide, "softmax": scores * self.wide}
        # Without grouped heads in fp32 or fp64, widening is a no-op, so the values are the layer's own tensor.
        if self.item == self.wide and model.num_kv_heads == model.num_heads and not capped:
            inputs = ("scaled query", "scaled key", "value")
        adds = 2 * self.sizes["softmax"]
        # torch adds a mask to the scores; the form for a CPU has it in the product.
        forward_adds = adds // 2 if own_form else adds
        if capped:
            self.sizes["capped scores"] = self.sizes["softmax"]
            inputs = (*inputs, "capped scores")
        self._add("attention", reads, "mixed", (*inputs, "softmax"), forward_adds=forward_adds, backward_adds=adds)

    def _spread_core(self) -> None:
        """Attention over context ranks (terrace.runtime.context); it keeps its operands and output where it runs.

        Under Ulysses these are separate tensors, built from the all-to-all messages. A ring holds the keys of two
        rounds and one message of keys, in the backward with their gradients. `balance = "cost"` is counted at its upper
        bound: all of `most_attended` arrives in messages, and a row's partial results are summed in fp32 at least, next
        to one result.
        """
        work, reads, output = self.work, ("query", "key", "value"), "mixed"
        row = work.most_attended * work.model.head_dim * self.item  # of a head
        query, keys = row * work.attended_heads, 2 * row * work.attended_kv_heads
        self.sizes["log-sums"] = work.most_attended * work.attended_heads * self.wide
        # Keys received, sent and of the round itself; in the backward also gradients of the round, received and sent.
        rounds = 0 if work.places == 1 else 2 if work.places == 2 else 3
        forward_adds, backward_adds = rounds * keys, self.sizes["log-sums"]
        if rounds:
            backward_adds = 4 * keys if work.places == 2 else 5 * keys + self.sizes["log-sums"]
            # Keys are decoded as they are taken. Their codes are made, joined and sent, while others arrive; in the
            # backward of a longer ring they take no more than what arrives decoded otherwise.
            codes = math.ceil(work.codes * keys)
            forward_adds += codes if work.places == 2 else 3 * codes
            backward_adds += codes if work.places == 2 else 0
        # A Ulysses rank receives all parts but its own.
        of_others = (query + keys) * (work.ulysses - 1) // work.ulysses
        if work.balance == "cost":
            # The balancer may assign every token to another rank, so all of them may arrive in messages.
            merged, of_others = query // self.item * self.wide, query + keys
            forward_adds += merged
            backward_adds += merged + keys // self.item * (2 * self.wide - self.item) + query + keys
        kept: tuple[str, ...] = (*reads, output)
        if work.ulysses > 1 or work.balance == "cost":
            kept = ("attended query", "attended key", "attended value", "attended output")
            self.sizes |= dict.fromkeys(kept[1:3], keys // 2) | dict.fromkeys((kept[0], kept[3]), query)
            # The layer's own output, and gradients of its operands, are alive while attention's tensors are sent back.
            forward_adds = max(forward_adds - self.sizes[output], of_others)
            backward_adds = max(query + backward_adds, query + keys + of_others)
        self._add("attention", reads, output, (*kept, "log-sums"), forward_adds, backward_adds)
