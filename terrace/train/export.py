"""From a checkpoint to a Hugging Face folder."""

from itertools import groupby
from pathlib import Path

from torch import Tensor

from terrace.model.config import parse_model
from terrace.model.pretrained import write_pretrained
from terrace.train.checkpoint import Checkpoint


def export(
    checkpoint: Checkpoint, folder: Path, dtype: str, shard_bytes: int, source: Path | None, end_of_text: int | None
) -> list[str]:
    """Write the model of a checkpoint to `folder` and return the names of the files.

    The arguments are those of `write_pretrained`. Raises `CheckpointError` for a checkpoint that cannot be read, and
    `ModelError` as `write_pretrained` does.
    """
    return write_pretrained(
        folder,
        parse_model(checkpoint.facts["model"]),
        _Values(checkpoint),
        dtype,
        shard_bytes=shard_bytes,
        source=source,
        end_of_text=end_of_text,
    )


class _Values:
    """Whole parameters of a checkpoint, a block in memory at a time: they are asked for in the order of the blocks."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._blocks = groupby(checkpoint.parameters(), key=lambda each: each[0])
        self._block = ""
        self._values: dict[str, Tensor] = {}

    def __call__(self, block: str, param: str) -> Tensor:
        while block != self._block:
            self._block, parameters = next(self._blocks)
            # What adapters add to a matrix is to be merged into it here, before anybody sees it.
            self._values = {name: value for _, name, value in parameters}
        return self._values[param]
