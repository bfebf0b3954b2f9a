"""The rules of every op, as a table that is read from top to bottom (terrace.program.verify).

Fields and phases of the ops are in `SPECS` (terrace.program.instruction); the facts that rules read, and how each op
changes them, in terrace.program.walk.
"""

from collections.abc import Callable, Collection
from typing import NamedTuple

from terrace.program.gaps import BETWEEN, has_gaps, may_be_in_gaps
from terrace.program.instruction import PASSES, Instruction, Op, Phase
from terrace.program.walk import Walk

Broken = Callable[[Walk, Instruction], object]


class Rule(NamedTuple):
    """A rule of some ops: `words` say what is wrong with an instruction for which it is `broken`.

    `broken` returns None or False for an instruction that keeps the rule, else True or the value named in `words`.
    """

    ops: Collection[Op]
    words: str
    broken: Broken


def _input(walk: Walk, now: Instruction) -> int | None:
    """The block whose result a pass reads, unless another stage has sent it; the first and the last read none."""
    backward = now.op is not Op.FORWARD
    block = now.block + 1 if backward else now.block - 1
    is_there = not 0 <= block < len(walk.blocks) or (backward, block, now.micro) in walk.received
    return None if is_there else block


def _input_elsewhere(walk: Walk, now: Instruction) -> object:
    block = _input(walk, now)
    return block if block not in walk.own else None


def _input_missing(walk: Walk, now: Instruction) -> object:
    block = _input(walk, now)
    if block is None:
        return None
    # The gradient of the input is ready after the first half of a backward.
    made = (Op.FORWARD,) if now.op is Op.FORWARD else (Op.BACKWARD, Op.BACKWARD_INPUT)
    return walk.missing(made, block, now.micro)


def _sent_missing(walk: Walk, now: Instruction) -> object:
    made = (Op.BACKWARD, Op.BACKWARD_INPUT) if now.backward else (Op.FORWARD,)
    return walk.missing(made, now.block, now.micro)


def _not_gathered(walk: Walk, now: Instruction) -> object:
    # A tied block's parameters are read too, as a tied head reads the embedding.
    needed = walk.needs[now.block]
    return next((block for block in needed if walk.gathers[block] and block not in walk.resident), None)


def _synchronised(walk: Walk, now: Instruction) -> object:
    # A later gradient would be lost: the optimizer only sees the synchronised sum.
    return next((block for block in walk.needs[now.block] if walk.has(Op.SYNC, block)), None)


def _unit_open(walk: Walk, now: Instruction) -> object:
    # The next unit's gradient would be added before this one's reduction took it.
    for block in walk.completes[now.block]:
        if walk.finished[block] >= walk.unit:
            return f"{walk.unit} micro-batches of block {block}"
    return None


def _too_few(walk: Walk, now: Instruction) -> object:
    due, finished = walk.due(now.block), walk.finished[now.block]
    return f"{due} more complete backwards of its block, there are {finished}" if finished < due else None


def _forward_missing(walk: Walk, now: Instruction) -> object:
    passes = ((block, micro) for block in walk.counted for micro in range(walk.num_micros))
    return next(filter(None, (walk.missing([Op.FORWARD], *each) for each in passes)), None)


def _sync_missing(walk: Walk, now: Instruction) -> object:
    return next(filter(None, (walk.missing([Op.SYNC], block) for block in sorted(walk.held & walk.trainable))), None)


def _change_missing(walk: Walk, now: Instruction) -> object:
    for block in sorted(walk.starts):
        missing = walk.missing([Op.UPDATE], block) if walk.trains else None
        missing = missing or (walk.missing([Op.OUTER_APPLY], block) if block in walk.arrives else None)
        if missing:
            return missing
    return None


def _two_reductions(walk: Walk, now: Instruction) -> object:
    is_second = now.in_gaps and any(each.op is Op.REDUCE for each in walk.waiting)
    return walk.waiting[0] if is_second else None


def _reduction_waits(walk: Walk, now: Instruction) -> object:
    waits = not now.in_gaps and any(each.block == now.block for each in walk.waiting)
    return waits and bool(walk.program.message(now).sends)


def _after(op: Op, needed: Callable[[Walk, int], bool] = lambda walk, block: True) -> Broken:
    """Another op comes before, on the same block and micro-batch, if the block needs it."""
    return lambda walk, now: walk.missing([op], now.block, now.micro) if needed(walk, now.block) else None


