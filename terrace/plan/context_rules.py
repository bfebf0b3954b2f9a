"""Rules on layers whose ranks attend together (terrace.plan.context): their windows, caps and RoPE."""

from collections.abc import Sequence

from terrace.model.blocks import DecoderBlock
from terrace.model.config import ModelConfig
from terrace.model.spec import BlockSpec
from terrace.model.windows import widest_window


def windows_of(blocks: Sequence[BlockSpec]) -> tuple[int, ...]:
    """The windows of a decoder's layers, each once, the widest first; 0: none. Empty for blocks of another kind."""
    found = {layer.sliding_window for layer in _layers(blocks)}
    if not found:
        return ()
    widest = widest_window(sorted(found))
    return (widest, *sorted(found - {widest}))


def _layers(blocks: Sequence[BlockSpec]) -> list[ModelConfig]:
    return [block.config for block in blocks if isinstance(block, DecoderBlock) and block.attends]


def why_whole(blocks: Sequence[BlockSpec], sequence: int = 0, balance: str = "tokens") -> str:
    """Why ranks cannot share the attention of rows of `sequence` tokens (0: of any length); empty where they can."""
    windows = windows_of(blocks)
    if len(windows) > 1 and balance == "cost":
        listed = " and ".join("no window" if not window else f"a window of {window}" for window in windows)
        return f'its layers differ in their windows ({listed}), and balance = "cost" prices documents by one'
    for layer in _layers(blocks):
        if layer.scales.attention_cap:
            return "it caps the scores of attention, which no kernel of a context axis supports"
        if 0 < layer.rope_limit < sequence and layer.rope_scaling is not None:
            kind = layer.rope_scaling.rope_type
            return f"its {kind} RoPE changes with the length of rows beyond {layer.rope_limit} tokens"
    return ""
