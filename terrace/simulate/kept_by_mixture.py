"""The tensors that a mixture of experts keeps for its backward: of its gate, its rows, and messages between ranks.

Shape legend: T tokens that a rank routes, H hidden, k of E experts a token, N rows, I inner size of an expert, A tokens
that arrive at a rank for its experts, D dims that a cosine gate projects to. Scores are in fp32 at least.

Where every rank holds all experts, A = T and N = T k whatever the choices: a skewed load takes longer, but no more
memory. With e ranks that hold different experts, each cut over w ranks, a rank multiplies

    N = w T k load rows of inner size I/w, of A = w T D(e) load tokens (D(e): terrace.plan.expert_traffic)
    in the worst case w e T min(k, E/e) rows of w e T tokens: all choices of all ranks fall on its experts

Chunking does not change the bytes kept. Products then run on one piece of the tokens at a time, and messages carry one
chunk; all rows and results are counted at once, since chunks arrive before the products of earlier ones end. Peaks are
up to 16 % above the measured ones. A recomputed block keeps only the choices (T, k), in 4 bytes each
(terrace.model.experts.gating).
"""

import math
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import NamedTuple

from terrace.model.experts.config import ExpertsConfig
from terrace.model.operations import Mixture, Product, Tokens
from terrace.plan.expert_traffic import NUMBER_BYTES, mean_units
from terrace.simulate.block_tape import BlockTape
from terrace.simulate.kept_tensors import gathered, product_node
from terrace.simulate.tape import Node
from terrace.simulate.work import Work

_INDEX_BYTES = 8
_OTHERS = "other pieces"
# Numbers of 8-byte (T, E) tensors alive at once, counted in the code: while noise is drawn, while tokens are ranked.
_DRAWING, _RANKING = 6, 7


