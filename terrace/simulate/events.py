"""Event simulation of a program on one rank, by the rules of `terrace.simulate.rank`.

A step is played from where the step before it ends, so refreshes that overlap its start are in their steady state.
When a rank has waited for the CLIP of a step, none of its messages is in flight: what is in flight at the end follows
from the instructions behind the CLIP alone, and only these of the step before are played.

A program repeats the same few instructions for every micro-batch, so each distinct one is priced once and the play only
adds and compares. `terrace.simulate.recording` plays by the same rules and keeps every span.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from terrace.base.errors import ProgramError
from terrace.plan.boundaries import input_bytes
from terrace.plan.keep import MOST_WRITTEN
from terrace.plan.kept import grads_bytes, is_final_at_once
from terrace.plan.mesh import CONTEXT
from terrace.plan.state_bytes import accumulates_in_place
from terrace.program.instruction import PASSES, Instruction, Op, Phase
from terrace.program.report import StepReport
from terrace.simulate.below import row_stream, updates_on_cores
from terrace.simulate.priced_instruction import NO_STREAM, Event, Stream
from terrace.simulate.rank import Act, Move, Passes, Play, Rank

if TYPE_CHECKING:
    from terrace.program.program import Program
    from terrace.simulate.cost import Costs


def simulate(program: "Program", costs: "Costs") -> StepReport:
    """Predicted report of a steady step, in time linear in the number of instructions.

    Raises `ProgramError` for a program that exchanges messages with other stages (see terrace.simulate.stages).
    """
    check_alone(program)
    return program.report(_time(program, costs))


def step_seconds(program: "Program", costs: "Costs") -> dict[str, float]:
    """Seconds of a steady step by category, without the report. Raises as `simulate` does."""
    check_alone(program)
    return _time(program, costs)


def check_alone(program: "Program") -> None:
    """Raise `ProgramError` for a program that exchanges messages with other stages."""
    if program.stage.num_stages > 1:
        raise ProgramError(
            f"the program of stage {program.stage.index} talks to other stages: simulate all {program.stage.num_stages}"
        )


def _time(program: "Program", costs: "Costs") -> dict[str, float]:
    plays = joined(price_distinct(program, costs), program.segments.places)
    rank = Rank(program)
    for act, event in plays[behind_clip(plays) :]:
        act(rank, event)
    rank.time_s = defaultdict(float)
    if costs.drains:
        drain(rank)
    for act, event in plays:
        act(rank, event)
    return dict(rank.time_s)


def drain(rank: Rank) -> None:
    """Wait for every refresh, as before the forward of another model, which uses the same links."""
    for block in [*rank.late]:
        rank.start_late(block)
    for moment in rank.refreshes.values():
        rank.wait(moment, "wait refresh")
    rank.refreshes.clear()


def behind_clip(plays: Sequence[Move]) -> int:
    """The position after the last CLIP; 0 without one, or if updates go on behind it."""
    if Rank.agree in [act for act, _ in plays]:
        return 0
    return 1 + max([position for position, (act, _) in enumerate(plays) if act is Rank.clip], default=-1)


_COLLECTIVE = {
    Op.GATHER: Rank.gather,
    Op.REDUCE: Rank.reduce,
    Op.SYNC: Rank.sync,
    Op.COUNT: Rank.count,
    Op.AGREE: Rank.agree,
    Op.CLIP: Rank.clip,
    Op.ORTHOGONALISE: Rank.orthogonalise,
    Op.REFRESH: Rank.refresh,
    Op.OUTER_COUNT: Rank.outer_count,
    Op.OUTER_START: Rank.outer_start,
}
_BELOW = {Op.EVICT: Rank.evict, Op.FETCH: Rank.fetch}


def price(program: "Program", costs: "Costs") -> list[Play]:
    """Play of every instruction, in order; instructions that differ only in their micro-batch share an event."""
    plays = price_distinct(program, costs)
    return [plays[number] for number in program.segments.places]


def price_distinct(program: "Program", costs: "Costs") -> list[Play]:
    pricing = _Pricing(program, costs)
    return [pricing.play(instruction) for instruction in program.segments.folded.distinct]


def joined(plays: Sequence[Play], places: Iterable[int]) -> list[Move]:
    """The plays at `places`, with consecutive passes merged and no-ops dropped."""
    # Forwards and backwards are merged separately, so that the same runs of passes recur for every micro-batch.
    passes = [event.op if act in (Rank.run, Rank.run_whole) else None for act, event in plays]
    acts = [act is not Rank.nothing for act, _ in plays]
    known: dict[tuple[int, ...], Move] = {}
    found: list[Move] = []
    for op, numbers in groupby(filter(acts.__getitem__, places), key=passes.__getitem__):
        if op is None:
            found += [plays[number] for number in numbers]
            continue
        key = tuple(numbers)
        if key not in known:
            each = [plays[number] for number in key]
            known[key] = (Rank.run_all, Passes(each)) if len(each) > 1 else each[0]
        found.append(known[key])
    return found


_NO_EVENT = Event(Op.FREE, -1, 0.0, -1, "")


class _Pricing:
    def __init__(self, program: "Program", costs: "Costs") -> None:
        self.program, self.costs = program, costs
        context = math.prod(program.mesh.group(*CONTEXT)) > 1 or costs.dealt_s > 0
        self._sends_inside = context or program.model.tensor.degree > 1
        self._routes = bool(program.model.routed.transfers)
        self._buffered = gradient_buffers(program)
        self._sends: dict[int, Event] = {}
        # The block whose gradients are read from below the device after those of each.
        keep = program.plan.keep
        reads = keep.grads_below and not keep.updates_on_host
        distinct = program.segments.folded.distinct if reads else ()
        used = dict.fromkeys(each.block for each in distinct if each.op in (Op.ORTHOGONALISE, Op.UPDATE))
        read = [block for block in used if costs.gradients_s(block)]
        self._read_next = dict(pairwise(read))

    def play(self, instruction: Instruction) -> Play:
        op, block = instruction.op, instruction.block
        if op in PASSES:
            return self._pass(instruction)
        if op is Op.UPDATE:
            update_s = self.costs.update_s[block]
            stream = self.costs.stream(instruction, update_s)
            # ORTHOGONALISE reads the gradients first.
            is_read = self._orthogonalises(block)
            grads_s = 0.0 if is_read else self.costs.gradients_s(block)
            next_s = self._next_gradients_s(block) if grads_s else 0.0
            act = Rank.update_on_host if updates_on_cores(self.program, block) else Rank.update
            rows = row_stream(self.program, block)
            act = act if rows is NO_STREAM else Rank.update_rows
            return act, Event(
                op, block, update_s, -1, "update", stream=stream, rows=rows, grads_s=grads_s, next_grads_s=next_s
            )
        if op is Op.OUTER_APPLY:
            return Rank.outer_apply, Event(op, block, self.costs.apply_s(block), -1, "update")
        if op in _BELOW:
            return _BELOW[op], Event(op, block, 0.0, -1, "", stream=self._input_stream(op))
        # Frozen blocks and gradients accumulated in place need no reduction; a RECV is waited for by its pass.
        if op in (Op.FREE, Op.RECV) or (op is Op.REDUCE and not self._buffered[block]):
            return Rank.nothing, _NO_EVENT
        if op is Op.SEND:  # one event for all blocks that send the same message
            message = self.program.message(instruction)
            event = self._sends.get(id(message))
            if event is None:
                event = self._sends[id(message)] = self._point_to_point(instruction)
            return Rank.nothing, event
        if op is Op.TIE:
            return Rank.nothing, self._point_to_point(instruction)
        if instruction.in_gaps:
            return Rank.hold, self._in_gaps(instruction)
        act = Rank.restore if self.program.phase is Phase.RESTORE else _COLLECTIVE[op]
        seconds, lane, category, penalty = self.costs.collective(instruction)
        name = str(instruction.message_class)
        event = Event(op, block, seconds, lane, category, penalty=penalty, message=name)
        if op is Op.OUTER_COUNT:
            event.parts = (Event(op, block, self.costs.take_s(), -1, "update"),)
        if op is Op.ORTHOGONALISE:
            event.stream, event.grads_s = self.costs.stream(instruction), self.costs.gradients_s(block)
            event.next_grads_s = self._next_gradients_s(block) if event.grads_s else 0.0
        elif op in (Op.GATHER, Op.REFRESH, Op.SYNC):
            event.stream = self.costs.moved(instruction)
        return act, event

    def _point_to_point(self, instruction: Instruction) -> Event:
        op, block, name = instruction.op, instruction.block, str(instruction.message_class)
        seconds, penalty = self.costs.point_to_point(instruction)
        return Event(op, block, seconds, Rank.SENDING, f"wait {name}", penalty=penalty, message=name)

    def _next_gradients_s(self, block: int) -> float:
        return self.costs.gradients_s(self._read_next[block]) if block in self._read_next else 0.0

    def _input_stream(self, op: Op) -> Stream:
        """Seconds in which an EVICT writes the input of its block, or a FETCH reads it."""
        plan, device = self.program.plan, self.program.cluster.device
        medium, size = device.below[plan.keep.activations], input_bytes(plan, self.program.model.input_numel)
        return Stream(0, medium.read_s(size), 0.0) if op is Op.FETCH else Stream(0, 0.0, medium.write_s(size))

    def _orthogonalises(self, block: int) -> bool:
        return any(flat.num_orthogonal for flat in self.program.model.flats[block])

    def _most_writing(self, needs: Sequence[int]) -> int:
        # Gradients of `MOST_WRITTEN` blocks may be in their write, and of as many more in a message before it.
        model = self.program.model
        below = [block for block in needs if grads_bytes(model.plan, model.flats[block])]
        if not below:
            return 0
        return MOST_WRITTEN + 1 + any(not is_final_at_once(model.flats[block]) for block in below) * MOST_WRITTEN

    def _in_gaps(self, instruction: Instruction) -> Event:
        op, block, name = instruction.op, instruction.block, str(instruction.message_class)
        _, lane, category, _ = self.costs.collective(instruction)
        parts = (
            Event(op, block, seconds, lane, category, penalty=penalty, message=name)
            for seconds, penalty in self.costs.parts(instruction)
        )
        return Event(op, block, 0.0, lane, category, message=name, parts=tuple(parts))

    def _pass(self, instruction: Instruction) -> Play:
        op, index, program, costs = instruction.op, instruction.block, self.program, self.costs
        seconds = costs.forward_s[index], costs.backward_s[index], costs.weight_s[index] if costs.weight_s else 0.0
        tied_to = program.blocks[index].tied_to
        # Equal blocks have equal passes on every stage.
        rounds = costs.rounds[index] if costs.rounds else None
        key = (op, program.model.alike[index], program.model.alike_inside(index), tied_to, seconds, rounds)
        found = costs.passes.get(key)
        if found is None:
            found = costs.passes[key] = self._priced(instruction, *seconds)
        act, event = found
        needs = (index, *tied_to) if event.needs else ()
        event = Event(
            op,
            index,
            event.seconds,
            -1,
            event.category,
            needs,
            event.opens,
            event.inside,
            steps=event.steps,
            most_writing=event.most_writing,
        )
        if op is Op.FORWARD and (rows := row_stream(program, index)) is not NO_STREAM:
            act, event.rows = Rank.look_up, rows
        return act, event

    def _priced(self, instruction: Instruction, forward_s: float, backward_s: float, weight_s: float) -> Play:
        op, index = instruction.op, instruction.block
        needs = (index, *self.program.blocks[index].tied_to)
        # Parameters without a gather are ready after the refresh of the previous step, so the pass waits for it.
        act = Rank.run if all(map(self.program.model.gathers, needs)) else Rank.run_whole
        inside = self._waits_inside(instruction)
        if op is Op.FORWARD:
            return self._stepwise(instruction, act, Event(op, index, forward_s, -1, "forward", needs, inside=inside))
        opens, most = any(self._buffered[needed] for needed in needs), self._most_writing(needs)
        if op is Op.BACKWARD_WEIGHT:  # reads no parameters
            return Rank.run, Event(op, index, weight_s, -1, "backward", (), opens, most_writing=most)
        seconds = backward_s + self.costs.recompute_s(index)
        if op is Op.BACKWARD_INPUT:
            seconds -= weight_s
        event = Event(op, index, seconds, -1, "backward", needs, opens, inside=inside, most_writing=most)
        return self._stepwise(instruction, act, event)

    def _stepwise(self, instruction: Instruction, act: Act, event: Event) -> Play:
        steps = self.costs.steps(instruction, event.seconds, event.category) if self._routes else ()
        if not steps:
            return act, event
        return Rank.run_steps, replace(event, seconds=steps[0].event.seconds, steps=steps[1:])

    def _waits_inside(self, instruction: Instruction) -> tuple[tuple[str, float], ...]:
        if not self._sends_inside:
            return ()
        waits = self.costs.waits_inside(instruction)
        return tuple((f"wait {name.value}", seconds) for name, seconds in waits.items() if seconds)


def gradient_buffers(program: "Program") -> list[bool]:
    """Whether each block has a full gradient buffer that a reduction must empty.

    False for frozen blocks and for gradients accumulated in place.
    """
    return program.model.of_flats(
        lambda flats: any(flat.trainable and not accumulates_in_place(flat.layout) for flat in flats)
    )
