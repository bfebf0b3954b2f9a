"""The operations of a block: the one description of a layer, from which every other fact about it follows.

A block is a list of operations in the order in which its forward runs them. An operation reads and writes tensors whose
features are counted in named dims, so that its parameters, FLOPs, seconds, kept tensors, regions, messages and slices
are short folds over the list:

    parameters, FLOPs        terrace.model.operation_folds
    seconds                  terrace.simulate.layers
    tensors that are kept    terrace.simulate.kept_tensors
    regions, messages        terrace.program.block_program.regions
    stand-ins on a rank      terrace.runtime.tensor

terrace.model.block_operations makes the lists of a decoder. Each rule about an operation is written by its type: what a
product costs, keeps and how it may be cut is said once in each fold, for every product of every model. Pure: needs no
torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Literal, NamedTuple, TypeVar

from terrace.base.hashing import hashed_once
from terrace.model.experts.config import ExpertsConfig
from terrace.model.rope_scaling import RopeScaling

INPUT, OUTPUT = "input", "output"  # of a block, among its tensors


class Dim(NamedTuple):
    """Features of a token: the quantity that they count, its units, and the elements of a unit, which is never cut."""

    counts: str
    units: int
    size: int = 1

    @property
    def numel(self) -> int:
        """Elements."""
        return self.units * self.size


class Tokens(StrEnum):
    """The tokens that a rank has of a tensor."""

    STREAM = "stream"  # of the residual stream: a part of the micro-batch's under sequence parallelism
    ALL = "all"  # of the micro-batch, on every tensor row
    ROUTED = "routed"  # those whose experts a rank chooses
    ROWS = "rows"  # a row for each expert that a token passes


class Tensor(NamedTuple):
    """A tensor of a block: (tokens, features)."""

    name: str
    features: Dim
    tokens: Tokens = Tokens.STREAM


@dataclass(frozen=True)
class Operation:
    """An operation, its operands and its results. `holds` are operands that variables keep alive until it has run."""

    name: str
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]

    @property
    def source(self) -> Tensor:
        """Its first operand."""
        return self.reads[0]

    @property
    def target(self) -> Tensor:
        """Its first result."""
        return self.writes[0]


@dataclass(frozen=True)
class Enter(Operation):
    """From the residual stream into attention or the MLP, which see every token: tensor rows gather their parts."""


@dataclass(frozen=True)
class Norm(Operation):
    """A normalisation of `over` features at a time, with the parameters `weight` and, of a layer norm, a bias."""

    weight: str
    over: Dim
    kind: Literal["rms", "layer"] = "rms"
    has_offset: bool = False  # multiplies by 1 + weight


@dataclass(frozen=True)
class Product(Operation):
    """A product with the matrix `weight`, (features written, features read), and a bias.

    Products of one `group` read the same operand, one after the other, and may run as one. In a mixture `stack` counts
    the matrices side by side, of which a row meets one.
    """

    weight: str
    has_bias: bool = False
    group: str = ""
    stack: int = 1
    holds: tuple[str, ...] = ()

    @property
    def inputs(self) -> Dim:
        """Features read."""
        return self.source.features

    @property
    def outputs(self) -> Dim:
        """Features written."""
        return self.target.features

    @property
    def leaves(self) -> bool:
        """Whether it ends attention or the MLP: it writes the residual stream, from features of all tokens."""
        return self.source.tokens is Tokens.ALL and self.target.tokens is Tokens.STREAM


@dataclass(frozen=True)
class Rotary(Operation):
    """Rotary positions of queries and keys: each operand to the result at its place."""

    dim: int  # leading elements of a head that are turned
    theta: float
    scaling: RopeScaling | None = None
    limit: int = 0  # the longest row with the frequencies of all shorter ones; 0: rows of any length


@dataclass(frozen=True)
class Join(Operation):
    """Copies parts of its operands into one tensor, side by side, or beside zeros."""


@dataclass(frozen=True)
class Scale(Operation):
    """A multiplication by a constant. `in_sum`: the next sum multiplies; only the gradient is a tensor of its own."""

    factor: float
    in_sum: bool = False


@dataclass(frozen=True)
class Core(Operation):
    """Causal attention of queries to keys and values: softmax(q k^T) v of `heads`, which share `kv_heads`.

    `value_dim` elements of a value are not zeros that fill it up to `head_dim`. Where keys and values are products of a
    `latent`, that is what a generator keeps of a token.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    latent: Tensor | None = None
    window: int = 0  # a token sees itself and the window - 1 before it; 0: all before it
    cap: float = 0.0  # of scores; 0: none

    @property
    def cached(self) -> tuple[Tensor, ...]:
        """The tensors that a generator keeps of a token: keys and values, or one from which both follow."""
        return self.reads[1:] if self.latent is None else (self.latent,)

    @property
    def is_grouped(self) -> bool:
        """Whether several heads share keys and values."""
        return self.kv_heads != self.heads


