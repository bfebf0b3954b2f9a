"""Faults put into a running engine on purpose: each must make a comparison fail that passes without it."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from terrace.comm import Collectives, Origin
from terrace.plan import MessageClass
from terrace.program import Instruction, Op
from terrace.runtime.batch import Batch, positions_of
from terrace.runtime.block_state import Gradient
from terrace.runtime.engine import Engine
from terrace.runtime.passing import Key

VICTIM = 2  # the block that a fault befalls


def wrong_divisor(engine: Engine) -> None:
    """Divide by twice the number of tokens."""
    inner = engine.collectives.sum_control

    def doubled(values: Tensor) -> Tensor:
        total = inner(values)
        total[2] *= 2.0
        return total

    engine.collectives.sum_control = doubled  # type: ignore[method-assign]


def wrong_scale(engine: Engine) -> None:
    """Scale one block's gradient wrongly, after the norm was taken."""
    state = engine.states[VICTIM]
    inner = state.update
    state.update = lambda scale, lr: inner(scale * 0.5, lr)  # type: ignore[method-assign]


def skipped_reduce(engine: Engine) -> None:
    """Lose one block's gradient of all micro-batches but the first, on every rank."""
    state = engine.states[VICTIM]
    inner = state.reduce

    def lossy(collectives: Collectives, gradient: Gradient) -> None:
        if state.shards[0]._is_fresh:
            inner(collectives, gradient)

    state.reduce = lossy  # type: ignore[method-assign]


def stale_refresh(engine: Engine) -> None:
    """Send one block's new parameters as usual, but keep the old ones of the other ranks."""
    state = engine.states[VICTIM]
    inner = state.refresh

    def stale(collectives: Collectives) -> None:
        flat, layout = state.shards[0].trainable, engine.program.layout
        assert flat is not None
        own = flat.part_within(layout.optimizer, layout.params)
        inner(collectives)
        others = torch.ones(flat.shard.numel(), dtype=torch.bool)
        others[own] = False
        flat.shard[others] = before[others]
        before.copy_(flat.shard)

    whole = state.shards[0].trainable
    assert whole is not None
    before = whole.shard.clone()
    state.refresh = stale  # type: ignore[method-assign]


def unrounded_own_part(engine: Engine) -> None:
    """Put back the rank's own values after a gather whose format rounds, so that replicas drift apart."""
    whole_gather = engine.collectives.gather

    def gather(message: MessageClass, piece: Callable[[int], Tensor], outer: int, inner: int, origin: Origin) -> None:
        own = piece(outer).clone()
        whole_gather(message, piece, outer, inner, origin)
        piece(outer).copy_(own)

    engine.collectives.gather = gather  # type: ignore[method-assign]


def uncounted_byte(engine: Engine) -> None:
    """Send one byte that no formula declares."""
    engine._ledger.add(MessageClass.REDUCE, "node", 1)


def skipped_tie(engine: Engine) -> None:
    """Leave out what another stage adds to the gradient of a block that both hold."""
    for state in engine.states:
        state.tie = lambda between, stage: None  # type: ignore[method-assign]


def skipped_weight_half(engine: Engine) -> None:
    """Lose the weight gradients of one micro-batch on this rank's last block, where its backward is split."""
    executor, block = engine._executor, engine.program.stage.own[-1]
    inner = executor._handlers[Op.BACKWARD_WEIGHT]

    def lossy(now: Instruction) -> None:
        if (now.block, now.micro) == (block, 1):
            executor._due.pop((now.block, now.micro))
        else:
            inner(now)

    executor._handlers[Op.BACKWARD_WEIGHT] = lossy


def swapped_arrivals(engine: Engine) -> None:
    """Take the first two activations of another stage for one another."""
    executor = engine._executor
    inner = executor._take

    def swapped(key: Key) -> Tensor:
        backward, block, _ = key
        one, other = ((backward, block, each) for each in (0, 1))
        arriving = executor._passing._arriving
        if not backward and {one, other} <= arriving.keys():
            arriving[one], arriving[other] = arriving[other], arriving[one]
        return inner(key)

    executor._take = swapped  # type: ignore[method-assign]


def _at_taking(engine: Engine, change: Callable[[list[Batch]], None]) -> None:
    """Change what a rank of a context axis has of each step's micro-batches."""
    axis = engine._context
    assert axis is not None
    take = axis.take

    def changed(batches: Sequence[Batch]) -> list[Batch]:
        local = take(batches)
        change(local)
        return local

    axis.take = changed  # type: ignore[method-assign]


def wrong_position(engine: Engine) -> None:
    """Have the last token of every rank stand one place later."""

    def shift(local: list[Batch]) -> None:
        for batch in local:
            positions = positions_of(batch)
            assert positions is not None
            positions[0, -1] += 1

    _at_taking(engine, shift)


def dropped_pair(engine: Engine) -> None:
    """Leave out what the first rank of a pool makes of the keys of the last round."""

    def drop(local: list[Batch]) -> None:
        assert engine._context is not None
        for course in engine._context._courses if engine.rank == 0 else ():
            course.turns[-1] = replace(course.turns[-1], pairs=())

    _at_taking(engine, drop)


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
    )
}
