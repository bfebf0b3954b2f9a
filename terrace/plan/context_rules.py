"""Which windows, score caps and RoPE scalings context parallelism supports (terrace.plan.context)."""

from collections.abc import Sequence

from terrace.model.operations import Rotary
from terrace.model.spec import BlockSpec
from terrace.model.windows import widest_window


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
        if block.operations.delta.heads:
            return "its linear layers carry a state along a row, which no ranks of a context axis pass on yet"
        if block.operations.core.cap:
            return "it caps the scores of attention, which no kernel of a context axis supports"
        for rotary in block.operations.of(Rotary):
            if 0 < rotary.limit < sequence and rotary.scaling is not None:
                kind = rotary.scaling.rope_type
                return f"its {kind} RoPE changes with the length of rows beyond {rotary.limit} tokens"
    return ""
