"""Checkpoints: written by all ranks of any plan, read by any ranks of any other."""

from terrace.train.checkpoint.layout import check_model, checkpoint_bytes, latest
from terrace.train.checkpoint.reading import Checkpoint, newest_whole, restore
from terrace.train.checkpoint.saving import Saver
from terrace.train.checkpoint.writing import save

__all__ = [
    "Checkpoint",
    "Saver",
    "check_model",
    "checkpoint_bytes",
    "latest",
    "newest_whole",
    "restore",
    "save",
]
