"""Sliding windows of layers. Imports nothing of Terrace."""

from collections.abc import Collection

SLIDING, FULL = "sliding_attention", "full_attention"  # values of `layer_types` in a `config.json`


def widest_window(windows: Collection[int]) -> int:
    """The widest of `windows`, where 0 (no window) is the widest of all."""
    return 0 if 0 in windows else max(windows, default=0)
