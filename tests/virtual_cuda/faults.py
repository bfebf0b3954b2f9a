"""Faults put into the code for GPUs, one at a time: a line of a function is replaced, and a plan runs with it."""

import inspect
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

from terrace.plan.outer import Outer
from terrace.program.instruction import Instruction, Op
from tests.support.toys import Rows
from tests.virtual_cuda.findings import Kind
from tests.virtual_cuda.plans import DEEP, FOUR, ONE_TIER, OUTER_TIER, PACKED, WIDE, Planned, planned

ROWS: dict[str, Any] = {"mapping": {"package": {"tensor": 2}}}
RING: dict[str, Any] = {"mapping": {"package": {"context": 2}}}
STAGES: dict[str, Any] = {"mapping": {"package": {"pipeline": 2}}, "schedule": "1f1b"}
EXPERTS: dict[str, Any] = {"experts": {"package": {"expert": 2}}}
CODED: dict[str, Any] = {"wire": {"reduce": {"package": "int8:16+feedback"}}}
LATE = Outer(tier="node", every=2, delay=1)

PLANS: dict[str, Planned] = {
    "zero3": planned(ONE_TIER, "zero3", "gpt2", steps=2),
    "zero1": planned(ONE_TIER, "zero1", "gpt2", steps=2),
    "coded": planned(ONE_TIER, "zero3", "gpt2", steps=2, **CODED),
    "two tiers": planned(FOUR, "three-level", "toy", micros=1, steps=2),
    "stages": planned(ONE_TIER, "ddp", DEEP, micros=3, **STAGES),
    "rows": planned(ONE_TIER, "ddp", WIDE, micros=1, **ROWS),
    "chunked rows": planned(ONE_TIER, "ddp", WIDE, micros=1, tensor_chunks=2, **ROWS),
    "fused rows": planned(ONE_TIER, "ddp", WIDE, micros=1, tensor_chunks="fused", **ROWS),
    "rows and shards": planned(ONE_TIER, "zero3", "wide gpt2", mapping={"package": {"tensor": {"depth": 2}}}),
    "ring": planned(ONE_TIER, "zero3", "wide llama, window", micros=1, rows=Rows(9), **RING),
    "packed": planned(ONE_TIER, "zero3", "wide llama, window", micros=1, rows=PACKED),
    "experts": planned(ONE_TIER, "zero3", "experts", micros=1, **EXPERTS),
    "chunks": planned(ONE_TIER, "zero1", "experts", expert_chunks={"forward": 2, "backward": 2}, **EXPERTS),
    "gaps": planned(ONE_TIER, "zero3", "experts", expert_gaps=(0.1, 0.5, 0.4), **EXPERTS),
    "noisy": planned(ONE_TIER, "zero1", "experts, noisy", micros=1),
    "choose": planned(ONE_TIER, "zero1", "experts choose", micros=1),
    "islands": planned(OUTER_TIER, "ddp", "toy", micros=1, steps=5, outer=LATE),
    "saved": planned(ONE_TIER, "zero3", "gpt2", steps=2),  # with a checkpoint between its steps
}


class Damage(NamedTuple):
    """Text of a function that is replaced, the plan that runs, and the fault that must be reported.

    A wait of the host is given as its reason and the function that waits.
    """

    function: str  # module:qualified name
    text: str
    other: str
    plan: str
    noticed: Kind | str


_LANE, _ROUNDING = "terrace.comm.lane:", "terrace.comm.rounding:"
_MESSAGES, _PASSES = "terrace.runtime.block_messages:", "terrace.runtime.passes:"
_FLAT, _ISLANDS = "terrace.runtime.flat_param:", "terrace.runtime.islands:"
_SUBMIT = f"{_LANE}StreamLane.submit"

