"""Operations of a block: the single description of a layer, from which everything else is derived.

A block is a list of operations in the order of its forward. Operations read and write tensors with named feature dims,
so that parameters, FLOPs, seconds, saved tensors, regions, messages and slices are short folds over the list:

    parameters, FLOPs        terrace.model.operation_folds
    seconds                  terrace.simulate.layers
    saved tensors            terrace.simulate.kept_tensors
    regions, messages        terrace.program.block_program.regions
    modules on a rank        terrace.runtime.tensor

terrace.model.block_operations builds the lists of a decoder. Each fold has one rule per type of operation: the cost of
a product, what it saves and how it is sharded are written once, for all products of all models. Needs no torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Literal, NamedTuple, TypeVar

from terrace.base.hashing import hashed_once
from terrace.model.experts.config import ExpertsConfig
from terrace.model.rope_scaling import RopeScaling

CHUNK = 64  # tokens of a chunk of the gated delta rule (2412.06464, section 3.3); shorter runs are one chunk

INPUT, OUTPUT = "input", "output"  # names of a block's input and output tensors


class Dim(NamedTuple):
    """Feature dim: `units` of the quantity `counts` with `size` elements each; a unit is never split."""

    counts: str
    units: int
    size: int = 1

    @property
    def numel(self) -> int:
        return self.units * self.size


class Tokens(StrEnum):
    """Which tokens of a tensor a rank has."""

    STREAM = "stream"  # those of its residual stream: a shard of the micro-batch under sequence parallelism
    ALL = "all"  # the whole micro-batch, on every tensor row
    ROUTED = "routed"  # those that this rank routes to experts
    ROWS = "rows"  # one row per token and chosen expert


class Tensor(NamedTuple):
    """A tensor of a block: (tokens, features)."""

    name: str
    features: Dim
    tokens: Tokens = Tokens.STREAM


@dataclass(frozen=True)
class Operation:
    """An operation with its operands and results. `holds` (of a product) names tensors that are alive until it ran."""

    name: str
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]

    @property
    def source(self) -> Tensor:
        return self.reads[0]

    @property
    def target(self) -> Tensor:
        return self.writes[0]


@dataclass(frozen=True)
class Enter(Operation):
    """Entry to attention or the MLP, which need all tokens: tensor rows gather their shards of the residual stream."""


@dataclass(frozen=True)
class Norm(Operation):
    """A norm over `over` features, with the parameter `weight` and, for a layer norm, a bias."""

    weight: str
    over: Dim
    kind: Literal["rms", "layer"] = "rms"
    has_offset: bool = False  # multiplies by 1 + weight


@dataclass(frozen=True)
class Product(Operation):
    """A product with the matrix `weight` (outputs, inputs), and optionally a bias.

    Adjacent products of one `group` read the same operand and may run as one. In a mixture, `stack` is the number of
    experts, each with a matrix of its own.
    """

    weight: str
    has_bias: bool = False
    group: str = ""
    stack: int = 1
    holds: tuple[str, ...] = ()

    @property
    def inputs(self) -> Dim:
        return self.source.features

    @property
    def outputs(self) -> Dim:
        return self.target.features

    @property
    def leaves(self) -> bool:
        """Whether it is the output projection of attention or an MLP, which returns to the residual stream."""
        return self.source.tokens is Tokens.ALL and self.target.tokens is Tokens.STREAM


@dataclass(frozen=True)
class Rotary(Operation):
    """RoPE on queries and keys; operand i gives result i."""

    dim: int  # elements of a head that are rotated
    theta: float
    scaling: RopeScaling | None = None
    limit: int = 0  # row length up to which frequencies do not depend on the length; 0: no limit


@dataclass(frozen=True)
class Join(Operation):
    """A copy of slices of the operands, concatenated or padded with zeros."""


@dataclass(frozen=True)
class Scale(Operation):
    """A multiplication by a constant. `in_sum`: fused into the next sum, so that only the gradient is a new tensor."""

    factor: float
    in_sum: bool = False


@dataclass(frozen=True)
class Core(Operation):
    """Causal attention, softmax(q k^T) v, with `heads` query heads and `kv_heads` key-value heads.

    Values have `value_dim` elements, zero-padded to `head_dim`. If keys and values are projected from a `latent`,
    generation caches the latent.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    latent: Tensor | None = None
    window: int = 0  # a token sees itself and the window - 1 before it; 0: all before it
    cap: float = 0.0  # of scores; 0: none
    sinks: str = ""  # parameter of a learned logit per head (terrace.model.sinks); empty: none

    @property
    def cached(self) -> tuple[Tensor, ...]:
        """Tensors that generation caches for a token: keys and values, or the latent."""
        return self.reads[1:] if self.latent is None else (self.latent,)

    @property
    def is_grouped(self) -> bool:
        """Whether several heads share keys and values."""
        return self.kv_heads != self.heads