def rows_of(work: Work, experts: ExpertsConfig) -> tuple[int, int]:
    """(Tokens that arrive at a rank for its experts, rows that the experts multiply) in a micro-batch; (0, 0) for
    load 0.
    """
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
    """Rows of a rank's experts over the mean if all choices of all ranks fall on them."""
    return work.expert * min(experts.per_token, experts.num_experts // work.expert) / experts.per_token


def mixture_nodes(tape: BlockTape, mixture: Mixture) -> Iterator[Node]:
    # Where a recomputed block gathers the tokens, router and shared expert are counted with all of them.
    source = yield from gathered(tape, mixture.source)
    weights = yield from _weights(tape, mixture, source)
    yield from _passed(tape, mixture, source, weights)


def _weights(tape: BlockTape, mixture: Mixture, source: str) -> Generator[Node, None, str]:
    """Router and gate. Returns the name of the weights of the choices."""
    experts, tokens, wide = mixture.experts, tape.work.routed, tape.wide
    num_scores, num_chosen = tokens * experts.num_experts, tokens * experts.num_choices
    scores, chosen, indexes = num_scores * wide, num_chosen * wide, num_scores * _INDEX_BYTES
    tape.choices_bytes = num_chosen * NUMBER_BYTES
    tape.sizes |= {
        **dict.fromkeys(("logits", "scores"), scores),  # (T, E)
        **dict.fromkeys(("chosen", "weights", "scaled"), chosen),  # (T, k)
        "experts": num_chosen * _INDEX_BYTES,  # (T, k) in int64
        "not taken": num_scores,  # (T, E) in bool
        "sums": tokens * wide,  # (T)
    }
    yield from _logits(tape, mixture, source)
    yield Node(("logits",), "scores", ("scores",))
    if experts.gate == "expert_choice":
        yield Node(("scores",), "chosen", ("not taken",), _RANKING * indexes)
    else:
        # Copies of the scores: with bias, with dropped groups masked, and sorted.
        ranked = scores * (1 + experts.biased + (experts.num_groups > 1)) + indexes
        yield Node(("scores",), "chosen", ("experts",), ranked)
    weights = "chosen"
    if experts.normalized:
        yield Node(("chosen",), "weights", ("chosen", "sums"), backward_adds=chosen)
        weights = "weights"
    if experts.scale != 1.0:
        yield Node((weights,), "scaled")
        weights = "scaled"
    return weights


def _logits(tape: BlockTape, mixture: Mixture, source: str) -> Iterator[Node]:
    experts, hidden, scores = mixture.experts, mixture.hidden.numel, tape.sizes["logits"]
    numel = experts.num_experts * hidden
    if tape.wide > tape.item:
        wide = tape.size("wide input", tape.work.routed * hidden * tape.wide)  # (T, H)
        yield Node((source,), wide)
        source = wide
    match experts.gate:
        case "cosine":
            yield from _cosines(tape, mixture, source)
        case "noisy":
            names = ("clean logits", "size of noise before softplus", "size of noise", "numbers drawn", "noise")
            tape.sizes |= dict.fromkeys(names, scores)  # (T, E)
            clean, before, size, drawn, noise = names
            yield _router_product(tape, "router", source, clean, numel)
            yield _router_product(tape, "router of noise", source, before, numel)
            yield Node((before,), size, (before,))
            yield Node((size,), noise, (drawn,), _DRAWING * scores // tape.wide * _INDEX_BYTES)
            yield Node((clean, noise), "logits", is_sum=True)
        case _:
            yield _router_product(tape, "router", source, "logits", numel)


def _cosines(tape: BlockTape, mixture: Mixture, source: str) -> Iterator[Node]:
    number, size, wide, tokens = mixture.experts.num_experts, mixture.experts.router_size, tape.wide, tape.work.routed
    copies = 2 if wide > tape.item else 1
    tape.sizes |= {
        **dict.fromkeys(("projected", "directions"), tokens * size * wide),  # (T, D)
        "norms": 2 * tokens * wide,
        "cosines": tape.sizes["logits"],  # (T, E)
        # Unit rows (E, D), once more in fp32 if the dtype is narrower; two norms (E), and the temperature.
        "rows of experts": (copies * number * size + 2 * number + 1) * wide,
    }
    tape.fixed_bytes += tape.sizes["rows of experts"]
    yield _router_product(tape, "projection", source, "projected", size * mixture.hidden.numel)
    yield Node(("projected",), "directions", ("projected", "norms"), backward_adds=tape.sizes["projected"])
    yield Node(("directions",), "cosines", ("directions", "rows of experts"))
    yield Node(("cosines",), "logits", ("cosines",))


def _router_product(tape: BlockTape, name: str, source: str, target: str, numel: int) -> Node:
    """A product with a router matrix, which is kept in fp32 at least."""
    keeps, num_bytes = [source], numel * tape.wide
    if tape.wide > tape.item:
        keeps.append(tape.size(f"wide {name}", num_bytes))
        tape.fixed_bytes += num_bytes
    return Node((source,), target, tuple(keeps), backward_adds=num_bytes)


class _Pieces(NamedTuple):
    """The pieces of tokens that a rank multiplies one at a time."""

    number: int
    in_forward: int  # messages each way
    in_backward: int
    is_spread: bool  # over several ranks
    tokens: int  # bytes of the tokens of a piece
    summing: int  # bytes that the sum of a token's rows takes where it may have fewer rows than choices

    @classmethod
    def of(cls, tape: BlockTape, mixture: Mixture) -> "_Pieces":
        """Compute the pieces and register the sizes of their tensors."""
        work, num_choices, item, wide = tape.work, mixture.experts.num_choices, tape.item, tape.wide
        is_spread = work.expert * work.expert_rows > 1
        chunks = work.expert_chunks if is_spread else (1, 1)
        number, width = max(chunks), tape.width(mixture.hidden)
        arrived, rows = rows_of(work, mixture.experts)
        tokens, tape.rows = -(-arrived // number), -(-rows // number)
        tape.sizes |= {
            "order": tape.rows * _INDEX_BYTES,  # of choices, (N) in int64
            "places": tokens * num_choices * _INDEX_BYTES,  # of choices among the rows, (A, k) in int64
            "weight of rows": tape.rows * wide,
            "rounded weight of rows": tape.rows * item,
            # For all pieces together:
            "tokens": arrived * width * item,  # (A, H)
            "their choices": arrived * num_choices * (wide + _INDEX_BYTES),  # experts and weights, (A, k)
            "way": arrived * _INDEX_BYTES,  # the order of tokens in messages
        }
        # Sums are in fp32 at least, over one choice of all tokens at a time.
        wider = wide if wide > item else 0
        summing = tokens * width * wider + tape.rows * width // num_choices * (item + wider)
        return cls(number, *chunks, is_spread, tokens * width * item, summing)


def _passed(tape: BlockTape, mixture: Mixture, source: str, weights: str) -> Iterator[Node]:
    """Pass tokens through their experts and the shared expert."""
    target, pieces, shared = mixture.target.name, _Pieces.of(tape, mixture), ""
    output = tape.size("experts output", tape.sizes[target]) if mixture.shared else target
    # Tensors that variables hold to the end of the mixture.
    rows, product = mixture.each[0].source.name, mixture.each[-1].source.name
    holds: tuple[str, ...] = (weights, "experts", "order", "places", rows, product)
    if mixture.shared and pieces.is_spread and tape.work.rows == 1:  # while the first rows travel
        shared = yield from _shared(tape, mixture, source, output)
    arrived = source
    if pieces.is_spread:
        arrived = "tokens"
        yield _sent(tape, pieces, source)
        holds = (*holds, "tokens", "their choices")
    weight = yield from _multiplied(tape, mixture, pieces, arrived, weights, holds)
    holds = (*holds, weight, source)
    for node in _collected(tape, mixture, pieces, output):
        yield node._replace(variables=holds)
    if mixture.shared:
        shared = shared or (yield from _shared(tape, mixture, source, output))
        yield Node((output, shared), target, is_sum=True, variables=holds)


def _sent(tape: BlockTape, pieces: _Pieces, source: str) -> Node:
    """Dispatch of tokens to the ranks that hold their experts."""
    tokens, choices = tape.sizes["tokens"], tape.sizes["their choices"]
    # Rows are sent and received as bytes and then reordered: the send buffer, the receive buffer, and a copy.
    adds, back = -(-(3 * tokens + choices) // pieces.in_forward), -(-3 * tokens // pieces.in_backward)
    return Node((source,), "tokens", ("their choices", "way"), adds, back)


def _multiplied(
    tape: BlockTape, mixture: Mixture, pieces: _Pieces, source: str, weights: str, holds: tuple[str, ...]
) -> Generator[Node, None, str]:
    """The rows of a piece through their experts. Returns the name of the weights of rows."""
    *inner, down = mixture.each
    assert isinstance(down, Product), "the weight of a row multiplies the operand of a product"
    first, sizes, rows, product = len(tape.nodes), tape.sizes, inner[0].source, down.source
    sizes[rows.name] = tape.bytes_of(rows)
    back = pieces.summing if mixture.experts.is_noncausal else sizes[rows.name] + sizes["places"]
    yield Node((source,), rows.name, ("places", _OTHERS), sizes["places"], back)
    for operation in inner:
        yield from tape.nodes_of(operation)
    weight = "weight of rows"
    yield Node((weights,), weight, ("order",))
    if tape.wide > tape.item:
        weight = "rounded weight of rows"
        yield Node(("weight of rows",), weight)
    weighed, operands = product._replace(name=f"weighed {product.name}"), (product.name, weight)
    yield Node(operands, tape.size(weighed.name, sizes[product.name]), operands, backward_adds=sizes[product.name])
    yield from tape.nodes_of(replace(down, reads=(weighed,), holds=(*holds, weight)))
    # Each other piece keeps the same number of bytes.
    kept = {name for node in tape.nodes[first:] for name in node.keeps} - {_OTHERS}
    sizes[_OTHERS] = (pieces.number - 1) * sum(sizes[name] for name in kept)
    return weight


def _collected(tape: BlockTape, mixture: Mixture, pieces: _Pieces, output: str) -> Iterator[Node]:
    """The sum of each token's rows, on the rank that routed it, written to `output`."""
    rows, places, tokens = mixture.each[-1].target.name, tape.sizes["places"], tape.sizes["tokens"]
    routed = tape.elements(mixture.source._replace(tokens=Tokens.ROUTED))
    # Where tokens are whole, each tensor row has routed a share of them.
    part = "part of the tokens" if tape.stream_rows < tape.work.rows else output
    if pieces.is_spread:
        adds = pieces.summing if tape.wide > tape.item else pieces.summing + pieces.tokens
        yield Node((rows,), tape.size("collected", tokens), (), adds, places)
        adds, back = -(-(2 * tokens + routed * tape.wide) // pieces.in_forward), -(-3 * tokens // pieces.in_backward)
        yield Node(("collected",), tape.size(part, routed * tape.item), (), adds, back)
    else:
        # Under expert choice, a variable holds the choices.
        adds = pieces.summing + tape.sizes["experts"] if mixture.experts.is_noncausal else tape.sizes[rows]
        yield Node((rows,), tape.size(part, tokens), (), adds, places)
    if part != output:
        yield Node((part,), output)


def _shared(tape: BlockTape, mixture: Mixture, source: str, output: str) -> Generator[Node, None, str]:
    """The shared expert. Returns the name of its result, which is added to `output`."""
    for operation in mixture.shared:
        yield from tape.nodes_of(operation)
    result = tape.size(mixture.shared[-1].target.name, tape.sizes[output])
    for gate in mixture.shared_gate:
        logit = tape.size(gate.target.name, tape.work.stream_tokens * tape.item)
        # Not in 8 bits, whatever the format of the layer's products.
        yield product_node(tape, source, logit, tape.width(gate.inputs))
        share = tape.size("share of shared", tape.sizes[logit])
        yield Node((logit,), share, (share,))
        operands, result = (share, result), tape.size("gated output", tape.sizes[output])
        yield Node(operands, result, operands, backward_adds=tape.sizes[output])
    return result
