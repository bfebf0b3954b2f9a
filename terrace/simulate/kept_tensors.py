"""The tensors that an operation of a block keeps for its backward, and its working memory: one rule per type.

Kernels keep different tensors, so rules depend on the backend:

- Norm: its input, and a mean and a root per token. An rms norm on a CPU is several operations, which keep the input in
  fp32 and its normalised copy.
- Product: its input, once for all products that read it. Sequence parallelism gathers the input for the product and
  again for the backward, so only the rank's shard is kept. With products in 8 bits the codes of the input are kept,
  unless the input is gathered or computed again for the backward.
- Activation: its operand, and act(gate) and up where it multiplies two; only both operands if it keeps these.
- Convolution: its operand. Delta: its five operands, and where context ranks pass states those before its runs; its
  backward computes the factors of all chunks again (terrace.model.delta_rule).
- Gate: as an activation that multiplies two, but of a sigmoid its result.
- Core: q, k, v, its output and one log-sum per token and head. Plain products keep q, k, v and the softmax in fp32, and
  a copy of the output with the heads merged. Documents and windows are in terrace.simulate.masks.
- Loss: only its input, since it computes logits in chunks of tokens during its backward (terrace.runtime.head).
  Several tensor ranks keep the whole input, a few numbers per token, and the logits of a small vocabulary.

RoPE, scales and sums keep nothing. The tables of RoPE are shared by all layers and are not counted here. Mixtures are
in terrace.simulate.kept_by_mixture.
"""

import math
from collections.abc import Generator, Iterator

from terrace.model import operations as ops
from terrace.model.loss_chunks import chunk_bytes, chunk_rows
from terrace.model.product_parts import converted_bytes
from terrace.plan.plan import scales_rows
from terrace.plan.score_clip import score_bytes
from terrace.simulate.block_tape import BlockTape, Rule
from terrace.simulate.delta import convolution_nodes, delta_nodes, gate_nodes
from terrace.simulate.masks import CPU_PLAIN_SEQUENCE, copied_bytes, piece_tokens
from terrace.simulate.tape import Node

_TOKEN_BYTES = 8
_SCALE_BYTES = 4  # of codes, in fp32
_LOSS_BYTES = 4  # a sum in fp32


def gathered(tape: BlockTape, source: ops.Tensor) -> Generator[Node, None, str]:
    """Name of a residual-stream tensor with all tokens.

    A block that is recomputed in its backward gathers the tokens once and holds them until it has run.
    """
    whole, name = tape.whole_bytes(source), f"whole {source.name}"
    if not whole or tape.work.recompute != "full":
        return source.name
    if not any(node.writes == name for node in tape.nodes):
        yield Node((source.name,), tape.size(name, whole))
    return name


def _enter(tape: BlockTape, enter: ops.Enter) -> Iterator[Node]:
    name = yield from gathered(tape, enter.source)
    # Otherwise a region drops its gathered input after its forward.
    tape.entered[enter.target.name] = name, 0 if tape.work.recompute == "full" else tape.whole_bytes(enter.source)


def _norm(tape: BlockTape, norm: ops.Norm) -> Iterator[Node]:
    source, numel, width = norm.source.name, tape.elements(norm.target), tape.width(norm.over)
    num_rows, wide, backward_adds = numel // width, tape.wide, 0
    is_layer, on_cpu = norm.kind == "layer", tape.backend == "cpu"
    # A root, and for a layer norm a mean; on a CPU torch keeps both in the dtype of the input for a layer norm.
    numbers = 2 * (tape.item if on_cpu else wide) if is_layer else wide
    keeps = [source, tape.size(f"statistics of {norm.name}", num_rows * numbers)]
    if on_cpu and not is_layer:
        # A chain of operations, each of which keeps its operand.
        if wide > tape.item:
            keeps[0] = tape.size(f"widened by {norm.name}", numel * wide)
        keeps.append(tape.size(f"normalised by {norm.name}", numel * wide))
        backward_adds = 3 * numel * wide
    if norm.has_offset:  # the sum of weight and offset
        keeps.append(tape.size(f"weight of {norm.name}", width * tape.item))
    yield Node((source,), norm.target.name, tuple(keeps), backward_adds=backward_adds)


