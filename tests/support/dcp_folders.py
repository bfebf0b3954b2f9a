"""Small folders of `torch.distributed.checkpoint`, and objects that a pickle would run."""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import save

from terrace.model.config import parse_model
from terrace.model.hf.pretrained import Pretrained


def read_as(table: dict[str, Any], folder: Path) -> Pretrained:
    return Pretrained(folder, parse_model(table))


class Runs:
    """An object that is pickled as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def a_folder(path: Path) -> Path:
    state = {"model.embed_tokens.weight": torch.ones(6, 4), "model.norm.weight": torch.ones(4)}
    save(state, checkpoint_id=path, no_dist=True)
    return path