@dataclass(frozen=True)
class Activation(Operation):
    """act(x), or act(gate) * up of two operands."""

    function: str

    @property
    def is_gated(self) -> bool:
        """Whether it multiplies two operands."""
        return len(self.reads) == 2


@dataclass(frozen=True)
class Sum(Operation):
    """The residual stream, and what attention or the MLP adds to it."""


@hashed_once
@dataclass(frozen=True)
class Mixture(Operation):
    """A mixture of experts in place of an MLP: routes a token to experts, and sums their weighted results.

    `each` are the operations of an expert on its rows, `shared` those of an expert that every token passes, and
    `shared_gate` the product whose sigmoid multiplies its result, if any.
    """

    experts: ExpertsConfig
    weight: str  # the module's name
    each: tuple[Operation, ...]
    shared: tuple[Operation, ...] = ()
    shared_gate: tuple[Product, ...] = ()  # one or none

    @property
    def hidden(self) -> Dim:
        """Features of a token."""
        return self.source.features


@dataclass(frozen=True)
class LookUp(Operation):
    """Rows of a matrix for tokens, and of learned `positions`, if it has any."""

    weight: str
    vocabulary: int
    positions: int = 0
    factor: float = 1.0


@dataclass(frozen=True)
class Loss(Operation):
    """Logits and the cross-entropy of each token. Without `owns` its matrix is another block's."""

    weight: str
    vocabulary: int
    owns: bool = True
    cap: float = 0.0  # of logits; 0: none


@dataclass(frozen=True)
class Score(Operation):
    """A product with one output, in fp32 at least: the value of each token."""

    weight: str


@dataclass(frozen=True)
class PlainProduct(Operation):
    """A product of which no more than the size is known; tensor ranks share its outputs evenly."""


_Operation = TypeVar("_Operation", bound=Operation)


@hashed_once
@dataclass(frozen=True)
class Operations:
    """The operations of a block, in order."""

    each: tuple[Operation, ...] = ()

    def __iter__(self) -> Iterator[Operation]:
        return iter(self.each)

    def of(self, kind: type[_Operation]) -> list[_Operation]:
        """Its operations of a type."""
        return [operation for operation in self.each if isinstance(operation, kind)]

    @cached_property
    def passed(self) -> tuple[Operation, ...]:
        """Its operations, and after a mixture those of the shared expert, which every token passes too."""
        return tuple(chained for each in self.each for chained in (each, *_shared(each)))

    @cached_property
    def core(self) -> Core:
        """Its attention; `NO_CORE` where it has none."""
        return next(iter(self.of(Core)), NO_CORE)

    @cached_property
    def mixture(self) -> Mixture:
        """Its mixture of experts; `NO_MIXTURE` where every token passes an MLP, or the block has neither."""
        return next(iter(self.of(Mixture)), NO_MIXTURE)

    @cached_property
    def hidden(self) -> Dim:
        """Features of the residual stream; none where the block does not say."""
        streams = (tensor for each in self.each for tensor in (*each.reads, *each.writes))
        return next((each.features for each in streams if each.features.counts in ("hidden", "features")), NO_FEATURES)


def _shared(operation: Operation) -> tuple[Operation, ...]:
    return operation.shared if isinstance(operation, Mixture) else ()


NO_FEATURES = Dim("", 0)
NO_CORE = Core("no attention", (), (), heads=0, kv_heads=0, head_dim=0, value_dim=0)
# Of one expert, which every token passes: its products are the MLP's own.
_ONE = ExpertsConfig(num_experts=1, per_token=1, intermediate_size=0)
NO_MIXTURE = Mixture("no mixture", (), (), experts=_ONE, weight="", each=())
NO_OPERATIONS = Operations()


def chain(matrices: Sequence[tuple[int, int]]) -> Operations:
    """Products with (inputs, outputs), one after the other."""
    tensors = [Tensor(INPUT, NO_FEATURES)]
    found = []
    for index, (inputs, outputs) in enumerate(matrices):
        name = "last product" if index == len(matrices) - 1 else f"product {index}"
        source = tensors[-1]._replace(features=Dim("", inputs))
        tensors.append(Tensor(OUTPUT if index == len(matrices) - 1 else name, Dim("", outputs)))
        found.append(PlainProduct(name, (source,), (tensors[-1],)))
    return Operations(tuple(found))
