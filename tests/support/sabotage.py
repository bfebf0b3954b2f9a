"""Faults put into a running engine on purpose: each must make a comparison fail that passes without it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count, cycle
from typing import Any

import torch
from torch import Tensor

from terrace.comm import codecs
from terrace.comm.codecs import packed
from terrace.comm.collectives import Collectives
from terrace.comm.rounding import Origin
from terrace.plan.hops import Hop
from terrace.plan.in_block_messages import RoutedMessage
from terrace.plan.wire import MessageClass, parse_format
from terrace.program.instruction import Instruction, Op
from terrace.program.message import Transfer
from terrace.runtime.activations import Key
from terrace.runtime.batch import Batch
from terrace.runtime.context.axis import ContextAxis
from terrace.runtime.engine import Engine
from terrace.runtime.flat_param import FlatParam
from terrace.runtime.routing.axis import ExpertAxis

VICTIM = 2  # the block that a fault befalls


def wrong_divisor(engine: Engine) -> None:
    """Divide by twice the number of tokens."""
    inner = engine.comm.collectives.sum_control

    def doubled(transfer: Transfer, values: Tensor, *rest: Tensor) -> Tensor:
        total = inner(transfer, values, *rest)
        total[2] *= 2.0
        return total

    engine.comm.collectives.sum_control = doubled  # type: ignore[assignment, method-assign]


def wrong_scale(engine: Engine) -> None:
    """Scale one block's gradient wrongly, after the norm was taken."""
    (flat,) = engine.state.trainable(VICTIM)
    inner = flat.update
    flat.update = lambda scale, lr: inner(scale * 0.5, lr)  # type: ignore[method-assign]


def skipped_reduce(engine: Engine) -> None:
    """Lose one block's gradient of all micro-batches but the first, on every rank."""
    (flat,) = engine.state.trainable(VICTIM)
    inner = flat.gradient.reduce

    def lossy(collectives: Collectives, transfer: Transfer, buffer: Tensor) -> None:
        if flat.gradient._is_fresh:
            inner(collectives, transfer, buffer)

    flat.gradient.reduce = lossy  # type: ignore[method-assign]


def stale_refresh(engine: Engine) -> None:
    """Send one block's new parameters as usual, but keep the old ones of the other ranks."""
    (flat,) = engine.state.trainable(VICTIM)
    inner = flat.refresh

    def stale(collectives: Collectives, transfer: Transfer) -> None:
        own = flat.part_within(flat.layout.optimizer, flat.layout.params)
        inner(collectives, transfer)
        others = torch.ones(flat.shard.numel(), dtype=torch.bool)
        others[own] = False
        flat.shard[others] = before[others]
        before.copy_(flat.shard)

    before = flat.shard.clone()
    flat.refresh = stale  # type: ignore[method-assign]


def unrounded_own_part(engine: Engine) -> None:
    """Put back the rank's own values after a gather whose format rounds, so that replicas drift apart."""
    whole_gather = engine.comm.collectives.gather

    def gather(transfer: Transfer, piece: Callable[[int], Tensor], origin: Origin) -> None:
        own = [(hop.tier, piece(hop.tier).clone()) for hop in transfer.gathering[:1]]
        whole_gather(transfer, piece, origin)
        for outer, values in own:
            piece(outer).copy_(values)

    engine.comm.collectives.gather = gather  # type: ignore[method-assign]


def uncounted_byte(engine: Engine) -> None:
    """Send one byte that no formula declares."""
    engine.comm.ledger.add(MessageClass.REDUCE, "node", 1)


def skipped_tie(engine: Engine) -> None:
    """Leave out another stage's part of the gradient of a block that both hold."""
    for flat in engine.state:
        flat.gradient.tie = lambda stages, stage: None  # type: ignore[method-assign]


def skipped_weight_half(engine: Engine) -> None:
    """Lose the weight gradients of one micro-batch on this rank's last block, where its backward is split."""
    executor, block = engine.runner, engine.program.stage.own[-1]
    inner = executor.handlers[Op.BACKWARD_WEIGHT]

    def lossy(now: Instruction) -> None:
        if (now.block, now.micro) == (block, 1):
            executor.passes.step.queues.pop((now.block, now.micro))
        else:
            inner(now)

    executor.handlers[Op.BACKWARD_WEIGHT] = lossy


