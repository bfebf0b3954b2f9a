"""The tensor axis of a plan: its groups of ranks, the tokens of a micro-batch, and the hops and bytes of its messages.

A block's activations have the T tokens of a micro-batch on a rank: micro_batch x sequence, or a context rank's local
tokens (terrace.plan.context), padded to a multiple of the rows. Every all-reduce is a reduce-scatter and an all-gather
of the same elements (Megatron-LM 1909.08053, section 3; sequence parallel form: Korthikanti et al. 2205.05198, section
4.2; columns: AxoNN 2305.13525, section 4). For the messages of a block and their order see
terrace.program.block_program.regions.

For per-sequence router losses, ranks that share sequences gather B E numbers from each rank, for B sequences and E
experts (message class `choices`), only in the first forward, not in a recomputed one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from terrace.model.spec import BlockSpec
from terrace.plan.context import batch_shape
from terrace.plan.counts import experts_of
from terrace.plan.dims import hidden_size
from terrace.plan.hops import Hop, number_bytes
from terrace.plan.in_block_messages import Leg, TensorMessage
from terrace.plan.layout import DEVICE, Layout
from terrace.plan.mesh import SHARING, Mesh
from terrace.plan.plan import Plan
from terrace.plan.routes import gather_hops, reduce_hops
from terrace.plan.wire import FORMATS, MessageClass


@dataclass(frozen=True)
class TensorTraffic:
    """The tensor axis of a plan: layouts of its groups of ranks, and the tokens of a micro-batch."""

    plan: Plan
    rows: Layout
    columns: Layout
    both: Layout
    sharing: Layout  # the ranks that share sequences
    shape: tuple[int, int]  # (rows, tokens per row) of a micro-batch on a rank

    @staticmethod
    def of(mesh: Mesh, tiers: Sequence[str], plan: Plan, sequence: int) -> "TensorTraffic":
        """The tensor axis of `plan` for sequences of `sequence` tokens."""

        def line(*axes: str) -> Layout:
            outermost = len(tiers) - 1  # no states: whatever is sent is cut over all its ranks
            return Layout(
                tiers=tuple(tiers), degrees=mesh.group(*axes), axes=axes, mesh=mesh,
                params=outermost, params_backward=outermost, grads=outermost, optimizer=outermost,
            )  # fmt: skip

        lines = line("rows"), line("columns"), line("columns", "rows"), line(*SHARING)
        return TensorTraffic(plan, *lines, batch_shape(plan, mesh, sequence))

    @property
    def tokens(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def lines(self) -> tuple[Layout, Layout, Layout]:
        """Layouts of the ranks that differ on rows, on columns, and on either."""
        return self.rows, self.columns, self.both

    def lines_of(self, blocks: Sequence[BlockSpec]) -> list[Layout]:
        """Layouts of all groups of ranks in which `blocks` send messages."""
        return [*self.lines, *([self.sharing] if any(choice_messages(self, block) for block in blocks) else [])]

    @property
    def splits_tokens(self) -> bool:
        """Whether norms and residual stream are split over the rows (sequence parallelism)."""
        return self.plan.sequence_parallel and self.rows.degree > 1

    @property
    def degree(self) -> int:
        return self.both.degree

    @property
    def degrees(self) -> dict[str, int]:
        return {"columns": self.columns.degree, "rows": self.rows.degree}

    @property
    def padded_tokens(self) -> int:
        """Tokens of a micro-batch, padded to a multiple of the rows."""
        return self.rows.padded(self.tokens)

    @property
    def token_chunks(self) -> list[int]:
        """Padded tokens in each part of a region's messages."""
        rows = self.rows.degree
        return [
            rows * (stop - start)
            for start, stop in chunk_bounds(self.padded_tokens // rows, self.plan.num_tensor_parts)
        ]

    def line(self, axes: tuple[str, ...]) -> Layout:
        """Layout of the ranks that differ only on `axes`."""
        rows, columns, both, sharing = self.rows, self.columns, self.both, self.sharing
        return {rows.axes: rows, columns.axes: columns, both.axes: both, sharing.axes: sharing}[axes]

    def hops(self, message: TensorMessage) -> list[Hop]:
        return line_hops(self.line(message.axes), self.plan, message.leg, message.numel)

    def sends(self, message: TensorMessage) -> Iterator[tuple[int, int]]:
        """(Tier index, bytes that a rank sends over it) for each hop of a message."""
        if message.leg is not Leg.NUMBERS:
            yield from ((hop.tier, hop.sent_bytes) for hop in self.hops(message))
            return
        line, held = self.line(message.axes), message.numel * number_bytes(self.plan)
        for tier, degree in enumerate(line.degrees):
            if degree > 1:
                yield tier, (degree - 1) * held
                held *= degree


def shared_bytes(tensor: TensorTraffic, blocks: Sequence[BlockSpec]) -> int:
    """Bytes of symmetric memory on a rank if messages are fused with matmuls; else 0.

    Two parts of the residual stream: a matmul writes one while the other is read.
    """
    if not tensor.plan.fuses_tensor:
        return 0
    part = tensor.padded_tokens // tensor.rows.degree * (hidden_size(blocks) // tensor.columns.degree)
    return 2 * part * FORMATS[tensor.plan.compute].element_bytes


def line_hops(line: Layout, plan: Plan, leg: Leg, numel: int) -> list[Hop]:
    """The hops of a gather or reduction of `numel` padded elements over the ranks of `line`."""
    if leg is Leg.GATHER:
        return gather_hops(line, plan, MessageClass.TENSOR, numel, line.outermost, DEVICE)
    return reduce_hops(line, plan, MessageClass.TENSOR, numel, DEVICE, line.outermost)


def chunk_bounds(size: int, num_chunks: int) -> list[tuple[int, int]]:
    """(Start, stop) of at most `num_chunks` parts of `size`, as equal as possible and none empty."""
    num = max(1, min(num_chunks, size))
    return [(index * size // num, (index + 1) * size // num) for index in range(num)]


def row_tokens(num_tokens: int, num_rows: int, place: int) -> slice:
    """The tokens of a micro-batch on row `place`: equal parts in order, the last ones short or empty."""
    size = -(-num_tokens // num_rows)
    return slice(min(place * size, num_tokens), min((place + 1) * size, num_tokens))


def choice_messages(tensor: TensorTraffic, block: BlockSpec) -> tuple[TensorMessage, ...]:
    """The gather of a block's router choice counts among ranks that share sequences; empty if there is none."""
    experts = experts_of(block)
    if experts is None or not experts.shares_choices or tensor.sharing.degree == 1:
        return ()
    return (TensorMessage(Leg.NUMBERS, tensor.sharing.axes, tensor.plan.micro_batch * experts.num_experts),)
