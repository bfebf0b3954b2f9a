"""The tape of a block on one rank, to which rules append nodes, and the bytes of its tensors.

Elements of a tensor follow from its tokens and its dim (terrace.model.operations). Where an axis cuts the quantity that
a dim counts, sizes are those of the rank with the most units. Under sequence parallelism tensor rows share the tokens
of the residual stream, and gather them for the products of attention and of the MLP.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from terrace.model import operations as ops
from terrace.plan.dims import CUT_BY
from terrace.plan.wire import FORMATS
from terrace.simulate.tape import Node

if TYPE_CHECKING:
    from terrace.simulate.work import Work

Backend = Literal["cpu", "cuda"]
Rule = Callable[["BlockTape", Any], Iterator[Node]]  # (tape, operation of its type)

_WIDE_BYTES = 4  # statistics, log-sums and scores are in fp32 at least


@dataclass
class BlockTape:
    """Nodes written so far, and bytes of each tensor by name.

    `rules` map an operation type to a generator of its nodes; a rule may add tensors with `size`.
    """

    work: "Work"
    backend: Backend
    operations: ops.Operations
    rules: Mapping[type[ops.Operation], Rule]
    nodes: list[Node] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    # Target of an `Enter` -> its name on the tape, and bytes gathered for each product and again for its backward.
    entered: dict[str, tuple[str, int]] = field(default_factory=dict)
    rows: int = 0  # that pass experts at a time
    logits_bytes: int = 0
    fixed_bytes: int = 0  # kept, whatever the number of sequences
    choices_bytes: int = 0  # of a mixture, which a recomputed block keeps
    runs_at_once: bool = False  # whether the backward runs the whole block, and the forward nothing

    def __post_init__(self) -> None:
        work = self.work
        self.item = FORMATS[work.compute].element_bytes
        self.wide = max(self.item, _WIDE_BYTES)
        # Tensor rows that share the tokens of the residual stream.
        self.stream_rows = work.rows if work.sequence_parallel else 1
        stream = self.bytes_of(ops.Tensor(ops.INPUT, work.layer.hidden))
        self.sizes |= {ops.INPUT: self.operations.widths[0] * stream, ops.OUTPUT: stream}
        for operation in self.operations:
            for node in self.nodes_of(operation):  # one by one: rules look at the nodes before
                self.nodes.append(node)
        if not self.nodes:
            self.nodes.append(Node((ops.INPUT,), ops.OUTPUT, name="pass on"))

    def nodes_of(self, operation: ops.Operation) -> Iterator[Node]:
        """Nodes of an operation. Raises `KeyError` for a type without a rule."""
        for tensor in operation.writes:
            self.sizes[tensor.name] = self.bytes_of(tensor)
        replay = operation.name if self._part(operation) in self.work.operations else ""
        for node in self.rules[type(operation)](self, operation):
            # Nodes of a nested operation already carry its name.
            yield node if node.name else node._replace(name=operation.name, replay=replay)

    def size(self, name: str, num_bytes: int) -> str:
        """Register a tensor of `num_bytes` and return its name."""
        self.sizes[name] = num_bytes
        return name

    def units(self, dim: ops.Dim) -> int:
        """Units of a dim on the rank with the most."""
        work, of_experts = self.work, dim.counts in ("experts", "expert_intermediate")
        rows = work.expert_rows if of_experts else work.rows  # experts have rows of their own
        degrees = {"rows": rows, "columns": work.columns, "expert": work.expert}
        return -(-dim.units // math.prod(degrees[axis] for axis in CUT_BY.get(dim.counts, ())))

    def width(self, dim: ops.Dim) -> int:
        """Elements of a dim on the rank with the most."""
        return self.units(dim) * dim.size

    def elements(self, tensor: ops.Tensor) -> int:
        """Elements of a tensor on a rank."""
        width = self.width(tensor.features)
        match tensor.tokens:
            case ops.Tokens.STREAM:
                return self.work.tokens * width // self.stream_rows
            case ops.Tokens.ALL:
                return self.work.tokens * width
            case ops.Tokens.ROUTED:
                return self.work.routed * width
            case ops.Tokens.ROWS:
                return self.rows * width

    def bytes_of(self, tensor: ops.Tensor) -> int:
        """Bytes of a tensor in the compute dtype on a rank."""
        return self.elements(tensor) * self.item

    def whole_bytes(self, tensor: ops.Tensor) -> int:
        """Bytes of a residual-stream tensor with all tokens, where tensor rows share them; else 0."""
        return self.bytes_of(tensor._replace(tokens=ops.Tokens.ALL)) if self.stream_rows > 1 else 0

    def _part(self, operation: ops.Operation) -> str:
        """Recomputable part (one of `terrace.plan.recompute.OPERATIONS`) that the operation belongs to; "" if none."""
        match operation:
            case ops.Core():
                return "attention"
            case ops.Join() if operation.source == self.work.layer.core.target:  # of the heads' values
                return "attention"
            case ops.Activation():
                return "mlp"
            case ops.Norm() if operation.target.name in self._entering:
                return "norms"
            case _:
                return ""

    @cached_property
    def _entering(self) -> frozenset[str]:
        """Names of the tensors that attention, the MLP and mixtures read."""
        return frozenset(each.source.name for each in self.operations if isinstance(each, ops.Enter | ops.Mixture))