_BELOW = (Op.EVICT, Op.FETCH)
_OF_MICROS = (*PASSES, Op.REDUCE, *_BELOW)
_ONCE = frozenset(Op) - {Op.GATHER, Op.FREE}
_OF_STATES = (Op.REDUCE, Op.SYNC, Op.AGREE, Op.REFRESH, Op.OUTER_START, Op.OUTER_APPLY)
_TRAINED = (*_OF_STATES, Op.TIE, Op.UPDATE)
_READ = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT)
_HALVES = (Op.BACKWARD, Op.BACKWARD_INPUT)
_GRADIENTS = (*_HALVES, Op.BACKWARD_WEIGHT)
_COMPLETE = (Op.BACKWARD, Op.BACKWARD_WEIGHT)
_BEFORE = "it needs `{}` before it"

RULES = (
    # Passes, and the reduction of their gradients.
    Rule(_OF_MICROS, "there is no micro-batch {}", lambda w, now: None if w.has_micro(now.micro) else now.micro),
    Rule(_ONCE, "it runs twice", lambda w, now: now[:4] in w.done),
    Rule(PASSES, "block {} runs on another stage", lambda w, now: None if now.block in w.own else now.block),
    Rule(_OF_STATES, "block {} is on another stage", lambda w, now: None if now.block in w.held else now.block),
    Rule(_TRAINED, "the block has nothing to train", lambda w, now: now.block not in w.trainable),
    Rule(
        _HALVES,
        "the backward of this micro-batch has run",
        lambda w, now: any(w.has(op, now.block, now.micro) for op in _HALVES),
    ),
    Rule(_READ, "the parameters of block {} are not gathered", _not_gathered),
    Rule(_HALVES, _BEFORE, _after(Op.FORWARD)),
    Rule(_READ, "it needs the result of block {}, which is on another stage: RECV it before", _input_elsewhere),
    Rule(_READ, _BEFORE, _input_missing),
    Rule((Op.BACKWARD_WEIGHT,), _BEFORE, _after(Op.BACKWARD_INPUT)),
    Rule(_GRADIENTS, "the gradient of block {} is synchronised already", _synchronised),
    Rule(_COMPLETE, "a unit of {} is not reduced yet", _unit_open),
    Rule((Op.REDUCE,), "it needs {}", _too_few),
    Rule(
        (Op.REDUCE,),
        "the newest micro-batch whose gradient is complete is {}: say so",
        lambda w, now: None if w.newest[now.block] == now.micro else w.newest[now.block],
    ),
    # Inputs that are kept below the device.
    Rule(_BELOW, "the input of the block stays on the device", lambda w, now: now.block not in w.leaving),
    Rule((Op.EVICT,), _BEFORE, _after(Op.FORWARD)),
    Rule((Op.FETCH,), _BEFORE, _after(Op.EVICT)),
    Rule(
        _BELOW,
        "the backward of this micro-batch has run",
        lambda w, now: any(w.has(op, now.block, now.micro) for op in _HALVES),
    ),
    Rule((Op.FETCH,), "{} inputs are fetched ahead already", lambda w, _: w.ahead if w.ahead > w.most_ahead else None),
    Rule(_HALVES, _BEFORE, _after(Op.FETCH, lambda w, block: block in w.leaving)),
    # Parameters.
    Rule(
        (Op.GATHER,),
        "the parameters are whole on every rank: there is nothing to gather",
        lambda w, now: not w.gathers[now.block],
    ),
    Rule((Op.GATHER,), "the block is already gathered", lambda w, now: now.block in w.resident),
    Rule((Op.GATHER,), "the plan keeps no secondary copy", lambda w, now: now.secondary and not w.has_secondary),
    Rule(
        (Op.GATHER,),
        "the secondary copy is only written by a gather from the primary copy",
        lambda w, now: now.secondary and now.block not in w.opened,
    ),
    # The gather could read half-updated slices.
    Rule((Op.GATHER,), "the parameters are being updated", lambda w, now: w.has(Op.UPDATE, now.block)),
    Rule((Op.FREE,), "the block is not gathered", lambda w, now: now.block not in w.resident),
    Rule((Op.FREE,), "its secondary copy is whole and stays", lambda w, now: not w.frees[now.block]),
    Rule((Op.FREE,), "the block is gathered for nothing: no instruction read it", lambda w, now: now.block in w.unused),
    # Messages between stages.
    Rule((Op.SEND,), "stage {} does not read it", lambda w, now: None if w.is_read(now) else now.peer),
    Rule((Op.SEND,), _BEFORE, _sent_missing),
    Rule((Op.RECV,), "block {} runs on this stage", lambda w, now: now.block if now.block in w.own else None),
    Rule(
        (Op.RECV,),
        "stage {} makes nothing of it that this stage reads",
        lambda w, now: None if (now.backward, now.block, now.peer) in w.incoming else now.peer,
    ),
    # The end of a step.
    Rule(
        (Op.TIE,),
        "stage {} holds no copy of the block",
        lambda w, now: None if w.ties.get(now.block) == now.peer else now.peer,
    ),
    Rule(
        (Op.TIE, Op.SYNC),
        "it comes after the last of the block's {} reductions",
        lambda w, now: None if w.is_reduced(now.block) else w.num_units,
    ),
    Rule(
        (Op.SYNC,),
        "the gradient that another stage has of this block is not added yet: TIE it before",
        lambda w, now: now.block in w.ties and not w.has(Op.TIE, now.block),
    ),
    Rule((Op.COUNT,), "no block of the stage has a router", lambda w, now: not w.counted),
    Rule((Op.COUNT,), _BEFORE, _forward_missing),
    Rule((Op.CLIP,), _BEFORE, _after(Op.COUNT, lambda w, _: w.trains and bool(w.counted))),
    Rule((Op.CLIP,), _BEFORE, _sync_missing),
    Rule(
        (Op.ORTHOGONALISE,),
        "the block has no matrices that the optimizer updates as wholes",
        lambda w, now: now.block not in w.orthogonalised,
    ),
    Rule((Op.AGREE,), "blocks are updated behind CLIP", lambda w, now: not w.layer_wise),
    Rule((Op.AGREE,), _BEFORE, _after(Op.SYNC)),
    Rule((Op.UPDATE,), _BEFORE, _after(Op.AGREE, lambda w, _: w.layer_wise)),
    Rule((Op.ORTHOGONALISE, Op.UPDATE), _BEFORE, lambda w, now: None if w.layer_wise else w.missing([Op.CLIP])),
    # One layer is updated while the next is gathered.
    Rule((Op.ORTHOGONALISE,), "the whole matrices of two layers are held already", lambda w, now: w.directions > 1),
    Rule((Op.UPDATE,), _BEFORE, _after(Op.ORTHOGONALISE, lambda w, block: block in w.orthogonalised)),
    Rule(
        (Op.UPDATE,),
        "the block is still gathered: its full parameters would go stale",
        lambda w, now: now.block in w.resident and w.frees[now.block],
    ),
    # Exchanges between islands.
    Rule((Op.OUTER_COUNT,), "no exchange starts here", lambda w, now: not w.exchange.starts),
    Rule((Op.OUTER_COUNT,), _BEFORE, _change_missing),
    Rule((Op.OUTER_START,), "it is not the turn of its fragment", lambda w, now: now.block not in w.starts),
    Rule(
        (Op.OUTER_START,),
        "it needs `OUTER_COUNT` before it: weights go by the tokens of all islands",
        lambda w, now: not w.has(Op.OUTER_COUNT),
    ),
    Rule((Op.OUTER_APPLY,), "no exchange of its fragment is over", lambda w, now: now.block not in w.applies),
    Rule((Op.OUTER_APPLY, Op.REFRESH), _BEFORE, _after(Op.UPDATE, lambda w, _: w.trains)),
    Rule((Op.OUTER_APPLY,), _BEFORE, _after(Op.OUTER_START, lambda w, block: block not in w.arrives)),
    Rule((Op.REFRESH,), _BEFORE, _after(Op.OUTER_APPLY, lambda w, block: block in w.applies)),
    Rule(
        (Op.REFRESH,),
        "nothing has changed the block",
        lambda w, now: w.phase is Phase.OUTER and now.block not in w.applies,
    ),
)

# Rules under a plan with `expert_gaps`, which come first.
_GAPS = (
    Rule(
        frozenset(Op),
        "parts of `{}` are held for the gaps of the next pass, and this one has none",
        lambda w, now: w.waiting[0] if w.waiting and now.op not in BETWEEN and not has_gaps(w.model, now) else None,
    ),
    Rule(
        frozenset(Op),
        "its lane has no gaps: routed messages take others",
        lambda w, now: now.in_gaps and not may_be_in_gaps(w.model, now.op, now.block),
    ),
    Rule((Op.REDUCE,), "`{}` is held, too, and the next gradient has no buffer", _two_reductions),
    Rule((Op.SYNC,), "the parts of its REDUCE are held: SYNC it in gaps, too", _reduction_waits),
)
OF_OP = {op: tuple(rule for rule in RULES if op in rule.ops) for op in Op}
OF_OP_IN_GAPS = {op: (*(rule for rule in _GAPS if op in rule.ops), *OF_OP[op]) for op in Op}