def product_node(tape: BlockTape, source: str, target: str, weight_numel: int, whole: int = 0) -> Node:
    """A product that keeps its `source`; `whole` are the bytes gathered before it or summed after it."""
    # The re-gathered input and the gradient of the region's output are alive together with the weight gradient.
    backward_adds = converted_bytes(weight_numel, tape.item, tape.wide, tape.backend) + 2 * whole
    return Node((source,), target, (source,), whole, backward_adds, weighs=True)


def _product(tape: BlockTape, product: ops.Product) -> Iterator[Node]:
    source, target, products = product.source, product.target, tape.work.products
    inputs, outputs = tape.width(source.features), tape.width(target.features)
    read, whole = tape.entered.get(source.name, (source.name, 0))
    # An input that is gathered or computed again for the backward is not kept in 8 bits.
    comes_again = whole > 0 or any(each.replay for each in tape.nodes if each.writes == read)
    if source.tokens is ops.Tokens.ALL and target.tokens is ops.Tokens.STREAM:
        whole = tape.whole_bytes(target)
    node = product_node(tape, read, target.name, inputs * outputs, whole)
    node = node._replace(variables=tuple(tape.entered.get(name, (name, 0))[0] for name in product.holds))
    if products is not None:
        matrices = tape.units(ops.Dim("experts", product.stack))
        scales = [_SCALE_BYTES * matrices * (each if scales_rows(products) else 1) for each in (inputs, outputs)]
        result = target._replace(tokens=source.tokens)  # before its sum over ranks
        node = node._replace(codes=tape.elements(result) + scales[1])
        if not comes_again:
            codes = tape.size(f"codes of {read}", tape.elements(source) + scales[0])
            node = node._replace(keeps=(codes,))
    yield node


