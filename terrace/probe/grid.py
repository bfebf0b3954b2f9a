"""Shapes and sizes to measure: up to a time limit each, evenly spaced in log size."""

import math
from typing import TypeVar

from terrace.model.blocks import forward_flops
from terrace.model.config import ModelConfig, parse_model

_TOKENS = (64, 256, 1024, 4096, 8192)
_WIDTHS = (64, 160, 256, 512, 1024, 2048, 4096, 8192)
_WIDENINGS = (1, 3, 4)  # of a width: an output, query-key-value, an MLP
_FLOPS_RANGE = 256.0  # FLOPs of the largest shape over the smallest
_DEEPEST_TO_WIDEST = 64  # no layer has flatter shapes
_MESSAGE_ALIGNMENT = 64

T = TypeVar("T")
Shape = tuple[int, int, int]  # m, k, n
LayerShape = tuple[ModelConfig, int, int]  # one layer, sequence, micro-batch


def gemm_shapes(largest_flops: float, count: int) -> list[Shape]:
    """Up to `count` shapes (m, k, n) of layers' products, of at most `largest_flops` each.

    Never empty: the smallest shape is always included.
    """
    shapes = {
        shape
        for tokens in _TOKENS
        for width in _WIDTHS
        for times in _WIDENINGS
        for shape in ((tokens, width, times * width), (tokens, times * width, width))
        if max(shape) <= _DEEPEST_TO_WIDEST * min(shape)
    }
    ordered = sorted(shapes, key=lambda shape: (_flops(shape), shape))
    fitting = [each for each in ordered if largest_flops / _FLOPS_RANGE <= _flops(each) <= largest_flops]
    return _spread(fitting or ordered[:1], count)


def orientations(shape: Shape) -> list[Shape]:
    """The three products of a linear layer with this forward shape: output, input gradient, weight gradient."""
    m, k, n = shape
    return [(m, k, n), (m, n, k), (k, m, n)]


def attention_sequences(largest_flops: float, batch: int, heads: int, head_dim: int) -> list[int]:
    """Sequence lengths to measure: 128, 256, and further doublings within the limit."""
    lengths = [128, 256]
    while lengths[-1] < 8192 and 4.0 * batch * heads * head_dim * (2 * lengths[-1]) ** 2 / 2 <= largest_flops:
        lengths.append(2 * lengths[-1])
    return lengths


def layer_shapes(largest_flops: float, count: int) -> list[LayerShape]:
    """Up to `count` decoder layers to measure, with widths from 128 up within the limit."""
    found: list[LayerShape] = []
    for hidden in (128, 256, 512, 1024, 2048, 4096):
        config = _layer(hidden)
        for sequence, micro_batch in ((128, 1), (128, 4), (1024, 2)):
            fits = forward_flops(config, 1, micro_batch, sequence) <= largest_flops
            if fits or (hidden, micro_batch) == (128, 1):
                found.append((config, sequence, micro_batch))
    return _spread(found, count)


def smallest_layer() -> LayerShape:
    """A layer with negligible work: its time is that of kernel launches."""
    return _layer(16), 8, 1


def overlap_layer(device: str) -> LayerShape:
    """The layer that runs during messages: milliseconds of work on this kind of device."""
    return (_layer(128), 128, 1) if device == "cpu" else (_layer(2048), 2048, 2)


def message_sizes(largest_bytes: float, degree: int, count: int) -> list[int]:
    """`count` sizes in bytes held by a whole group, from 4 KiB per rank to `largest_bytes`, ascending.

    Evenly spread in log size. Each divides evenly among `degree` ranks.
    """
    unit = degree * _MESSAGE_ALIGNMENT
    smallest = 4096.0 * degree
    ratio = (largest_bytes / smallest) ** (1 / (count - 1))
    return [max(1, round(smallest * ratio**step / unit)) * unit for step in range(count)]


def _layer(hidden: int) -> ModelConfig:
    heads = max(1, hidden // 64)
    return parse_model(
        {
            "model_type": "llama",
            "vocab_size": 1,
            "hidden_size": hidden,
            "intermediate_size": round(hidden * 8 / 3 / 16) * 16,
            "num_hidden_layers": 1,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        }
    )


def _flops(shape: Shape) -> float:
    return 2.0 * math.prod(shape)


def _spread(items: list[T], count: int) -> list[T]:
    if len(items) <= count:
        return items
    # First and last are always kept.
    return [items[round(step * (len(items) - 1) / (count - 1))] for step in range(count)]
