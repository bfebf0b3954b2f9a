"""Messages of the tensor axis inside the blocks, in closed form.

A block's activations have the T tokens of a micro-batch on a rank, micro_batch x sequence or the part that a context
axis leaves (terrace.plan.context), padded to T' for the rows to divide. Let R and C be rows and columns, H the hidden
size, n the inner size of a linear layer on a rank. Per micro-batch, with every all-reduce made of a reduce-scatter and
an all-gather of the same elements (Megatron-LM 1909.08053, section 3; sequence parallel form: Korthikanti et al.
2205.05198, section 4.2; columns: AxoNN 2305.13525, section 4):

    layer      attention and MLP each: T' H / C over rows, a gather and a reduction forward, the same backward
               each linear layer into the inner size: an all-reduce of T n over columns, forward
               each linear layer out of it: an all-reduce of T n over columns, backward
    embedding  forward: a reduction of T' H over columns, then of T' H / C over rows; backward: gathers of the same,
               none where its matrix is frozen
    experts    of whole tokens: a gather of T' H over rows, forward and backward
               where a loss goes by the choices of whole sequences: B E numbers of each rank, for B sequences and E
               experts, gathered among all ranks that share sequences (message class `choices`), in a first forward
               alone
    head       forward: gathers of the same; backward: reductions; and 3 numbers a token for the loss, gathered,
               but for a head of values

With sequence parallelism a rank keeps its part of the inputs of attention and MLP, and gathers it once more in the
backward for the weight gradients (section 4.2.2 there), unless the block is recomputed. Without it a whole all-reduce
stands on one side and nothing on the other: one leg more for embedding and head. With columns, every norm also sums one
number a token (two of a layer norm) over them, forward and backward. A norm of all
heads together sums one number a token over the rows in the same way. A block that is recomputed does its forward twice.
`tests/system/test_tensor.py` holds the runtime's ledger against this.
"""

from collections.abc import Sequence

from terrace.model.params import ParamSpec
from terrace.model.spec import BlockSpec, Computes
from terrace.plan.dims import CUT_BY, hidden_size
from terrace.plan.in_block_messages import Leg, TensorMessage
from terrace.plan.mesh import no_sequence
from terrace.plan.residency import recomputed
from terrace.plan.tensor_traffic import TensorTraffic


def _is_inner(param: ParamSpec) -> bool:
    """Whether this is a matrix of attention or MLP, between the residual stream and an inner dim."""
    names = [name for name, _ in param.dims]
    return len(names) == 2 and "hidden" in names and any(CUT_BY.get(name) == ("rows",) for name in names)


