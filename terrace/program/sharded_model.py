"""ShardedModel: a model under a plan on a cluster, and everything that these three determine.

The programs of all stages and phases refer to one object, so each derived value is computed once.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from terrace.base.alike import first_equal
from terrace.cluster.cluster import Cluster
from terrace.model.spec import BlockSpec
from terrace.plan.boundaries import leaving
from terrace.plan.context_traffic import ContextTraffic
from terrace.plan.edges import Edge, edge_of
from terrace.plan.flats import FlatParamSpec, block_flats, stage_layout, world_layout
from terrace.plan.hops import Hop
from terrace.plan.in_block_messages import RoutedMessage, TensorMessage
from terrace.plan.kinds import Kinds
from terrace.plan.layout import Layout
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.plan.recompute import WHOLE, recomputed_parts
from terrace.plan.tensor_traffic import TensorTraffic
from terrace.plan.wire import BETWEEN_STAGES, MessageClass
from terrace.program.block_program.build import block_program
from terrace.program.block_program.steps import BlockProgram, InBlockMessage, messages_of
from terrace.program.instruction import PASSES, Op
from terrace.program.message import Message
from terrace.program.resolve import block_message, context_message, edge_message, message_in_gaps, tensor_message
from terrace.program.routed import Routed

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ShardedModel:
    """The layouts, flat buffers, block programs and messages of a model under a plan.

    `blocks` is the whole model, as one tensor rank holds it. `sequence` is the length in tokens, which determines the
    messages of tensor, context and pipeline axes and the inputs that leave the device; 0 if the plan has none of these.
    """

    cluster: Cluster
    plan: Plan
    layout: Layout
    blocks: tuple[BlockSpec, ...]
    sequence: int = 0

    @cached_property
    def mesh(self) -> Mesh:
        return Mesh.of(self.cluster, self.plan)

    def split(self, plan: Plan) -> "ShardedModel":
        """The model under `plan`, which may differ in `stages` alone: nothing derived here depends on them."""
        found = replace(self, plan=plan)
        derived = {name: value for name, value in vars(self).items() if name not in self.__dataclass_fields__}
        vars(found).update(derived)
        return found

    @cached_property
    def stage_layout(self) -> Layout:
        """The layout of all ranks that together hold a block; equals `layout` without a tensor axis."""
        return self.layout if self.mesh.total("tensor") == 1 else stage_layout(self.cluster, self.plan)

    @cached_property
    def world_layout(self) -> Layout:
        return self.stage_layout if self.mesh.total("pipeline") == 1 else world_layout(self.cluster, self.plan)

    @cached_property
    def flats(self) -> tuple[tuple[FlatParamSpec, ...], ...]:
        return block_flats(self.cluster, self.plan, self.blocks, (self.layout, self.stage_layout))

    @cached_property
    def alike(self) -> list[int]:
        """For each block, the first block with equal flat buffers, and so equal messages and update."""
        return first_equal(self.flats)

    def of_flats(self, function: Callable[[Sequence[FlatParamSpec]], T]) -> list[T]:
        """`function` of every block's flat buffers, called once for equal blocks (`alike`)."""
        found = {first: function(self.flats[first]) for first in dict.fromkeys(self.alike)}
        return [found[first] for first in self.alike]

    def gathers(self, block: int) -> bool:
        return any(flat.layout.gathers for flat in self.flats[block])

    def frees(self, block: int) -> bool:
        """Whether some gathered parameters of a block are freed, to be gathered again."""
        return any(flat.layout.frees for flat in self.flats[block])

    @cached_property
    def tensor(self) -> TensorTraffic:
        return TensorTraffic.of(self.mesh, self.layout.tiers, self.plan, self.sequence)

    @cached_property
    def context(self) -> ContextTraffic:
        return ContextTraffic(self.plan, self.mesh, self.sequence, self.layout.tiers)

    @cached_property
    def routed(self) -> Routed:
        """The messages that carry tokens to experts and back."""
        return Routed(self.cluster, self.mesh, self.tensor, self.blocks)

    @cached_property
    def edge(self) -> Edge:
        """The activation between two layers that crosses an edge between stages, or is kept below the device.

        Only with one of both.
        """
        return edge_of(self.tensor, self.blocks)

    def edge_behind(self, block: int, *, backward: bool) -> Edge:
        """The edge that a block's output crosses or, if `backward`, the gradient of its input."""
        width = self.blocks[block].operations.widths[0 if backward else 1]
        return self.edge if width == 1 else edge_of(self.tensor, self.blocks, width)

    @cached_property
    def leaving(self) -> frozenset[int]:
        """The blocks whose inputs are kept below the device from their forward to their backward."""
        return leaving(self.plan.keep, self.blocks)

    @cached_property
    def input_numel(self) -> int:
        """Elements of such an input on a rank."""
        return math.prod(self.edge.shape)

    @cached_property
    def block_kinds(self) -> tuple[int, ...]:
        """Kind of each block; blocks of one kind differ only in their names."""
        return Kinds.of(self.blocks).order

    @cached_property
    def recomputed(self) -> tuple[tuple[str, ...], ...]:
        """What each block's backward recomputes (`terrace.plan.recompute.recomputed_parts`)."""
        return recomputed_parts(self.plan.recompute, self.blocks)

    def recomputes(self, block: int) -> bool:
        return self.recomputed[block] == WHOLE

    def alike_inside(self, block: int) -> tuple[int, tuple[str, ...]]:
        """(Kind, recomputed part) of a block; blocks with equal keys share one block program."""
        # A frozen first block has no backward, so it is a separate kind.
        return self.block_kinds[block] if block or self.blocks[0].num_trainable else -1, self.recomputed[block]

    def block_program(self, block: int) -> BlockProgram:
        """The program of a block on one micro-batch: compute and messages in the order of issue."""
        key = self.alike_inside(block)
        found = self._block_programs.get(key)
        if found is None:
            found = block_program(self.tensor, self.context, self.blocks, block, recomputed=self.recomputes(block))
            self._block_programs[key] = found
        return found

    def message_of_block(
        self, message_class: MessageClass, block: int, *, secondary: bool = False, in_gaps: bool = False
    ) -> Message:
        """Message of a block's flat buffers, from the secondary copy if `secondary`, in parts if `in_gaps`."""
        key = message_class, self.alike[block], secondary, in_gaps
        if key not in self._of_blocks:
            # A gather from the secondary copy starts on that copy's inner tier.
            source = self.stage_layout.params_backward if secondary else None
            found = block_message(message_class, self.stage_layout, self.plan, self.flats[block], source)
            self._of_blocks[key] = message_in_gaps(found, self.plan, self.flats[block]) if in_gaps else found
        return self._of_blocks[key]

    def edge_hop(self, stage: int, peer: int, block: int, *, backward: bool) -> Hop:
        """The hop of a block's output, or of the gradient of its input if `backward`, between two stages."""
        tier, boundary = self.mesh.edge_tier(stage, peer), self.mesh.boundary(stage, peer)
        message, name = BETWEEN_STAGES[backward], self.layout.tiers[tier]
        numel = self.edge_behind(block, backward=backward).numel
        return Hop(tier, 2, self.plan.wire_format(message, name, boundary=boundary), numel)

    def message_of_edge(self, stage: int, peer: int, block: int, *, backward: bool, received: bool) -> Message:
        """Message of a SEND, or of a RECV if `received`; the same for all pairs of stages at one boundary or tier."""
        edge = self.edge_behind(block, backward=backward)
        key = self.mesh.edge_tier(stage, peer), self.mesh.boundary(stage, peer), backward, received, edge.numel
        if key not in self._of_edges:
            hop, message_class = self.edge_hop(stage, peer, block, backward=backward), BETWEEN_STAGES[backward]
            self._of_edges[key] = edge_message(message_class, hop, self.plan.compute, received=received)
        return self._of_edges[key]

    def messages_inside(self, op: Op, block: int, *, backward: bool) -> tuple[Message, ...]:
        """The messages that a pass sends inside its block, or a RECV to complete its activation."""
        if op is not Op.RECV and op not in PASSES:
            return ()
        edge = self.edge_behind(block, backward=backward) if op is Op.RECV else None
        key = op, edge or self.alike_inside(block)
        found = self._inside.get(key)
        if found is None:
            messages: Iterable[InBlockMessage]
            if edge is not None:
                messages = () if edge.gathers is None else (edge.gathers,)
            else:
                messages = messages_of(self.block_program(block).steps(op))
            found = self._inside[key] = tuple([self.message_inside(message, block) for message in messages])
        return found

    def message_inside(self, message: InBlockMessage, block: int) -> Message:
        """Resolve one message inside a block."""
        if isinstance(message, TensorMessage):
            found = self._of_lines.get(message)
            if found is None:
                found = self._of_lines[message] = tensor_message(self.tensor, message)
            return found
        if isinstance(message, RoutedMessage):
            return self.routed.message(message, block)
        return context_message(self.context.attention(self.blocks[block]).sends(message))

    @cached_property
    def _block_programs(self) -> dict[tuple[int, tuple[str, ...]], BlockProgram]:
        return {}

    @cached_property
    def _of_blocks(self) -> dict[tuple[MessageClass, int, bool, bool], Message]:
        return {}

    @cached_property
    def _of_edges(self) -> dict[tuple[int, int | None, bool, bool, int], Message]:
        return {}

    @cached_property
    def _inside(self) -> dict[tuple[Op, tuple[int, tuple[str, ...]] | Edge], tuple[Message, ...]]:
        return {}

    @cached_property
    def _of_lines(self) -> dict[TensorMessage, Message]:
        return {}
