"""Work: one rank's share of one micro-batch, in the numbers that costs and activations depend on."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from terrace.base.errors import PlanError
from terrace.base.hashing import hashed_once
from terrace.model.attention_kernel import AttentionCase, AttentionChoice, AttentionKernel, expected
from terrace.model.operations import Dim, Operations, Tensor, Tokens
from terrace.model.part_kernel import Part
from terrace.plan.context import Heads, count_local_tokens
from terrace.plan.dims import rank_numel
from terrace.sequence.capacity import most_attended
from terrace.sequence.lengths import WHOLE_ROWS, Ragged


@hashed_once
@dataclass(frozen=True, kw_only=True)
class Work:
    """A micro-batch of `micro_batch` sequences of `sequence` tokens in a block, cut over tensor and context ranks.

    `layer` are the operations of the block; for a whole model, those that its layers share
    (terrace.simulate.masks.work_in gives the work in each block).

    The `tensor` ranks are rows x columns (terrace.plan.slices): linear layers are cut by both, the core of attention
    and the inner tensors of the MLP by rows, the residual stream by columns and, under sequence parallelism, by rows
    too.

    `recompute` says whether a layer's backward recomputes the whole layer; otherwise it recomputes only `operations`
    (terrace.plan.recompute). `flash`: the attention kernel never writes the S x S scores, and recomputes its core
    (QK^T, softmax and the product with V) itself. `documents`: a row may hold several, each of which attends only to
    itself (terrace.model.attention), of the lengths of `ragged`. `attention` is the kernel that a run requests.

    The context axis is `ulysses` x `ring` ranks (terrace.plan.context). Outside attention each rank holds `tokens`,
    padding included. In attention the `ulysses` ranks of one ring rank share its `attended` tokens and split the heads.
    With `balance = "cost"` this is an even share: a ring rank has up to `most_attended`, and the rows of `pooled` data
    ranks are attended to by all their ring ranks together. `codes` is the ratio of coded to uncoded bytes of a row of
    keys, 0 where messages of the context axis have no format.

    `expert` ranks hold different experts, and every expert is cut over `expert_rows` ranks. For memory, tokens are
    dispatched in `expert_chunks` in a forward and in a backward, and `load` is the rows of a rank's experts over their
    mean. Their products are priced separately (terrace.simulate.routed).
    """

    layer: Operations
    sequence: int
    micro_batch: int = 1
    tensor: int = 1
    columns: int = 1
    ulysses: int = 1
    ring: int = 1
    balance: Literal["tokens", "cost"] = "tokens"
    pooled: int = 1  # data ranks; of effect with balance = "cost" alone
    sequence_parallel: bool = True  # norms and residual cut over the tensor rows; without effect at one row
    recompute: Literal["none", "full"] = "none"
    operations: tuple[str, ...] = ()
    flash: bool = True
    causal: bool = True
    compute: Literal["bf16", "fp16", "fp32", "fp64"] = "bf16"
    products: str | None = None  # of layers, in 8 bits (terrace.plan.products); None: in `compute`
    codes_of_weights: bool = False  # weights are held as the codes of these products
    measures_scores: bool = False  # a forward takes the largest score of each head (terrace.runtime.scores)
    documents: bool = False
    attention: AttentionChoice = "auto"
    served: tuple[Part, ...] = ()  # parts with kernels of liger-kernel (terrace.model.part_kernel)
    expert: int = 1
    expert_rows: int = 1
    expert_chunks: tuple[int, int] = (1, 1)
    load: float = 1.0
    codes: float = 0.0
    ragged: Ragged = WHOLE_ROWS  # the lengths of the documents, if known

    def __post_init__(self) -> None:
        if self.tensor % self.columns:
            raise PlanError(
                f"columns = {self.columns} do not divide tensor = {self.tensor}, rows x columns: give a divisor"
            )

    @property
    def is_masked(self) -> bool:
        """Whether a token may not see all earlier tokens of its row."""
        return self.documents or 0 < self.layer.core.window < self.sequence

    def kernel_on(self, backend: str) -> AttentionKernel:
        """The attention kernel that runs if torch provides all of them."""
        core = self.layer.core
        case = AttentionCase(backend, self.compute, core.head_dim, core.is_grouped, self.is_masked, core.cap > 0)
        return expected(case, self.attention)

    @property
    def is_spread(self) -> bool:
        """Whether attention spans several ranks, with different kernels (terrace.model.blockwise)."""
        return self.ulysses * self.num_ring_ranks > 1

    @cached_property
    def rows(self) -> int:
        """Tensor ranks that cut heads and the inner size of the MLP."""
        return self.tensor // self.columns

    @property
    def stream_cut(self) -> int:
        """Number of ranks over which norms and residuals are cut."""
        return self.columns * (self.rows if self.sequence_parallel else 1)

    @property
    def context(self) -> int:
        return self.ulysses * self.ring

    @property
    def num_ring_ranks(self) -> int:
        """Ring ranks that attend together; with `balance = "cost"`, of all pooled data ranks."""
        return self.ring * (self.pooled if self.balance == "cost" else 1)

    @cached_property
    def tokens(self) -> int:
        """Tokens of the micro-batch on a rank outside attention."""
        return count_local_tokens(self.micro_batch, self.sequence, self.ulysses, self.ring, self.balance)

    @property
    def routed(self) -> int:
        """Tokens that a rank routes: tensor rows split them."""
        return math.ceil(self.tokens / self.rows)

    @property
    def stream_tokens(self) -> int:
        return math.ceil(self.tokens / (self.rows if self.sequence_parallel else 1))

    @cached_property
    def attended(self) -> int:
        """Tokens of the micro-batch on a rank in attention: those of all Ulysses ranks of its ring rank."""
        return self.ulysses * self.tokens

    @property
    def most_attended(self) -> int:
        """Upper bound of a rank's tokens in attention over all documents."""
        return most_attended(self.num_ring_ranks, self.attended) if self.balance == "cost" else self.attended

    @property
    def attended_heads(self) -> int:
        return self._part.queries

    @property
    def attended_kv_heads(self) -> int:
        return self._part.keys

    @cached_property
    def _part(self) -> Heads:
        # Tensor rows cut the heads first, then the Ulysses ranks divide a row's heads.
        core = self.layer.core
        heads, keys = (math.ceil(each / self.rows) for each in (core.heads, core.kv_heads))
        return Heads(heads, keys, core.head_dim).per_ulysses_rank(self.ulysses)

    def width(self, dim: Dim) -> int:
        """Elements of a dim on a rank, rounded up: a unit, such as a head, is never cut."""
        return rank_numel(dim, {"rows": self.rows, "columns": self.columns})

    def tokens_of(self, tokens: Tokens) -> int:
        """Tokens of a tensor on a rank."""
        return self.stream_tokens if tokens is Tokens.STREAM else self.tokens

    def numel(self, tensor: Tensor) -> float:
        """Elements of a tensor on a rank; for the residual stream, the mean over the ranks that cut it."""
        if tensor.tokens is Tokens.STREAM:
            return self.tokens * tensor.features.numel / self.stream_cut
        return self.tokens * self.width(tensor.features)