def block_messages(tensor: TensorTraffic, blocks: Sequence[BlockSpec], index: int) -> tuple[list[TensorMessage], ...]:
    """(Messages of a forward, messages of a backward without recomputation) of a block, in order.

    Raises `PlanError` where there is a tensor axis and sequences have no length.
    """
    forward: list[TensorMessage] = []
    backward: list[TensorMessage] = []
    if tensor.degree == 1:
        return forward, backward
    if tensor.tokens < 1:
        raise no_sequence("tensor")
    block = blocks[index]
    forward_norms = _norm_messages(tensor, block)
    whole = (tensor.padded_tokens if tensor.splits_tokens else tensor.tokens) * hidden_size(blocks)
    cut = tensor.rows.padded(whole // tensor.columns.degree)
    rows, columns, both = tensor.rows.axes, tensor.columns.axes, tensor.both.axes
    # Without sequence parallelism activations are replicated over rows: one side all-reduces, the other is free.
    one_sided = not tensor.splits_tokens
    # A recomputed block gathers its input in the second forward anyway.
    regathers = tensor.splits_tokens and index not in recomputed(tensor.plan, blocks)

    def all_reduce(axes: tuple[str, ...], numel: int) -> list[TensorMessage]:
        return [TensorMessage(Leg.REDUCE, axes, numel), TensorMessage(Leg.GATHER, axes, numel)]

    # The kind of block follows from declared dims, not from its name.
    inner = [param for param in block.params if _is_inner(param)]
    if not inner and not forward_norms:  # the embedding
        forward += [TensorMessage(Leg.REDUCE, columns, whole), TensorMessage(Leg.REDUCE, rows, cut)]
        forward += [TensorMessage(Leg.GATHER, rows, cut)] if one_sided else []
        if any(param.trainable for param in block.params if param.dims[0][0] == "vocab"):
            backward += [] if one_sided else [TensorMessage(Leg.GATHER, rows, cut)]
            backward += [TensorMessage(Leg.GATHER, columns, whole)]
    elif not inner:  # the head
        forward += [] if one_sided else [TensorMessage(Leg.GATHER, rows, cut)]
        forward += [TensorMessage(Leg.GATHER, columns, whole)]
        # Every rank has all values, so a loss of these needs no message.
        if block.computes is not Computes.VALUES:
            forward += [TensorMessage(Leg.NUMBERS, both, 3 * tensor.tokens)]
        backward += [TensorMessage(Leg.REDUCE, columns, whole), TensorMessage(Leg.REDUCE, rows, cut)]
        backward += [TensorMessage(Leg.GATHER, rows, cut)] if one_sided else []
    else:
        for weight in inner:
            # A matrix back into the residual stream ends a region, so the region's messages are counted here.
            if weight.dims[0][0] == "hidden":
                parts = [cut] if one_sided else [cut // tensor.padded_tokens * part for part in tensor.token_chunks]
                legs = (Leg.REDUCE, Leg.GATHER) if one_sided else (Leg.GATHER, Leg.REDUCE)
                forward += [TensorMessage(leg, rows, part) for part in parts for leg in legs]
                backward += [TensorMessage(Leg.GATHER, rows, part) for part in parts]
                backward += [
                    TensorMessage(Leg.REDUCE, rows, cut),
                    *all_reduce(columns, _inner_numel(tensor, weight.shape[1])),
                ]
                backward += [TensorMessage(Leg.GATHER, rows, cut)] if regathers else []
            else:
                one_of = (
                    weight.dims[0][1] if weight.is_replicated_over("rows") else 1
                )  # of key-value heads that all ranks hold
                # Columns hold parts of the inner product's sum.
                forward += all_reduce(columns, _inner_numel(tensor, weight.shape[0] // one_of))
    # Each row routes a part of the tokens. Where the stream is whole, results and gradients are gathered.
    if one_sided and any(param.is_stack for param in block.params):
        routed = TensorMessage(Leg.GATHER, rows, tensor.padded_tokens * hidden_size(blocks))
        forward, backward = [*forward, routed], [*backward, routed]
    forward += forward_norms
    backward += forward_norms
    return _crossing(tensor, forward), _crossing(tensor, backward)


def _norm_messages(tensor: TensorTraffic, block: BlockSpec) -> list[TensorMessage]:
    tokens = tensor.padded_tokens // tensor.rows.degree if tensor.splits_tokens else tensor.tokens
    # A layer norm has two parameters and needs two sums (mean and variance), an rms norm one.
    norms = [param for param in block.params if _is_norm(param)]
    of_heads = [param for param in block.params if _is_norm_of_heads(param)]
    over_rows = TensorMessage(Leg.NUMBERS, tensor.rows.axes, tensor.tokens)  # in a region all tokens are there
    return [TensorMessage(Leg.NUMBERS, tensor.columns.axes, tokens)] * len(norms) + [over_rows] * len(of_heads)


def _crossing(tensor: TensorTraffic, messages: list[TensorMessage]) -> list[TensorMessage]:
    return [message for message in messages if tensor.line(message.axes).degree > 1 and message.numel]


def _is_norm(param: ParamSpec) -> bool:
    """Whether this belongs to a norm over the residual stream, as opposed to a per-head norm (whole on every rank)."""
    return len(param.dims) == 1 and param.dims[0][0] == "hidden" and "norm" in param.name.split(".")[-2]


def _is_norm_of_heads(param: ParamSpec) -> bool:
    """Whether this belongs to a norm over all heads together, which tensor rows split."""
    return len(param.dims) == 1 and param.dims[0][0] in ("heads", "kv_heads") and "norm" in param.name.split(".")[-2]


def _inner_numel(tensor: TensorTraffic, size: int) -> int:
    """Elements of a tensor inside a region on a rank, `size` per token, padded to a multiple of the columns."""
    return tensor.columns.padded(tensor.tokens * size)