@dataclass(frozen=True)
class Convolution(Operation):
    """A causal convolution of each feature with `taps` tokens, then silu; `weight` (features, 1, taps)."""

    weight: str
    taps: int


@dataclass(frozen=True)
class Delta(Operation):
    """The gated delta rule (terrace.model.delta_rule) on queries, keys, values, decays and strengths.

    Each of `heads` value heads has a state of (`key_dim`, `value_dim`) numbers, the same for any length. `log_decay`
    and `decay_bias` are its parameters, a number per head and per decay.
    """

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    taps: int  # of the convolutions before it: generation also caches their last inputs
    log_decay: str
    decay_bias: str

    @property
    def decays(self) -> Dim:
        """Decays of a token: a number per head, or per element of a head's key."""
        return self.reads[3].features

    @property
    def state_numel(self) -> int:
        """Numbers of the states of all heads."""
        return self.heads * self.key_dim * self.value_dim

    @property
    def multiplications(self) -> int:
        """Per token: in a whole chunk scores of keys and of queries, the solution, and products with the state."""
        key, value = self.key_dim, self.value_dim
        in_chunk = CHUNK * (2 * key + value) + CHUNK * (key + value) // 2
        return self.heads * (in_chunk + 3 * key * value)


@dataclass(frozen=True)
class Gate(Operation):
    """act(gate) * x of the operands (gate, x), on the heads before the output projection."""

    function: str


@dataclass(frozen=True)
class Activation(Operation):
    """act(x), or act(gate) * up of two operands. If it `keeps_operands`, its backward computes act(gate) again."""

    function: str
    keeps_operands: bool = False

    @property
    def is_gated(self) -> bool:
        return len(self.reads) == 2


@dataclass(frozen=True)
class Sum(Operation):
    """The residual addition: the stream plus the output of attention or the MLP."""


@hashed_once
@dataclass(frozen=True)
class Mixture(Operation):
    """A mixture of experts: routes tokens to experts and sums their weighted outputs.

    `each` has the operations of an expert on its rows, `shared` those of the shared expert, which every token passes,
    and `shared_gate` the product whose sigmoid multiplies the output of the shared expert, if any.
    """

    experts: ExpertsConfig
    weight: str  # the module's name
    each: tuple[Operation, ...]
    shared: tuple[Operation, ...] = ()
    shared_gate: tuple[Product, ...] = ()  # one or none

    @property
    def hidden(self) -> Dim:
        return self.source.features


@dataclass(frozen=True)
class LookUp(Operation):
    """An embedding look-up, plus learned `positions` if there are any.

    Not `owns`: the table belongs to another block, and the tokens are later ones than the block's own.
    """

    weight: str
    vocabulary: int
    positions: int = 0
    factor: float = 1.0
    owns: bool = True


@dataclass(frozen=True)
class Loss(Operation):
    """Logits and cross-entropy of each representation of a token. Not `owns`: the matrix is another block's (tied).

    With `beside`, the hidden size of another model, the loss also computes that model's logits of each token, without
    gradients. If it `only_reads`, the hidden states that enter the output matrix are read, and there are no logits. A
    token of mixed rows has a label of each (`num_labels` 2).
    """

    weight: str
    vocabulary: int
    owns: bool = True
    cap: float = 0.0  # of logits; 0: none
    beside: int = 0
    only_reads: bool = False
    num_labels: int = 1

    @property
    def depths(self) -> int:
        """Representations of a token, each with logits of its own."""
        return self.source.features.size

    @property
    def numbers(self) -> int:
        """Numbers of each token that tensor ranks exchange: the logit of each label and 2 of all its own logits, and 4
        of those of another model.
        """
        return 0 if self.only_reads else self.depths * (self.num_labels + 2 + 4 * (self.beside > 0))