def swapped_arrivals(engine: Engine) -> None:
    """Take the first two activations of another stage for one another."""
    executor = engine.runner.passes
    inner = executor._take

    def swapped(key: Key) -> Tensor:
        backward, block, _ = key
        one, other = ((backward, block, each) for each in (0, 1))
        arriving = executor.step.activations._arriving
        if not backward and {one, other} <= arriving.keys():
            arriving[one], arriving[other] = arriving[other], arriving[one]
        return inner(key)

    executor._take = swapped  # type: ignore[method-assign]


def _at_taking(engine: Engine, change: Callable[[Sequence[Batch]], None]) -> None:
    """Change the part of each step's micro-batches that a rank of a context axis has."""
    axis = engine.axes[-1]
    take = axis.take

    def changed(batches: Sequence[Batch], *, trains: bool = True) -> Sequence[Batch]:
        local = take(batches, trains=trains)
        change(local)
        return local

    axis.take = changed  # type: ignore[method-assign]


def wrong_position(engine: Engine) -> None:
    """Have the last token of every rank stand one place later."""

    def shift(local: Sequence[Batch]) -> None:
        for batch in local:
            positions = batch.positions
            assert positions is not None
            positions[0, -1] += 1

    _at_taking(engine, shift)


def dropped_pair(engine: Engine) -> None:
    """Leave out the first rank's attention to the keys of the last round."""

    def drop(local: Sequence[Batch]) -> None:
        axis = engine.axes[-1]
        assert isinstance(axis, ContextAxis)
        for layout in axis._layouts if engine.rank == 0 else ():
            layout.ring_steps[-1] = replace(layout.ring_steps[-1], pairs=((),))

    _at_taking(engine, drop)


def lost_row(engine: Engine) -> None:
    """Lose one token's output of another rank's experts, in every message that brings any."""
    (axis,) = (axis for axis in engine.axes if isinstance(axis, ExpertAxis))
    inner = axis.exchange

    def lossy(message: RoutedMessage, *rest: Any) -> Tensor:
        received: Tensor = inner(message, *rest)
        if message.message_class is MessageClass.COMBINE:
            received[:1].zero_()
        return received

    axis.exchange = lossy  # type: ignore[assignment, method-assign]


def wrong_expert_scale(engine: Engine) -> None:
    """Scale the gradients of all experts wrongly in every second step: AdamW would forgive a constant."""
    for flat in _stacks(engine):
        flat.update = partial(_scaled_in_turns, flat.update, count())  # type: ignore[method-assign]


def _scaled_in_turns(update: Callable[[Tensor, float], None], turns: "count[int]", scale: Tensor, lr: float) -> None:
    update(scale * (1.0 + next(turns) % 2), lr)


def missed_norm(engine: Engine) -> None:
    """Leave the gradients of all experts out of the norm."""
    for flat in _stacks(engine):
        flat.is_first = lambda tier: False  # type: ignore[method-assign]


def _stacks(engine: Engine) -> list[FlatParam]:
    return [flat for flat in engine.state if flat.spec.trainable and any(param.is_stack for param in flat.spec.params)]


def wrong_count(engine: Engine) -> None:
    """Count a token of rank 0 for another expert of the first mixture."""
    inner = engine.load.add_up

    def wrong(collectives: Collectives, transfer: Transfer) -> None:
        numbers = engine.load._numbers
        if engine.rank == 0:
            busiest = int(numbers[: engine.load.num_experts].argmax())
            numbers[busiest] -= 1
            numbers[(busiest + 1) % engine.load.num_experts] += 1
        inner(collectives, transfer)

    engine.load.add_up = wrong  # type: ignore[method-assign]


def frozen_bias(engine: Engine) -> None:
    """Leave the bias of gates where it was."""
    engine.load._balance = replace(engine.load._balance, bias=0.0)


def lost_part(engine: Engine) -> None:
    """Lose the first part of a gradient that travels in gaps, on this rank."""
    flat, *_ = engine.state.trainable(VICTIM)
    gradient, inner = flat.gradient, flat.gradient.reduce

    def lossy(collectives: Collectives, transfer: Transfer, buffer: Tensor) -> None:
        inner(collectives, transfer, buffer)
        if transfer.columns is not None and transfer.columns[0] == 0:
            gradient.columns(gradient.accumulated, transfer).zero_()

    gradient.reduce = lossy  # type: ignore[method-assign]


