"""The tensors that a mixture of experts keeps for its backward: its gate, its rows, and the messages between ranks.

With T tokens, hidden size H, k of E experts a token, N = T k rows and inner size I, a mixture keeps

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
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import NamedTuple

from terrace.model.experts.config import ExpertsConfig
from terrace.model.operations import Mixture, Product
from terrace.plan.expert_traffic import NUMBER_BYTES, mean_units
from terrace.simulate.block_tape import BlockTape
from terrace.simulate.kept_tensors import gathered, product_node
from terrace.simulate.tape import Node
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


def keep_mixture(tape: BlockTape, mixture: Mixture) -> Iterator[Node]:
    """The nodes of a mixture."""
    # The router is counted with all tokens, as the shared expert, where a recomputed block gathers them.
    source = yield from gathered(tape, mixture.source)
    weights = yield from _weights(tape, mixture, source)
    yield from _passed(tape, mixture, source, weights)


def _weights(tape: BlockTape, mixture: Mixture, source: str) -> Generator[Node, None, str]:
    """Router and gate; the name of the weights of the choices."""
    experts, tokens, wide = mixture.experts, tape.work.routed, tape.wide
    num_scores, num_chosen = (tokens * each for each in (experts.num_experts, experts.num_choices))
    scores, chosen, indexes = num_scores * wide, num_chosen * wide, num_scores * _INDEX_BYTES
    tape.choices_bytes = num_chosen * NUMBER_BYTES
    tape.sizes |= {"logits": scores, "scores": scores, "sums": tokens * wide, "not taken": num_scores}
    tape.sizes |= dict.fromkeys(("chosen", "weights", "scaled"), chosen) | {"experts": num_chosen * _INDEX_BYTES}
    yield from _logits(tape, mixture, source)
    yield Node(("logits",), "scores", ("scores",))
    if experts.gate == "expert_choice":
        yield Node(("scores",), "chosen", ("not taken",), _RANKING * indexes)
    else:
        # What chooses: with bias, without the groups dropped, and sorted.
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
        wide = tape.size("wide input", tape.work.routed * hidden * tape.wide)
        yield Node((source,), wide)
        source = wide
    match experts.gate:
        case "cosine":
            yield from _cosines(tape, mixture, source)
        case "noisy":
            names = ("clean logits", "size of noise before softplus", "size of noise", "numbers drawn", "noise")
            tape.sizes |= dict.fromkeys(names, scores)
            clean, before, size, drawn, noise = names
            yield _router_product(tape, "router", source, clean, numel)
            yield _router_product(tape, "router of noise", source, before, numel)
            yield Node((before,), size, (before,))
            yield Node((size,), noise, (drawn,), _DRAWING * scores // tape.wide * _INDEX_BYTES)
            yield Node((clean, noise), "logits", is_sum=True)
        case _:
            yield _router_product(tape, "router", source, "logits", numel)


def _cosines(tape: BlockTape, mixture: Mixture, source: str) -> Iterator[Node]:
    experts, wide, tokens = mixture.experts, tape.wide, tape.work.routed
    matrix, projected = experts.num_experts * experts.router_size, tokens * experts.router_size * wide
    # Rows of experts with a length of 1, two norms, and the temperature.
    rows = (matrix * (2 if wide > tape.item else 1) + 2 * experts.num_experts + 1) * wide
    tape.fixed_bytes += rows
    tape.sizes |= {"projected": projected, "directions": projected, "norms": 2 * tokens * wide}
    tape.sizes |= {"rows of experts": rows, "cosines": tape.sizes["logits"]}
    yield _router_product(tape, "projection", source, "projected", experts.router_size * mixture.hidden.numel)
    yield Node(("projected",), "directions", ("projected", "norms"), backward_adds=projected)
    yield Node(("directions",), "cosines", ("directions", "rows of experts"))
    yield Node(("cosines",), "logits", ("cosines",))


def _router_product(tape: BlockTape, name: str, source: str, target: str, numel: int) -> Node:
    """A product with a matrix of the router, which is kept in fp32 if it is narrower."""
    keeps, num_bytes = (source,), numel * tape.wide
    if tape.wide > tape.item:
        keeps = (source, tape.size(f"wide {name}", num_bytes))
        tape.fixed_bytes += num_bytes
    return Node((source,), target, keeps, backward_adds=num_bytes)


class _Pieces(NamedTuple):
    """Tokens that a rank gets for its experts, and how it takes them: products are of one piece at a time."""

    tokens: int
    tokens_of_piece: int
    rows_of_piece: int
    number: int
    in_forward: int  # messages of a forward
    in_backward: int
    is_spread: bool  # over several ranks

    @classmethod
    def of(cls, work: Work, experts: ExpertsConfig) -> "_Pieces":
        tokens, rows = rows_of(work, experts)
        is_spread = work.expert * work.expert_rows > 1
        chunks = work.expert_chunks if is_spread else (1, 1)
        number = max(chunks)
        return cls(tokens, -(-tokens // number), -(-rows // number), number, *chunks, is_spread)


def _passed(tape: BlockTape, mixture: Mixture, source: str, weights: str) -> Iterator[Node]:
    """Tokens through their experts, and through the shared expert."""
    work, target, experts = tape.work, mixture.target.name, mixture.experts
    pieces, token = _Pieces.of(work, experts), tape.width(mixture.hidden) * tape.item
    tape.rows = pieces.rows_of_piece
    output, arrived, shared = "experts output" if mixture.shared else target, source, ""
    tape.size(output, tape.sizes[target])
    # Tensors that variables hold to the end of the mixture.
    holds = [weights, "experts", "order", "places", "rows", "product"]
    if mixture.shared and pieces.is_spread and work.rows == 1:  # while the first rows travel
        shared = yield from _shared(tape, mixture, source, output)
    if pieces.is_spread:
        arrived = "tokens"
        holds += ["tokens", "their choices"]
        yield _sent(tape, pieces, token, experts, source)
    summing = _summing(tape, pieces, mixture)
    holds.append((yield from _multiplied(tape, mixture, pieces, arrived, weights, holds, summing)))
    variables = (*holds, source)
    # Of whole tokens each tensor row has routed a part.
    part = "part of the tokens" if tape.stream_rows < work.rows else output
    tape.size(part, work.routed * token if pieces.is_spread else pieces.tokens * token)
    rows, places = "expert outputs", tape.sizes["places"]
    if pieces.is_spread:
        adds = summing if tape.wide > tape.item else summing + pieces.tokens_of_piece * token
        yield Node((rows,), tape.size("collected", pieces.tokens * token), (), adds, places, variables=variables)
        adds = -(-(2 * pieces.tokens * token + work.routed * token // tape.item * tape.wide) // pieces.in_forward)
        back = -(-3 * pieces.tokens * token // pieces.in_backward)
        yield Node(("collected",), part, (), adds, back, variables=variables)
    else:
        # A variable holds the choices of experts that choose.
        adds = summing + tape.sizes["experts"] if experts.looks_ahead else tape.sizes[rows]
        yield Node((rows,), part, (), adds, places, variables=variables)
    if part != output:
        yield Node((part,), output, variables=variables)
    if mixture.shared:
        shared = shared or (yield from _shared(tape, mixture, source, output))
        yield Node((output, shared), target, is_sum=True, variables=variables)


def _sent(tape: BlockTape, pieces: _Pieces, token: int, experts: ExpertsConfig, source: str) -> Node:
    """Tokens to the ranks that hold their experts."""
    tokens, choices = pieces.tokens * token, pieces.tokens * experts.num_choices * (tape.wide + _INDEX_BYTES)
    tape.sizes |= {"tokens": tokens, "their choices": choices, "way": pieces.tokens * _INDEX_BYTES}
    # Rows leave and arrive as bytes, and are put in order: what is sent, what arrives, and both together.
    adds, back = -(-(3 * tokens + choices) // pieces.in_forward), -(-3 * tokens // pieces.in_backward)
    return Node((source,), "tokens", ("their choices", "way"), adds, back)


def _multiplied(
    tape: BlockTape, mixture: Mixture, pieces: _Pieces, source: str, weights: str, holds: list[str], summing: int
) -> Generator[Node, None, str]:
    """The rows of a piece through their experts; the name of the weights of rows."""
    *inner, down = mixture.each
    assert isinstance(down, Product), "the weight of a row multiplies the operand of a product"
    first, rows, product = len(tape.nodes), inner[0].source, down.source
    places = tape.size("places", pieces.tokens_of_piece * mixture.experts.num_choices * _INDEX_BYTES)
    back = summing if mixture.experts.looks_ahead else tape.bytes_of(rows) + tape.sizes[places]
    tape.sizes |= {rows.name: tape.bytes_of(rows), "order": tape.rows * _INDEX_BYTES}
    yield Node((source,), rows.name, (places, _OTHERS), tape.sizes[places], back)
    for operation in inner:
        yield from tape.nodes_of(operation)
    weight = tape.size("weight of rows", tape.rows * tape.wide)
    yield Node((weights,), weight, ("order",))
    if tape.wide > tape.item:
        rounded = tape.size("rounded weight of rows", tape.rows * tape.item)
        yield Node((weight,), rounded)
        weight = rounded
    weighed = product._replace(name=f"weighed {product.name}")
    operands = (product.name, weight)
    yield Node(operands, tape.size(weighed.name, tape.bytes_of(weighed)), operands, 0, tape.bytes_of(weighed))
    yield from tape.nodes_of(replace(down, reads=(weighed,), holds=(*holds, weight)))
    kept = {name for node in tape.nodes[first:] for name in node.keeps} - {_OTHERS}
    tape.size(_OTHERS, (pieces.number - 1) * sum(tape.sizes[name] for name in kept))
    return weight


def _summing(tape: BlockTape, pieces: _Pieces, mixture: Mixture) -> int:
    """Bytes that summing takes where a token may have fewer rows than choices."""
    # In fp32 at least, a choice of all tokens after the other.
    width, wider = tape.width(mixture.hidden), tape.wide if tape.wide > tape.item else 0
    column = tape.rows * width // mixture.experts.num_choices
    return pieces.tokens_of_piece * width * wider + column * (tape.item + wider)


def _shared(tape: BlockTape, mixture: Mixture, source: str, output: str) -> Generator[Node, None, str]:
    """The shared expert; the name of its result, which is added to `output`."""
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