DAMAGES: dict[str, Damage] = {
    # Waits and events
    "a lane does not wait for computing": Damage(
        _SUBMIT, "self._stream.wait_stream(computing)", "pass", "zero3", Kind.RACE
    ),
    "a lane waits the wrong way": Damage(
        _SUBMIT, "self._stream.wait_stream(computing)", "computing.wait_stream(self._stream)", "zero1", Kind.RACE
    ),
    "computing does not wait for a lane": Damage(
        f"{_LANE}_StreamTicket.wait", "stream.wait_event(self.event)", "pass", "zero1", Kind.RACE
    ),
    "an event is recorded on the wrong stream": Damage(
        _SUBMIT, "event.record(self._stream)", "event.record(computing)", "zero3", Kind.RACE
    ),
    "an event is recorded before the work": Damage(
        _SUBMIT,
        "            work()\n            event = torch.Event(self._device)\n            event.record(self._stream)\n",
        "            event = torch.Event(self._device)\n            event.record(self._stream)\n            work()\n",
        "rows",
        Kind.RACE,
    ),
    "an event is not recorded": Damage(_SUBMIT, "event.record(self._stream)", "pass", "stages", Kind.RACE),
    "work starts before another lane's": Damage(
        f"{_LANE}behind", "        ticket.wait()\n", "", "two tiers", Kind.RACE
    ),
    "a gather is not waited for": Damage(
        f"{_MESSAGES}ParameterMessages.await_for",
        'self._messages.wait(pending, "wait gather_backward" if pending.instruction.backward else "wait gather")',
        "pass",
        "zero3",
        Kind.RACE,
    ),
    "a refresh is not waited for": Damage(
        f"{_MESSAGES}ParameterMessages.await_refresh",
        'self._messages.wait(self.refreshes.pop(block), "wait refresh")',
        "self.refreshes.pop(block)",
        "zero1",
        Kind.RACE,
    ),
    "a sync is not waited for": Damage(
        f"{_MESSAGES}GradientMessages._await_syncs",
        'self._messages.wait(pending, "wait sync")',
        "pass",
        "zero1",
        Kind.RACE,
    ),
    "a message inside a block is not waited for": Damage(
        "terrace.runtime.in_block:InBlockComm.wait", "flight.ticket.wait()", "pass", "rows", Kind.RACE
    ),
    "keys of a ring are not waited for": Damage(
        "terrace.runtime.in_block:InBlockComm.wait", "flight.ticket.wait()", "pass", "ring", Kind.RACE
    ),
    "rows of experts are not waited for": Damage(
        "terrace.runtime.in_block:InBlockComm.wait", "flight.ticket.wait()", "pass", "experts", Kind.RACE
    ),
    "an activation is not waited for": Damage(
        "terrace.comm.stage_p2p:_WorkTicket.wait", "self._work.wait()", "self._work._work.wait()", "stages", Kind.RACE
    ),
    "an exchange of a ring is not waited for": Damage(
        "terrace.comm.group_p2p:GroupP2P.exchange", "work.wait()", "work._work and work._work.wait()", "ring", Kind.RACE
    ),
    "a snapshot is written before it is there": Damage(
        "terrace.checkpoint.snapshot:Snapshot.take_into",
        "torch.accelerator.synchronize()",
        "pass",
        "saved",
        Kind.HOST_READS,
    ),
    "a fused product is not waited for": Damage(
        "terrace.runtime.tensor.axis_comm:AxisComm._compute",
        "self.in_block.wait(flight, self._ranks, computes=True)",
        "pass",
        "fused rows",
        Kind.RACE,
    ),
    # References that keep memory
    "a gradient is released while it is reduced": Damage(
        f"{_MESSAGES}GradientMessages._finish",
        'self._messages.wait(pending, "wait reduce")',
        "pass",
        "zero3",
        Kind.FREED,
    ),
    "a ticket keeps nothing": Damage(
        _SUBMIT,
        "_StreamTicket(work, event, computing)",
        "_StreamTicket(print, event, computing)",
        "islands",
        Kind.FREED,
    ),
    "an activation is dropped while it leaves": Damage(
        "terrace.runtime.activations:Activations.send",
        "self._leaving.append((Pending(self._stages.send(message_class, sent, now.peer), counter, now), sent))",
        "self._stages.send(message_class, sent, now.peer)",
        "stages",
        Kind.FREED,
    ),
    # Groups and their order
    "lanes share a communicator": Damage(
        "terrace.comm.groups:_group", "    # Local", "    lane = 0\n    # Local", "ring", Kind.COMMUNICATOR
    ),
    "a group has no device": Damage(
        "terrace.comm.process_group:new_group",
        'members["device_id"] = current_device()',
        "pass",
        "zero3",
        Kind.LATE_MAKING,
    ),
    "ranks gather in different orders": Damage(
        "terrace.runtime.messages:Messages.run",
        "enumerate(program.instructions)",
        "enumerate(_disordered(program.instructions, self.comm.rank))",
        "zero3",
        Kind.ORDER,
    ),
    "receives are posted in another group": Damage(
        "terrace.comm.stage_p2p:StageP2P.receive",
        "upward=stage < self._stage",
        "upward=not stage < self._stage",
        "stages",
        Kind.STUCK,
    ),
    "memory of fused products is not shared before": Damage(
        "terrace.runtime.axes:fused_operators",
        "found.share(rows.handle.group_name, num_bytes)",
        "pass",
        "fused rows",
        Kind.LATE_SHARING,
    ),
    # Devices of what is made
    "a buffer of messages is on the host": Damage(
        "terrace.comm.arena:Arena.__init__", ", device=device", "", "zero1", Kind.MEMORY
    ),
    "an activation arrives on the host": Damage(
        "terrace.runtime.activations:Activations.receive", ", device=self._device", "", "stages", Kind.MEMORY
    ),
    "residuals are on the host": Damage(
        f"{_ROUNDING}Origin.residual", ", device=self._device", "", "coded", Kind.DEVICES
    ),
    "errors are added on the host": Damage(
        f"{_ROUNDING}ErrorLog.take", ", device=self._device", "", "coded", Kind.DEVICES
    ),
    "parameters are views of the host": Damage(
        f"{_FLAT}FlatParam._make_parameters", ", device=self.full.device", "", "zero3", Kind.DEVICES
    ),
    "gradients are on the host": Damage(
        "terrace.runtime.flat_gradient:FlatGradient.allocate", ", device=self._device", "", "zero1", Kind.DEVICES
    ),
    "moments are on the host": Damage(
        "terrace.runtime.stored:Storage.zeros",
        "dtype=self._dtype, device=device",
        "dtype=self._dtype",
        "zero1",
        Kind.DEVICES,
    ),
    "the loss is added on the host": Damage(
        f"{_PASSES}StepValues.__init__", ", device=device", "", "zero1", Kind.DEVICES
    ),
    "numbers of a vocabulary are on the host": Damage(
        "terrace.runtime.tensor.loss:_Losses.forward", ", device=hidden.device", "", "rows", Kind.DEVICES
    ),
    "counts of experts are on the host": Damage(
        "terrace.runtime.routing.load:Load.__init__", ", device=device", "", "noisy", Kind.DEVICES
    ),
    "figures of islands are on the host": Damage(
        "terrace.runtime.outer_numbers:OuterNumbers.__init__",
        "self.heard = torch.zeros(num, self.num_islands, NUM_HEARD, dtype=torch.float64, device=device)",
        "self.heard = torch.zeros(num, self.num_islands, NUM_HEARD, dtype=torch.float64)",
        "islands",
        "a copy to the host: hear",
    ),
    "a mask is on the host": Damage(
        "terrace.model.attention:additive_mask", ", device=keys.device", "", "ring", Kind.DEVICES
    ),
    "noise is drawn on the host": Damage(
        "terrace.model.experts.gates.noisy:normal", ", device=places.device", "", "noisy", Kind.DEVICES
    ),
    "experts choose on the host": Damage(
        "terrace.model.experts.gates.expert_choice:choose", ", device=logits.device", "", "choose", Kind.DEVICES
    ),
    # Waits of the host
    "batches block": Damage(
        "terrace.runtime.batch:Batch.to",
        "non_blocking=True",
        "non_blocking=False",
        "zero1",
        "a copy from the host: <dictcomp>",
    ),
    "a snapshot is copied to pageable memory": Damage(
        "terrace.checkpoint.snapshot:Snapshot.take",
        "self._make_staging(self.num_bytes, self._on_device)",
        "self._make_staging(self.num_bytes, False)",
        "saved",
        "a copy to the host: take_into",
    ),
    "a loss is read in every pass": Damage(
        f"{_PASSES}Passes.forward",
        "            step.loss += output.detach()\n",
        "            step.loss += float(output.detach())\n",
        "islands",
        "a number is read: forward",
    ),
    "places of experts are counted": Damage(
        "terrace.runtime.routing.way:_places",
        "    if has_streams(wanted.device):\n",
        "    if False:\n",
        "experts",
        "the size of the result is counted: _places",
    ),
    "figures of a step are read one by one": Damage(
        "terrace.runtime.step_sums:StepSums.of",
        "torch.cat(parts).tolist()",
        "[float(x) for x in torch.cat(parts)]",
        "zero1",
        "a number is read: <listcomp>",
    ),
}