@dataclass(frozen=True)
class Score(Operation):
    """A product with one output per token, in at least fp32: the value of the token."""

    weight: str


@dataclass(frozen=True)
class PlainProduct(Operation):
    """A product of which only the sizes are known; its outputs are divided evenly among tensor ranks."""


_Operation = TypeVar("_Operation", bound=Operation)


@hashed_once
@dataclass(frozen=True)
class Operations:
    """The operations of a block, in order."""

    each: tuple[Operation, ...] = ()

    def __iter__(self) -> Iterator[Operation]:
        return iter(self.each)

    def of(self, kind: type[_Operation]) -> list[_Operation]:
        return [operation for operation in self.each if isinstance(operation, kind)]

    @cached_property
    def passed(self) -> tuple[Operation, ...]:
        """All operations, with those of a shared expert after its mixture."""
        return tuple(chained for each in self.each for chained in (each, *_shared(each)))

    @cached_property
    def core(self) -> Core:
        """The attention core, or `NO_CORE`."""
        return next(iter(self.of(Core)), NO_CORE)

    @cached_property
    def delta(self) -> Delta:
        """The gated delta rule, or `NO_DELTA`."""
        return next(iter(self.of(Delta)), NO_DELTA)

    @cached_property
    def mixture(self) -> Mixture:
        """The mixture of experts, or `NO_MIXTURE`."""
        return next(iter(self.of(Mixture)), NO_MIXTURE)

    @cached_property
    def hidden(self) -> Dim:
        """Feature dim of the residual stream, or `NO_FEATURES` if unknown."""
        streams = (tensor for each in self.each for tensor in (*each.reads, *each.writes))
        found = next((each.features for each in streams if each.features.counts in ("hidden", "features")), NO_FEATURES)
        return found._replace(size=1) if found.counts == "hidden" else found

    @cached_property
    def widths(self) -> tuple[int, int]:
        """Representations of a token in the block's input and in its output: 1, except beside `reads_ahead`."""
        tensors = [tensor for each in self.each for tensor in (*each.reads, *each.writes)]
        sizes = {each.name: each.features.size for each in tensors if each.features.counts == "hidden"}
        return sizes.get(INPUT, 1), sizes.get(OUTPUT, 1)

    @cached_property
    def reads_ahead(self) -> int:
        """How many tokens ahead the block looks up an embedding (terrace.model.decoder); 0: it does not."""
        return self.widths[0] if any(not each.owns for each in self.of(LookUp)) else 0


def _shared(operation: Operation) -> tuple[Operation, ...]:
    return operation.shared if isinstance(operation, Mixture) else ()


NO_FEATURES = Dim("", 0)
NO_CORE = Core("no attention", (), (), heads=0, kv_heads=0, head_dim=0, value_dim=0)
NO_DELTA = Delta("no delta rule", (), (), 0, 0, key_dim=0, value_dim=0, taps=1, log_decay="", decay_bias="")
# One expert for every token, as if an MLP were a mixture.
_ONE = ExpertsConfig(num_experts=1, per_token=1, intermediate_size=0)
NO_MIXTURE = Mixture("no mixture", (), (), experts=_ONE, weight="", each=())
NO_OPERATIONS = Operations()


def chain(matrices: Sequence[tuple[int, int]]) -> Operations:
    """A sequence of products with these (inputs, outputs)."""
    tensors = [Tensor(INPUT, NO_FEATURES)]
    found = []
    for index, (inputs, outputs) in enumerate(matrices):
        name = "last product" if index == len(matrices) - 1 else f"product {index}"
        source = tensors[-1]._replace(features=Dim("", inputs))
        tensors.append(Tensor(OUTPUT if index == len(matrices) - 1 else name, Dim("", outputs)))
        found.append(PlainProduct(name, (source,), (tensors[-1],)))
    return Operations(tuple(found))
