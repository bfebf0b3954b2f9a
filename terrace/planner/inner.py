"""What ranks of the tensor and the context axis send one another inside the blocks of a task.

What tensor ranks send, and what hides it, is read from a program of one block of each kind (terrace.simulate.inside);
the messages of context ranks are priced from their numbers (terrace.simulate.context), as those of a program are.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from terrace.model.spec import BlockSpec
from terrace.plan import Layout, MessageClass, Plan
from terrace.plan.stage import whole_stage
from terrace.plan.tensor_traffic import Tensor, TensorMessage
from terrace.planner.space import Rows, shape_of
from terrace.planner.task import CONTEXT, LAYER, TENSOR, Task, columns_of, tensor_entry, ulysses_of
from terrace.program import Instruction, Op, Program
from terrace.simulate.context import context_waits, exchanges_of
from terrace.simulate.inside import Hidden, Waits, hidden_counts, message_seconds, waits_of
from terrace.simulate.layers import BlockSeconds, core_rounds
from terrace.simulate.states import kind_blocks
from terrace.simulate.work import Work

PassSeconds = tuple[float, float, float]  # seconds of a forward, of a backward, and what recomputation adds to that

_NOTHING: PassSeconds = (0.0, 0.0, 0.0)


class InnerSeconds(NamedTuple):
    """The seconds by which messages inside a block make its passes longer."""

    tensor: PassSeconds
    context: PassSeconds


class Inner:
    """The messages inside blocks of one task, remembered: a search asks for the same ones many times."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._kinds: dict[tuple[int, int], tuple[BlockSpec, ...]] = {}
        self._lines: dict[tuple[int, Rows], tuple[list[Waits], list[Waits]]] = {}
        self._counts: dict[tuple[int, ...], list[dict[Hidden, int]]] = {}
        self._found: dict[tuple[int, Rows, int], list[Waits]] = {}
        self._seconds: dict[Rows, tuple[Tensor, dict[TensorMessage, float]]] = {}
        self._contexts: dict[tuple[object, ...], PassSeconds] = {}

    def seconds(self, kind: int, rows: Rows, work: Work, own: BlockSeconds) -> InnerSeconds:
        """Return what a block waits for on one micro-batch, where its products take `own`."""
        tensor = self._tensor(kind, rows, work, own) if work.tensor > 1 else _NOTHING
        return InnerSeconds(tensor, self.context(rows, work) if kind == LAYER and work.context > 1 else _NOTHING)

    def _tensor(self, kind: int, rows: Rows, work: Work, own: BlockSeconds) -> PassSeconds:
        penalty = self.task.cluster.device.overlap_penalty
        forward, backward, again = self._waits(kind, rows, work.tokens)
        backward_s, with_forward_s = (
            each.exposed_s(own.input_s, own.weight_s, penalty, own.forward_s) for each in (backward, again)
        )
        return forward.exposed_s(0.0, 0.0, penalty, own.forward_s), backward_s, with_forward_s - backward_s

    def context(self, rows: Rows, work: Work) -> PassSeconds:
        """Return what a layer waits for of its context ranks."""
        degrees = context_degrees(rows)
        key = (degrees, work.rows, work.micro_batch)
        found = self._contexts.get(key)
        if found is None:
            cluster, hides = self.task.cluster, self.task.software.hides_messages
            rounds = core_rounds(cluster.device, work)
            waits = context_waits(cluster, exchanges_of(work, *degrees), rounds, hides=hides)
            found = self._contexts[key] = (waits.forward_s, waits.backward_s, waits.forward_s)
        return found

    def _waits(self, kind: int, rows: Rows, num_tokens: int) -> list[Waits]:
        """Return the messages inside a block: of a forward, a backward, and a backward that recomputes.

        All seconds are latency and bytes over a rate, and bytes go with the tokens. So two sizes tell every other,
        unless the tokens are padded, or their message, to a whole part for each rank.
        """
        group: Rows = tuple((1, row[TENSOR], 1, 1, columns_of(row)) for row in rows)
        num_ranks = shape_of(group).tensor
        if num_tokens % num_ranks or MessageClass.TENSOR.value in self.task.wire:
            return self._waits_of(kind, group, num_tokens)
        size = num_ranks * self.task.sequence
        key = (kind, group)
        found = self._lines.get(key)
        if found is None:
            found = self._lines[key] = (self._waits_of(kind, group, size), self._waits_of(kind, group, 2 * size))
        more = num_tokens / size - 1
        return [
            Waits(*(one + more * (two - one) for one, two in zip(first, second, strict=True)))
            for first, second in zip(*found, strict=True)
        ]

    def _waits_of(self, kind: int, group: Rows, num_tokens: int) -> list[Waits]:
        key = (kind, group, num_tokens)
        if key not in self._found:
            price = self._price(group)
            found = [waits_of(counts, price) for counts in self._counted(kind, group, num_tokens)]
            hides = self.task.software.hides_messages
            self._found[key] = found if hides else [each.unhidden for each in found]
        return self._found[key]

    def _counted(self, kind: int, group: Rows, num_tokens: int) -> list[dict[Hidden, int]]:
        shape = shape_of(group)
        key = (kind, shape.tensor, shape.columns, num_tokens)
        if key not in self._counts:
            forward, backward = Instruction(Op.FORWARD, kind, 0), Instruction(Op.BACKWARD, kind, 0)
            plain, again = (self._program(group, num_tokens, recompute) for recompute in (0, 1))
            passes = ((plain, forward), (plain, backward), (again, backward))
            self._counts[key] = [hidden_counts(*each) for each in passes]
        return self._counts[key]

    def _price(self, group: Rows) -> Callable[[TensorMessage], float]:
        """Return what gives the seconds of a message inside a block, the same for all kinds of blocks."""
        if group not in self._seconds:
            self._seconds[group] = (self._program(group, 1, 0).tensor, {})
        tensor, known = self._seconds[group]

        def price(message: TensorMessage) -> float:
            found = known.get(message)
            if found is None:
                found = math.fsum(message_seconds(self.task.cluster, tensor, message).values())
                known[message] = found
            return found

        return price

    def _program(self, rows: Rows, num_tokens: int, recompute: int) -> Program:
        """Return a program of one embedding, one layer and one head, for what is sent inside them."""
        task, shape = self.task, shape_of(rows)
        tiers = [tier.name for tier in task.cluster.tiers]
        plan = Plan(
            params="device",
            grads="device",
            optimizer="device",
            mapping={tier: {"tensor": tensor_entry(row)} for tier, row in zip(tiers, rows, strict=True)},
            wire={name: row for name, row in task.wire.items() if name == MessageClass.TENSOR.value},
            compute=task.compute,
            master=task.master,
            recompute=("layers.*",) if recompute else (),
            sequence_parallel=task.software.sequence_parallel,
        )
        key = (shape.tensor, shape.columns)
        if key not in self._kinds:
            degrees = {"rows": shape.tensor // shape.columns, "columns": shape.columns}
            self._kinds[key] = kind_blocks(task.model, degrees)
        return Program(
            cluster=task.cluster,
            plan=plan,
            layout=Layout.of(task.cluster, plan),
            blocks=self._kinds[key],
            stage=whole_stage(len(self._kinds[key]), 1, 1),
            instructions=(),
            sequence=num_tokens,
        )


@lru_cache(maxsize=65536)
def context_degrees(rows: Rows) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the Ulysses and the ring degrees of every tier."""
    ulysses = tuple(map(ulysses_of, rows))
    return ulysses, tuple(row[CONTEXT] // here for row, here in zip(rows, ulysses, strict=True))


def axis_group(rows: Rows, axis: int) -> tuple[int, ...]:
    """Return the shape of a group of an axis: its degree on every tier."""
    return tuple(row[axis] for row in rows)