@contextmanager
def damaged(damage: Damage) -> Iterator[None]:
    """Run with a function whose text has been replaced."""
    module, _, name = damage.function.partition(":")
    owner: Any = import_module(module)
    *outer, last = name.split(".")
    for each in outer:
        owner = getattr(owner, each)
    inner = inspect.getattr_static(owner, last)
    function = getattr(inner, "__func__", inner)
    text, first = inspect.getsource(function), function.__code__.co_firstlineno
    assert damage.text in text, f"{damage.function} has no {damage.text!r}"
    source = textwrap.dedent(text.replace(damage.text, damage.other))
    # Lines keep their numbers, which messages name.
    code = compile("\n" * (first - 1) + source, function.__code__.co_filename, "exec")
    made: dict[str, Any] = {}
    exec(code, function.__globals__ | {"_disordered": _disordered}, made)
    setattr(owner, last, made[last])
    others = [each for each in _modules(function.__module__) if each.__dict__.get(last) is function]
    for each in others:
        setattr(each, last, made[last])
    try:
        yield
    finally:
        for each in (owner, *others):
            setattr(each, last, inner)


def _disordered(instructions: Sequence[Instruction], rank: int) -> Sequence[Instruction]:
    """Swap the first two gathers on rank 1."""
    gathers = [index for index, each in enumerate(instructions) if each.op is Op.GATHER][:2]
    if rank != 1 or len(gathers) < 2:
        return instructions
    one, two = gathers
    found = [*instructions]
    found[one], found[two] = found[two], found[one]
    return found


def _modules(name: str) -> list[Any]:
    """The modules that may have imported a function by its name."""
    return [module for each, module in sys.modules.items() if each.startswith("terrace.") and each != name]