def rounded_on_a_plain_tier(engine: Engine) -> None:
    """Round activations and gradients from another stage also where they arrived as they were sent."""
    inner, wire = engine.comm.collectives.read_rows, parse_format("int8:16")

    def rounded(hop: Hop, coded: Tensor, dtype: torch.dtype) -> Tensor:
        rows = inner(hop, coded, dtype)
        if not hop.wire.block:
            codes = torch.empty(1, wire.message_bytes(hop.numel), dtype=torch.uint8)
            codecs.encode(rows, wire, codes)
            codecs.decode(codes, wire, rows)
        return rows

    engine.comm.collectives.read_rows = rounded  # type: ignore[method-assign]


def lost_residual(engine: Engine) -> None:
    """Forget the residuals of the gradients that this rank sent to the stage before."""
    for origin in engine.state.edges.values():
        origin.residual = lambda message, tier, leg, rows, numel: torch.zeros(rows, numel)  # type: ignore[method-assign]


def rows_rounded_twice(engine: Engine) -> None:
    """Round coded rows that arrive once more, in a narrower format."""
    inner, wire = engine.comm.collectives.read_rows, parse_format("int4:16")

    def rounded(hop: Hop, coded: Tensor, dtype: torch.dtype) -> Tensor:
        rows = inner(hop, coded, dtype)
        codes = torch.empty(len(rows), wire.message_bytes(hop.numel), dtype=torch.uint8)
        codecs.encode(rows, wire, codes)
        codecs.decode(codes, wire, rows)
        return rows

    engine.comm.collectives.read_rows = rounded  # type: ignore[method-assign]


def never_fits(engine: Engine) -> None:
    """Mark every packed message as one that does not fit, so that its plain values must follow."""
    collectives = engine.comm.collectives
    inner = collectives._encode

    def marked(message: MessageClass, hop: Hop, leg: str, values: Tensor, out: Tensor, origin: Origin) -> None:
        inner(message, hop, leg, values, out, origin)
        if hop.wire.packed and len(out):
            packed.mark(out[-1:], hop.wire, hop.numel)
            out[:, -1] ^= 0x55  # what a reader of it would decode

    collectives._encode = marked  # type: ignore[method-assign]


def some_do_not_fit(engine: Engine) -> None:
    """Mark the last part of every other packed message of rank 0 alone, so that ranks must agree on what follows."""
    collectives, turns = engine.comm.collectives, cycle((True, False))
    inner = collectives._encode

    def marked(message: MessageClass, hop: Hop, leg: str, values: Tensor, out: Tensor, origin: Origin) -> None:
        inner(message, hop, leg, values, out, origin)
        if engine.rank == 0 and hop.wire.packed and len(out) and next(turns):
            packed.mark(out[-1:], hop.wire, hop.numel)
            out[:, -1] ^= 0x55  # what a reader of it would decode

    collectives._encode = marked  # type: ignore[method-assign]


def flipped_bit(engine: Engine) -> None:
    """Flip the lowest bit of a mantissa in every packed message."""
    collectives = engine.comm.collectives
    inner = collectives._encode

    def flipped(message: MessageClass, hop: Hop, leg: str, values: Tensor, out: Tensor, origin: Origin) -> None:
        inner(message, hop, leg, values, out, origin)
        if hop.wire.packed and len(out):
            out[0, 2 * -(-hop.numel // hop.wire.block) - (-hop.numel // 2)] ^= 1

    collectives._encode = flipped  # type: ignore[method-assign]


SABOTAGES: dict[str, Callable[[Engine], None]] = {
    function.__name__: function
    for function in (
        wrong_divisor,
        wrong_scale,
        skipped_reduce,
        stale_refresh,
        unrounded_own_part,
        uncounted_byte,
        skipped_tie,
        skipped_weight_half,
        swapped_arrivals,
        wrong_position,
        dropped_pair,
        lost_row,
        wrong_expert_scale,
        missed_norm,
        wrong_count,
        frozen_bias,
        lost_part,
        rounded_on_a_plain_tier,
        lost_residual,
        rows_rounded_twice,
        never_fits,
        some_do_not_fit,
        flipped_bit,
    )
}
