"""Which windows, score caps and RoPE scalings context parallelism supports (terrace.plan.context)."""

from collections.abc import Sequence

from terrace.base.errors import PlanError
from terrace.model.operations import Rotary
from terrace.model.spec import BlockSpec
from terrace.model.windows import widest_window
from terrace.plan.context import CHUNKS_PER_RING_RANK


def windows_of(blocks: Sequence[BlockSpec]) -> tuple[int, ...]:
    """The distinct attention windows of the layers, widest first; 0 means no window. Empty without attention."""
    found = {block.operations.core.window for block in blocks if block.attends and not block.operations.delta.heads}
    if not found:
        return ()
    widest = widest_window(sorted(found))
    return (widest, *sorted(found - {widest}))


def why_whole(blocks: Sequence[BlockSpec], sequence: int = 0, balance: str = "tokens") -> str:
    """Why attention over rows of `sequence` tokens (0: any length) cannot be split over ranks; "" if it can."""
    windows = windows_of(blocks)
    if len(windows) > 1 and balance == "cost":
        listed = " and ".join("no window" if not window else f"a window of {window}" for window in windows)
        return f'its layers differ in their windows ({listed}), and balance = "cost" prices documents by one'
    for block in blocks:
        if block.operations.delta.heads and balance == "cost":
            return 'its linear layers carry a state along a row, and balance = "cost" deals documents to ranks'
        if block.operations.core.cap:
            return "it caps the scores of attention, which no kernel of a context axis supports"
        for rotary in block.operations.of(Rotary):
            if 0 < rotary.limit < sequence and rotary.scaling is not None:
                kind = rotary.scaling.rope_type
                return f"its {kind} RoPE changes with the length of rows beyond {rotary.limit} tokens"
    return ""


def check_linear(blocks: Sequence[BlockSpec], sequence: int, ring: int, ulysses: int) -> None:
    """Raise `PlanError` if linear layers cannot pass their states on, on rows of `sequence` tokens (0: any length)."""
    if why := why_no_scan(blocks, sequence, ring, ulysses):
        raise PlanError(why)


def why_no_scan(blocks: Sequence[BlockSpec], sequence: int, ring: int, ulysses: int) -> str:
    """Why linear layers cannot pass their states on; "" if they can, or there are none."""
    deltas = [block.operations.delta for block in blocks if block.operations.delta.heads]
    if not deltas or ring * ulysses == 1:
        return ""
    if ulysses > 1:
        return (
            f"ulysses = {ulysses} gives each rank some heads of all tokens, and the linear layers of this model pass "
            "states between ranks that have all heads: use a ring"
        )
    chunks, taps = CHUNKS_PER_RING_RANK * ring, max(delta.taps for delta in deltas)
    if sequence and (sequence % chunks or sequence // chunks < taps - 1):
        return (
            f"sequence = {sequence}: the linear layers of this model pass states between the {chunks} chunks of a row, "
            f"which a ring of {ring} cuts evenly, of at least {taps - 1} tokens each: use a multiple of {chunks}, or "
            "another ring"
        )
    return ""
