"""Sliding windows of layers. Pure: needs no torch, and nothing else."""

from collections.abc import Collection

SLIDING, FULL = "sliding_attention", "full_attention"  # kinds of layers in `layer_types` of a `config.json`


def widest_window(windows: Collection[int]) -> int:
    """The widest of `windows`; 0 stands for no window and is wider than any other."""
    return 0 if 0 in windows else max(windows, default=0)
