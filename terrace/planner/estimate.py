"""Where the planner takes seconds and bytes from: the one file between it and the simulator's formulas.

Everything here is of one task, and remembered: a search asks for the same block on the same ranks many times. A
model has three kinds of blocks, `EMBEDDING`, `LAYER` and `HEAD`. Nothing here is a formula of its own but for the
axis that has no program yet: context ranks gather the keys and values of a layer and scatter their gradients
(Dubey et al. 2407.21783, section 3.3.2), and nothing hides these messages. What tensor ranks send is read from a
program of one block of each kind.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from terrace.cluster import Cluster
from terrace.model.spec import BlockSpec, ParamSpec
from terrace.plan import Layout, MessageClass, Plan
from terrace.plan.memory import keeps_master
from terrace.plan.wire import FORMATS
from terrace.planner.space import Rows, Shape, shape_of
from terrace.planner.task import CONTEXT, PIPELINE, TENSOR, Choice, Placement, Task, columns_of, plan_of, tensor_entry
from terrace.program import Instruction, Op, Program
from terrace.simulate import Costs
from terrace.simulate.activations import block_activation_bytes
from terrace.simulate.footprint import CPU_CONTEXT_BYTES, CUDA_ALLOCATOR_FACTOR, CUDA_CONTEXT_BYTES, footprint
from terrace.simulate.inside import Waits, waits
from terrace.simulate.layers import BlockSeconds, block_seconds, optimizer_s
from terrace.simulate.links import all_gather_s, rate_bytes_per_s, send_s
from terrace.simulate.states import KINDS as STATE_KINDS
from terrace.simulate.states import Stage, kind_blocks, model_states, stage_of, state_layout
from terrace.simulate.work import Work

EMBEDDING, LAYER, HEAD = range(3)
KINDS = (EMBEDDING, LAYER, HEAD)


@dataclass(frozen=True)
class Seconds:
    """Of one block on one micro-batch, messages of its tensor and context ranks included.

    `backward_s` is without recomputation, which takes `again_s`; `weight_s` is the part of it that can be put off.
    """

    forward_s: float
    backward_s: float
    weight_s: float
    again_s: float


@dataclass(frozen=True)
class Part:
    """The blocks that a stage holds; `layers` per chunk."""

    embedding: bool
    layers: tuple[int, ...]
    head: bool

    @property
    def counts(self) -> tuple[int, int, int]:
        """How many embeddings, layers and heads."""
        return int(self.embedding), sum(self.layers), int(self.head)

    @property
    def kinds(self) -> list[int]:
        """The kind of every block in order."""
        return [EMBEDDING] * self.embedding + [LAYER] * sum(self.layers) + [HEAD] * self.head


class Estimator:
    """Seconds and bytes of one task."""

    hides_messages = True  # whether messages inside a block hide as this runtime hides them; other software may not

    def __init__(self, task: Task) -> None:
        self.task = task
        self.item = FORMATS[task.compute].element_bytes
        self._blocks: dict[tuple[int, Rows, int, bool], Seconds] = {}
        self._messages: dict[tuple[object, ...], tuple[int, float]] = {}
        self._states: dict[tuple[tuple[int, ...], Placement], float] = {}
        self._kept: dict[tuple[int, Rows, int], int] = {}
        self._edges: dict[tuple[object, ...], float] = {}
        self._numels: dict[tuple[int, int], tuple[int, int, int]] = {}
        self._kinds: dict[tuple[int, int], tuple[BlockSpec, ...]] = {}
        self._lines: dict[tuple[int, Rows], tuple[list[Waits], list[Waits]]] = {}
        self._plans: dict[Choice, Plan] = {}
        self._layouts: dict[tuple[tuple[int, ...], Placement], tuple[Layout, Plan]] = {}

    def work(self, rows: Rows, micro_batch: int, recompute: int = 0) -> Work:
        """Return what a rank computes of a micro-batch."""
        return Work(
            model=self.task.model,
            sequence=self.task.sequence,
            micro_batch=micro_batch,
            tensor=shape_of(rows).tensor,
            columns=shape_of(rows).columns,
            context=shape_of(rows).context,
            recompute="full" if recompute else "none",
            compute=self.task.compute,
        )

    def block(self, kind: int, rows: Rows, micro_batch: int) -> Seconds:
        """Return the seconds of a block on one micro-batch."""
        shape = shape_of(rows)
        accumulate = shape.data * micro_batch < self.task.batch  # several micro-batches add up their gradients
        key = (kind, shape.inner, micro_batch, accumulate)
        found = self._blocks.get(key)
        if found is None:
            found = self._blocks[key] = self._block(kind, shape.inner, micro_batch, accumulate)
        return found

    def _block(self, kind: int, rows: Rows, micro_batch: int, accumulate: bool) -> Seconds:
        cluster, work = self.task.cluster, self.work(rows, micro_batch)
        seconds = block_seconds(cluster.device, work, self.index(kind), accumulate=accumulate)
        forward_s, backward_s = seconds.forward_s, seconds.input_s + seconds.weight_s
        again_s = 0.0  # what recomputation adds to the messages of the backward, the forward's own among them
        if work.tensor > 1:
            penalty = cluster.device.overlap_penalty
            forward_waits, *backward_waits = self._waits(kind, rows, micro_batch)
            plain_s, with_forward_s = (
                waits.exposed_s(seconds.input_s, seconds.weight_s, penalty) for waits in backward_waits
            )
            forward_s, backward_s = forward_s + forward_waits.alone_s, backward_s + plain_s
            again_s = with_forward_s - plain_s
        if kind == LAYER:
            keys_s = all_gather_s(cluster, axis_group(rows, CONTEXT), self._key_bytes(work) * work.context)
            forward_s, backward_s, again_s = forward_s + keys_s, backward_s + 2 * keys_s, again_s + keys_s
        return Seconds(forward_s, backward_s, seconds.weight_s, seconds.forward_s + again_s)

    def compute(self, kind: int, choice: Choice) -> BlockSeconds:
        """Return the seconds of a block on one micro-batch without any message."""
        shape = shape_of(choice.rows)
        accumulate = shape.data * choice.micro_batch < self.task.batch
        work = self.work(choice.rows, choice.micro_batch)
        return block_seconds(self.task.cluster.device, work, self.index(kind), accumulate=accumulate)

    def _waits(self, kind: int, rows: Rows, micro_batch: int) -> list[Waits]:
        """Return the messages inside a block: of a forward, a backward, and a backward that recomputes.

        All seconds are latency and bytes over a rate, and bytes go with the tokens. So two sizes tell every other,
        unless the tokens are padded, or their message, to a whole part for each rank.
        """
        shape = shape_of(rows)
        if self.task.sequence // shape.context % shape.tensor or MessageClass.TENSOR.value in self.task.wire:
            return self._waits_of(kind, rows, micro_batch)
        alone: Rows = tuple((1, row[TENSOR], 1, 1, columns_of(row)) for row in rows)
        key = (kind, alone)
        if key not in self._lines:
            self._lines[key] = (self._waits_of(kind, alone, 1), self._waits_of(kind, alone, 2))
        more = micro_batch / shape.context - 1
        return [
            Waits(*(one + more * (two - one) for one, two in zip(first, second, strict=True)))
            for first, second in zip(*self._lines[key], strict=True)
        ]

    def _waits_of(self, kind: int, rows: Rows, micro_batch: int) -> list[Waits]:
        forward, backward = Instruction(Op.FORWARD, kind, 0), Instruction(Op.BACKWARD, kind, 0)
        plain, again = (self.tensor_program(rows, micro_batch, recompute) for recompute in (0, 1))
        found = [waits(plain, forward), waits(plain, backward), waits(again, backward)]
        return found if self.hides_messages else [Waits(sum(each), 0.0, 0.0) for each in found]

    def tensor_program(self, rows: Rows, micro_batch: int, recompute: int) -> Program:
        """Return a program of one embedding, one layer and one head, for what is sent inside them."""
        task = self.task
        tiers = [tier.name for tier in task.cluster.tiers]
        plan = Plan(
            params="device",
            grads="device",
            optimizer="device",
            mapping={tier: {"tensor": tensor_entry(row)} for tier, row in zip(tiers, rows, strict=True)},
            wire={name: row for name, row in task.wire.items() if name == MessageClass.TENSOR.value},
            compute=task.compute,
            master=task.master,
            micro_batch=micro_batch,
            recompute=("layers.*",) if recompute else (),
            sequence_parallel=self.work(rows, micro_batch).sequence_parallel,
        )
        return Program(
            cluster=task.cluster,
            plan=plan,
            layout=Layout.of(task.cluster, plan),
            blocks=self._kind_blocks(rows),
            num_micros=1,
            instructions=(),
            sequence=task.sequence // shape_of(rows).context,
        )

    def _kind_blocks(self, rows: Rows) -> tuple[BlockSpec, ...]:
        key = (shape_of(rows).tensor, shape_of(rows).columns)
        if key not in self._kinds:
            self._kinds[key] = kind_blocks(self.task.model, {"rows": key[0] // key[1], "columns": key[1]})
        return self._kinds[key]

    def _key_bytes(self, work: Work) -> int:
        """Return the bytes of a rank's keys and values of one layer and micro-batch."""
        heads = math.ceil(work.model.num_kv_heads / work.rows)
        return 2 * work.tokens * heads * work.model.head_dim * self.item

    def boundary_s(self, rows: Rows, micro_batch: int) -> float:
        """Return the seconds of an activation between two stages, on the slowest tier that a boundary crosses."""
        shape = shape_of(rows)
        key = (shape.tensor, shape.context, micro_batch, shape.crossed)
        found = self._edges.get(key)
        if found is None:
            part = self._boundary_bytes(rows, micro_batch)
            found = max((send_s(self.task.cluster, tier, part) for tier in shape.crossed), default=0.0)
            self._edges[key] = found
        return found

    def _boundary_bytes(self, rows: Rows, micro_batch: int) -> float:
        """Tensor ranks send a part each, and gather it on the other side with the layer's own messages."""
        work = self.work(rows, micro_batch)
        return work.tokens * self.task.model.hidden_size * self.item / work.tensor

    def inner_bytes(self, choice: Choice, num_micros: int, counts: Sequence[int]) -> dict[tuple[str, str], int]:
        """Return what a rank sends in a step to its tensor and context ranks, by (axis, tier).

        `counts` are the embeddings, layers and heads that it holds.
        """
        work, sent = self.work(choice.rows, choice.micro_batch), defaultdict[tuple[str, str], int](int)
        names = [tier.name for tier in self.task.cluster.tiers]
        program = self.tensor_program(choice.rows, choice.micro_batch, choice.recompute)
        for kind, count in enumerate(counts):
            for op in (Op.FORWARD, Op.BACKWARD):
                for message in program.inside(Instruction(op, kind, 0)):
                    for tier, num_bytes in program.tensor.sends(message):
                        sent[MessageClass.TENSOR.value, names[tier]] += count * num_micros * num_bytes
        left = (3 + choice.recompute) * self._key_bytes(work) * work.context
        for row, name in zip(choice.rows, names, strict=True):
            if row[CONTEXT] > 1:
                sent["context", name] = counts[LAYER] * num_micros * left * (row[CONTEXT] - 1) // row[CONTEXT]
                left //= row[CONTEXT]
        return dict(sent)

    def boundary_bytes(self, choice: Choice, num_micros: int) -> dict[tuple[str, str], int]:
        """Return what a rank of a middle stage sends in a step to its neighbours, on the outermost tier crossed."""
        tiers = self.task.cluster.tiers
        crossed = [tier.name for row, tier in zip(choice.rows, tiers, strict=True) if row[PIPELINE] > 1]
        part = self._boundary_bytes(choice.rows, choice.micro_batch)
        return {("pipeline", crossed[-1]): int(2 * num_micros * choice.chunks * part)} if crossed else {}

    def update_s(self, degrees: tuple[int, ...], placement: Placement, numel: int) -> float:
        """Return the seconds of the optimizer on a rank's part of `numel` parameters."""
        return optimizer_s(self.task.cluster.device, numel / math.prod(degrees[: placement.optimizer + 1]))

    def message(
        self, degrees: tuple[int, ...], placement: Placement, message: MessageClass, numel: int, secondary: bool = False
    ) -> tuple[int, float]:
        """Return (lane, seconds) of one message of a block of `numel` elements among `degrees` data ranks."""
        key = (degrees, placement, message, numel, secondary)
        if key not in self._messages:
            self._messages[key] = self._message(degrees, placement, message, numel, secondary)
        return self._messages[key]

    def _message(
        self, degrees: tuple[int, ...], placement: Placement, message: MessageClass, numel: int, secondary: bool
    ) -> tuple[int, float]:
        layout, plan = self._layout(degrees, placement)
        block = BlockSpec(name="any", params=(ParamSpec(name="all", shape=(numel,)),))
        program = Program(
            cluster=data_cluster(self.task.cluster, degrees),
            plan=plan,
            layout=layout,
            blocks=(block,),
            num_micros=1,
            instructions=(),
        )
        backward = message is MessageClass.GATHER_BACKWARD
        op = Op.GATHER if backward else Op(message.value.upper())
        instruction = Instruction(op, 0, backward=backward, secondary=secondary)
        costs = Costs(forward_s=(), backward_s=(), update_s=(), program=program)
        return program.lane(instruction), costs.collective_s(instruction)

    def _layout(self, degrees: tuple[int, ...], placement: Placement) -> tuple[Layout, Plan]:
        key = (degrees, placement)
        if key not in self._layouts:
            rows = tuple((degree, 1, 1, 1) for degree in degrees)
            plan = plan_of(self.task, Choice(0, 1, "", 1, 1, placement, rows))
            self._layouts[key] = (Layout.of(data_cluster(self.task.cluster, degrees), plan), plan)
        return self._layouts[key]

    def state_bytes(self, degrees: tuple[int, ...], placement: Placement) -> float:
        """Return the bytes a parameter takes on a rank: W (bp / S_p + bg / S_g + bo / S_o), a second copy included."""
        key = (degrees, placement)
        if key not in self._states:
            self._states[key] = self._state_bytes(degrees, placement)
        return self._states[key]

    def _state_bytes(self, degrees: tuple[int, ...], placement: Placement) -> float:
        layout, plan = self._layout(degrees, placement)
        master = FORMATS[self.task.master].element_bytes
        copies = self.item / layout.span(layout.params)
        copies += self.item / layout.span(layout.params_backward) if layout.has_secondary else 0.0
        moments = master * (3 if keeps_master(plan, layout) else 2)
        return copies + master / layout.span(layout.grads) + moments / layout.span(layout.optimizer)

    def whole_bytes(self, tensors_bytes: float) -> float:
        """Return the memory that a process with so many bytes of tensors takes."""
        if self.task.backend == "cuda":
            return CUDA_ALLOCATOR_FACTOR * tensors_bytes + CUDA_CONTEXT_BYTES
        return tensors_bytes + (CPU_CONTEXT_BYTES if self.task.backend == "cpu" else 0)

    def kept_bytes(self, kind: int, rows: Rows, micro_batch: int, recompute: int) -> int:
        """Return the bytes that a block keeps of a micro-batch until its backward."""
        key = (kind, shape_of(rows).inner, recompute)
        if key not in self._kept:
            work = self.work(rows, 1, recompute if kind == LAYER else 0)
            self._kept[key] = block_activation_bytes(work, STATE_KINDS[kind], self.task.backend).kept_bytes
        return micro_batch * self._kept[key]  # every tensor that is kept has a row for each sequence

    def numels(self, tensor: int, columns: int = 1) -> tuple[int, int, int]:
        """Return the parameters of an embedding, a layer and a head on a tensor rank."""
        whole = stage_of(self.task.model, tensor, 1, 0, 1, columns=columns)
        return whole.embedding, whole.layer, whole.head

    def own_numels(self, shape: Shape) -> tuple[int, int, int]:
        """Return the same without what tensor ranks share, which is sharded over these too: what bounds count."""
        key = (shape.tensor, shape.columns)
        if key not in self._numels:
            self._numels[key] = stage_of(self.task.model, shape.tensor, 1, 0, 1, columns=shape.columns).flats[0][1]
        return self._numels[key]

    def stage_blocks(self, kinds: Sequence[int], shape: Shape) -> tuple[BlockSpec, ...]:
        """Return what a tensor rank holds of the blocks of a stage, each in one piece.

        A tied head without the embedding beside it has a copy of the matrix.
        """
        names = [self.task.blocks[self.index(kind)].name for kind in kinds]
        tensor, columns = shape.tensor, shape.columns
        numels = self.numels(tensor, columns)
        sizes = [numels[kind] for kind in kinds]
        borrows: tuple[int, ...] = ()
        if self.task.model.tied_embeddings and kinds[-1] == HEAD:
            if kinds[0] == EMBEDDING:
                borrows = (0,)
            else:
                sizes[-1] = stage_of(self.task.model, tensor, 2, 1, 1, columns=columns).head
        return tuple(
            BlockSpec(
                name=name,
                params=(ParamSpec(name="all", shape=(size,)),),
                borrows=borrows if kind == HEAD else (),
            )
            for kind, name, size in zip(kinds, names, sizes, strict=True)
        )

    def memory_bytes(self, choice: Choice, part: Part, waiting: Sequence[int], num_micros: int) -> dict[str, int]:
        """Return the bytes by category of a rank on a stage that holds `part`, where `waiting[chunk]` wait at most."""
        task, shape = self.task, shape_of(choice.rows)
        layers = sum(part.layers)
        held = sum(count * waits for count, waits in zip(part.layers, waiting, strict=True)) / layers
        stage = shape.pipeline - 1 if part.head else int(not part.embedding)
        plan = self._plan(choice)
        found = footprint(
            task.cluster,
            plan,
            task.model,
            task.sequence,
            num_micros,
            stage=stage,
            in_flight=max(1.0, held),
            layers=range(layers),
        )
        if part.head and part.embedding and shape.pipeline > 1:
            # Both ends of the pipeline meet on one stage; the formula knows the head's end of it.
            layout, embedding = state_layout(task.cluster, plan), self.numels(shape.tensor, shape.columns)[EMBEDDING]
            alone = Stage(embedding=layout.padded(embedding), layer=0, head=0, layers=range(0), lent=0)
            for name, size in model_states(layout, plan, alone, num_micros).steady.items():
                if name in ("params", "secondary", "grads", "optimizer"):
                    found[name] += size
        return {name: size for name, size in found.items() if size}

    def _plan(self, choice: Choice) -> Plan:
        if choice not in self._plans:
            self._plans[choice] = plan_of(self.task, choice)
        return self._plans[choice]

    def index(self, kind: int) -> int:
        """Return the index in the model of a block of this kind."""
        return (0, 1, self.task.model.num_blocks - 1)[kind]


@lru_cache(maxsize=4096)
def data_cluster(cluster: Cluster, degrees: tuple[int, ...]) -> Cluster:
    """Return the cluster that one tensor, context and pipeline coordinate sees: its data ranks, on the same links."""
    tiers = []
    for index, (tier, here) in enumerate(zip(cluster.tiers, degrees, strict=True)):
        # Fewer members reach less of a tier that is wired in pairs.
        reach = rate_bytes_per_s(cluster, index, 0, degree=here) / rate_bytes_per_s(cluster, index, 0)
        tiers.append(replace(tier, size=here, bandwidth_bytes_per_s=reach * tier.bandwidth_bytes_per_s))
    return replace(cluster, tiers=tuple(tiers))


def axis_group(rows: Rows, axis: int) -> tuple[int, ...]:
    """Return the shape of a group of an axis: its degree on every tier."""
    return tuple(row[axis] for row in rows)
