"""From a checkpoint to a Hugging Face folder."""

from itertools import groupby
from pathlib import Path

from torch import Tensor

from terrace.base.errors import CheckpointError
from terrace.checkpoint.reading import Checkpoint
from terrace.model.config import parse_model
from terrace.model.hf.pretrained import write_pretrained
from terrace.model.lora.config import is_adapter
from terrace.model.lora.peft import write_adapter
from terrace.train.adapted import lora_of, merged_values
from terrace.train.export_tokens import token_facts


def export(
    checkpoint: Checkpoint, folder: Path, dtype: str, shard_bytes: int, source: Path | None, end_of_text: int | None
) -> list[str]:
    """Writes the model of a checkpoint to `folder`; returns the names of the files.

    Takes the arguments of `write_pretrained`. Raises `CheckpointError` for an unreadable checkpoint, and `ModelError`
    as `write_pretrained` does.
    """
    config = parse_model(checkpoint.facts["model"])
    facts = token_facts(source, config, end_of_text)
    return write_pretrained(
        folder,
        config,
        _Values(checkpoint),
        dtype,
        shard_bytes=shard_bytes,
        source=source,
        end_of_text=end_of_text,
        carried=facts.files,
        ids=facts.ids,
    )


def export_adapter(checkpoint: Checkpoint, folder: Path, base: str) -> list[str]:
    """Writes the adapters of a checkpoint to `folder` as `peft` does; returns the names of the files.

    `base` names the base model. Raises `CheckpointError` for a checkpoint that has no adapters or is unreadable, and
    `ModelError` as `write_adapter` does.
    """
    lora = lora_of(checkpoint)
    if lora is None:
        raise CheckpointError(f"{checkpoint.folder} has no adapters: its run has no [lora]; leave --adapter out")
    # Adapters are small, so all are held at once.
    adapters = {(block, name): value for block, name, value in checkpoint.parameters() if is_adapter(name)}
    config = parse_model(checkpoint.facts["model"])
    return write_adapter(folder, config, lora, lambda block, name: adapters[block, name], base)


class _Values:
    # Callers ask in the order of blocks, so one block in memory is enough.
    def __init__(self, checkpoint: Checkpoint) -> None:
        self._blocks = groupby(merged_values(checkpoint), key=lambda each: each[0])
        self._block = ""
        self._values: dict[str, Tensor] = {}

    def __call__(self, block: str, param: str) -> Tensor:
        while block != self._block:
            self._block, parameters = next(self._blocks)
            self._values = {name: value for _, name, value in parameters}
        return self._values[param]