def _plain_product(tape: BlockTape, product: ops.PlainProduct) -> Iterator[Node]:
    (inputs, outputs), target = (each.features.numel for each in (product.source, product.target)), product.target.name
    if target == ops.OUTPUT:
        # Counted as large as the block's input, whatever the product writes.
        tape.size(ops.OUTPUT, tape.sizes[ops.INPUT])
        numel = inputs * outputs // tape.work.tensor
    else:
        width = -(-outputs // tape.work.tensor)
        tape.size(target, tape.work.tokens * width * tape.item)
        numel = inputs * width
    yield product_node(tape, product.source.name, target, numel)


def _rotary(tape: BlockTape, rotary: ops.Rotary) -> Iterator[Node]:
    for source, target in zip(rotary.reads, rotary.writes, strict=True):
        whole = tape.bytes_of(target)
        yield Node((source.name,), target.name, forward_adds=whole, backward_adds=whole)


def _join(tape: BlockTape, join: ops.Join) -> Iterator[Node]:
    yield Node(tuple(each.name for each in join.reads), join.target.name)


def _scale(tape: BlockTape, scale: ops.Scale) -> Iterator[Node]:
    yield Node((scale.source.name,), scale.target.name)


def _sum(tape: BlockTape, sum_: ops.Sum) -> Iterator[Node]:
    yield Node(tuple(each.name for each in sum_.reads), sum_.target.name, is_sum=True)


def _activation(tape: BlockTape, activation: ops.Activation) -> Iterator[Node]:
    source, *up = (each.name for each in activation.reads)
    target, is_relu = activation.target.name, activation.function == "relu"
    if activation.keeps_operands:
        # One more tensor of this size beside the result; two, and a mask, beside both gradients.
        whole, mask = tape.sizes[target], tape.elements(activation.target)
        yield Node((source, *up), target, (source, *up), forward_adds=whole, backward_adds=2 * whole + mask)
        return
    active = tape.size(f"activated {source}", tape.sizes[target]) if up else target
    if up and "gated activations" in tape.work.served and activation.target.tokens is not ops.Tokens.ROWS:
        # One kernel, which serves no experts. Its gradients are written over gate and up; they count as new here, so a
        # peak is never too low.
        active = source
    else:
        # relu's gradient only needs its result, which the next operation keeps anyway.
        yield Node((source,), active, (active if is_relu else source,))
    if up:
        yield Node((active, *up), target, (active, *up))


def _core(tape: BlockTape, core: ops.Core) -> Iterator[Node]:
    """The nodes of attention. Scores are measured before its first kernel, in a ring between messages of keys."""
    work = tape.work
    length = math.ceil(work.most_attended / work.micro_batch)
    measured = score_bytes(length, work.attended_heads, tape.item, tape.backend) if work.measures_scores else 0
    for node in _attention(tape, core):
        adds = node.forward_adds + measured if work.is_spread else max(node.forward_adds, measured)
        yield node._replace(forward_adds=adds)
        measured = 0


def _attention(tape: BlockTape, core: ops.Core) -> Iterator[Node]:
    work, mixed = tape.work, core.target.name
    reads = operands = tuple(each.name for each in core.reads)
    if work.is_spread:
        yield _spread_core(tape, core)
        return
    if core.sinks and tape.backend == "cpu":  # in pairs of runs, which are views (terrace.model.sinks)
        log_sums = tape.size("log-sums", work.tokens * tape.units(core.source.features) * tape.wide)
        yield Node(reads, mixed, (*reads, mixed, log_sums), backward_adds=2 * tape.sizes[log_sums])
        return
    in_pieces = work.is_masked and work.kernel_on(tape.backend) == "pieces"
    # Windows and masks make attention copy its keys and values.
    if copied := copied_bytes(work, tape.backend, tape.sizes[operands[1]], tape.sizes[operands[0]]):
        for name in operands[1:]:
            reads = (*reads, tape.size(f"copied {name}", copied))
            yield Node((name,), reads[-1])
    # Fused kernels write heads merged already; plain products and pieces need a contiguous copy.
    copies = (in_pieces or not work.flash) and core.value_dim == core.head_dim  # else a join merges them
    written = tape.size("heads apart", tape.sizes[mixed]) if copies else mixed
    if work.flash:
        statistics = work.tokens * tape.units(core.source.features) * tape.wide
        # The gradient of the output, times the output, is summed per token and head.
        keeps = (*reads, written, tape.size("log-sums", statistics))
        yield Node(reads, written, keeps, backward_adds=statistics)
    else:
        yield _plain_core(tape, core, reads, written, in_pieces)
    if copies:
        yield Node((written,), mixed)


def _plain_core(tape: BlockTape, core: ops.Core, reads: tuple[str, ...], written: str, in_pieces: bool) -> Node:
    """Attention by plain products, in fp32 at least, with scaled queries and keys.

    Capped scores are kept twice where no kernel caps them: before and after the softmax.
    """
    sequence, capped, wide = tape.work.sequence, core.cap > 0, tape.wide
    # torch repeats keys for every query head; our implementation for CPUs and caps does not.
    own_form = tape.backend == "cpu" or capped
    query, key, _ = (tape.elements(each) for each in core.reads)
    keyed, keys = key if own_form else query, min(sequence, CPU_PLAIN_SEQUENCE) if in_pieces else sequence
    if capped and in_pieces:  # of any length; under a window each also sees the piece before
        length = piece_tokens(core.window, sequence)
        keys, keyed = min(sequence, 2 * length), keyed * (2 if length < sequence else 1)
    scores = tape.work.tokens * tape.units(core.source.features) * keys * wide
    # Without grouped heads in fp32 or fp64, widening is a no-op, so the values are the layer's own tensor.
    is_own = tape.item == wide and core.kv_heads == core.heads and not capped
    sizes = {"scaled query": query * wide, "scaled key": keyed * wide, "softmax": scores}
    sizes |= ({} if is_own else {"wide value": keyed * wide}) | ({"capped scores": scores} if capped else {})
    tape.sizes |= sizes
    keeps = (*sizes, reads[2]) if is_own else tuple(sizes)
    # torch adds a mask to the scores; our implementation folds it into the product.
    return Node(reads, written, keeps, scores if own_form else 2 * scores, 2 * scores)


def _spread_core(tape: BlockTape, core: ops.Core) -> Node:
    """Attention over context ranks (terrace.runtime.context), which keeps its operands and output.

    Under Ulysses these are separate tensors, built from the all-to-all messages. A ring holds the keys of two rounds
    and one message of keys, plus their gradients in the backward. `balance = "cost"` is counted at its upper bound: all
    of `most_attended` arrives in messages, and a row's partial results are summed in fp32 at least, next to one result.
    """
    work, item, wide = tape.work, tape.item, tape.wide
    row = work.most_attended * core.head_dim * item  # of a head
    query, keys = row * work.attended_heads, 2 * row * work.attended_kv_heads
    log_sums = tape.sizes["log-sums"] = work.most_attended * work.attended_heads * wide
    # Keys being received, sent and used in the round; in the backward also gradients computed, received and sent.
    rounds = 0 if work.num_ring_ranks == 1 else 2 if work.num_ring_ranks == 2 else 3
    forward_adds, backward_adds = rounds * keys, log_sums
    if rounds:
        backward_adds = 4 * keys if work.num_ring_ranks == 2 else 5 * keys + log_sums
        # Keys are decoded when they are read. Codes are encoded, concatenated and sent while others arrive; in the
        # backward of a longer ring they take no more than uncoded keys would.
        codes = math.ceil(work.codes * keys)
        forward_adds += codes if work.num_ring_ranks == 2 else 3 * codes
        backward_adds += codes if work.num_ring_ranks == 2 else 0
    # A Ulysses rank receives all parts but its own.
    of_others = (query + keys) * (work.ulysses - 1) // work.ulysses
    if work.balance == "cost":
        # The balancer may assign every token to another rank, so all of them may arrive in messages.
        merged, of_others = query // item * wide, query + keys
        forward_adds += merged
        backward_adds += merged + keys // item * (2 * wide - item) + query + keys
    reads, output = tuple(each.name for each in core.reads), core.target.name
    kept = [*reads, output]
    if work.ulysses > 1 or work.balance == "cost":
        sizes = query, keys // 2, keys // 2, query
        kept = [tape.size(f"attended {name}", size) for name, size in zip(kept, sizes, strict=True)]
        # The layer's own output, and gradients of its operands, are alive while attention's tensors are sent back.
        forward_adds = max(forward_adds - tape.sizes[output], of_others)
        backward_adds = max(query + backward_adds, query + keys + of_others)
    return Node(reads, output, (*kept, "log-sums"), forward_adds, backward_adds)


def _look_up(tape: BlockTape, look_up: ops.LookUp) -> Iterator[Node]:
    """Embedding lookup plus learned positions; token ids are counted with the batch."""
    work, hidden, output = tape.work, look_up.target.features, look_up.target.name
    # The vocabulary is cut over all tensor ranks, and each sums rows of the full hidden size.
    whole = work.tokens * hidden.numel * tape.item if work.stream_cut > 1 else 0
    matrix = _rows_added(tape, tape.units(ops.Dim("vocab", look_up.vocabulary)), hidden.numel)
    is_scaled = look_up.factor != 1.0
    rows = tape.size("rows", tape.sizes[output]) if is_scaled or look_up.positions else output
    # Token ids have no gradient; a layer that looks up further tokens has an input beside them.
    yield Node((tape.size(ops.INPUT if look_up.owns else "tokens ahead", 0),), rows, (), whole, matrix + whole)
    if is_scaled:
        yield Node((rows,), output)
    elif look_up.positions:
        # Gradients of positions are summed over the sequences first.
        numel = (min(work.sequence, work.tokens) + look_up.positions) * tape.width(hidden)
        yield Node((rows,), output, backward_adds=numel * tape.item, is_sum=True)


def _rows_added(tape: BlockTape, words: int, hidden: int) -> int:
    """Bytes of an embedding's backward besides the gradient buffer, for a (words, hidden) matrix.

    On CUDA autograd's gradient is as large as the matrix. On a CPU the rows of the tokens are added directly into the
    accumulated gradient (terrace.runtime.weight_records); narrow rows are widened, and summed per word.
    """
    if tape.backend == "cuda":
        return words * hidden * tape.item
    tokens, row = tape.work.tokens, hidden * tape.wide
    return tokens * (row + _TOKEN_BYTES) + min(tokens, words) * row if tape.item < tape.wide else 0


def _loss(tape: BlockTape, loss: ops.Loss) -> Iterator[Node]:
    """Logits and the cross-entropy, which computes in fp32 at least."""
    work, source, output = tape.work, loss.source, tape.size(loss.target.name, _LOSS_BYTES)
    vocab, hidden = tape.units(ops.Dim("vocab", loss.vocabulary)), source.features.units
    tokens = work.tokens * loss.depths
    # Without tensor parallelism the whole block runs in its backward, where a kernel may overwrite the logits.
    tape.runs_at_once = work.tensor == 1
    in_place = tape.runs_at_once and "loss" in work.served
    # In chunks each depth runs by itself, on a copy of its representations and to a gradient of its own.
    apart = work.tokens if tape.runs_at_once else tokens
    adds = chunk_bytes(apart, vocab, hidden, tape.item, tape.wide, tape.backend, loss.cap > 0, in_place)
    if tape.runs_at_once and loss.depths > 1:
        adds += 2 * work.tokens * hidden * tape.item
    if loss.beside:  # as many logits of another model
        adds += min(tokens, chunk_rows(vocab, tape.backend)) * vocab * tape.item
    if tape.runs_at_once:
        # A variable holds the normalised input until the block has run; without a norm it is the block's.
        if tape.nodes:
            tape.nodes[-1] = tape.nodes[-1]._replace(keeps=(*tape.nodes[-1].keeps, source.name))
        yield Node((source.name,), output, (source.name,), adds, adds)
        return
    read = yield from _with_all_features(tape, source)
    # Per token: the label's index, whether it is on this rank, whether it counts, and the log-sum.
    statistics = tape.size("statistics of tokens", tokens * (_TOKEN_BYTES + 2 + tape.wide))
    keeps: tuple[str, ...] = (read, statistics)
    # If one chunk holds all tokens, its logits are kept for the backward; otherwise they are recomputed.
    if tokens <= chunk_rows(vocab, tape.backend):
        tape.logits_bytes = tokens * vocab * tape.item
        keeps = (*keeps, tape.size("logits", tape.logits_bytes))
    yield Node((read,), output, keeps, adds - tape.logits_bytes, adds - tape.logits_bytes)


def _score(tape: BlockTape, score: ops.Score) -> Iterator[Node]:
    read = yield from _with_all_features(tape, score.source)
    output = tape.size(score.target.name, tape.elements(score.target) * tape.wide)
    yield product_node(tape, read, output, score.source.features.numel)


def _with_all_features(tape: BlockTape, source: ops.Tensor) -> Generator[Node, None, str]:
    """Name of the head's input, gathered where tensor ranks share its tokens or features."""
    if tape.work.stream_cut == 1:
        return source.name
    whole = tape.size(f"whole {source.name}", tape.work.tokens * source.features.numel * tape.item)
    yield Node((source.name,), whole)
    return whole


RULES: dict[type[ops.Operation], Rule] = {
    ops.Enter: _enter,
    ops.Norm: _norm,
    ops.Product: _product,
    ops.PlainProduct: _plain_product,
    ops.Rotary: _rotary,
    ops.Join: _join,
    ops.Scale: _scale,
    ops.Sum: _sum,
    ops.Convolution: convolution_nodes,
    ops.Delta: delta_nodes,
    ops.Gate: gate_nodes,
    ops.Activation: _activation,
    ops.Core: _core,
    ops.LookUp: _look_up,
    ops.Loss: _loss,
    ops.Score: _score,
}
