"""Exports a checkpoint, with optimizer states, to a folder of `torch.distributed.checkpoint`.

The state dict is that of a program with a `transformers` model and `torch.optim.AdamW` that saves

    options = StateDictOptions(flatten_optimizer_state_dict=True)
    {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer, options=options)}

or that of torchtitan, whose parameters are not under a key "model". One block and its states are in memory at a time.

Source: `_flatten_optim_state_dict` of `torch.distributed.checkpoint.state_dict`, torch 2.13.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from terrace.base.errors import CheckpointError, ModelError
from terrace.base.files import folder_atomic, write_atomic
from terrace.checkpoint.reading import Checkpoint
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig, parse_model, to_table
from terrace.model.dcp.names import (
    HUGGING_FACE,
    OPTIMIZER,
    TORCHTITAN,
    check_dense,
    check_titan,
    heads_of,
    program_name,
    to_titan,
)
from terrace.model.dcp.writing import DcpWriter
from terrace.model.hf.config import published_table
from terrace.model.hf.folder import CONFIG, carried_files, token_ids
from terrace.model.hf.names import output_name
from terrace.model.hf.written import DTYPES, Parts, joined, rounded, stored_parts
from terrace.runtime.states import ADAMW, FROZEN, KINDS
from terrace.train.adapted import lora_of, merged_values
from terrace.train.export import token_facts
from terrace.train.runs import RunFolder

_VALUE = "value"
_MOMENTS = KINDS[ADAMW][1:]


@dataclass(frozen=True, kw_only=True)
class DcpExport:
    dtype: str | None = None  # of the parameters; None: as they are stored
    naming: str = HUGGING_FACE  # names of parameters
    states: bool = True  # write the optimizer's states, too
    file_bytes: int  # largest file of tensors
    source: Path | None = None  # folder with the run's copies of its model's tokenizer files
    end_of_text: int | None = None  # token


def export_dcp(checkpoint: Checkpoint, run: RunFolder, folder: Path, options: DcpExport) -> list[str]:
    """Writes a checkpoint of a run to `folder` for `torch.distributed.checkpoint`. Returns the file names.

    config.json and the tokenizer's files are written, too. Raises `ModelError` if the folder is not empty or cannot be
    written, or if `naming` has no names for the model's parameters; `CheckpointError` for optimizer states that torch's
    AdamW does not have.
    """
    config = parse_model(checkpoint.facts["model"])
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"{folder} is there and not an empty folder: name a new one")
    check_dense(config)
    if options.naming == TORCHTITAN:
        check_titan(config)
    if options.states:
        _check_states(checkpoint)
    dtype = DTYPES[options.dtype or stored_dtype(checkpoint)]
    facts = token_facts(options.source, config, options.end_of_text)
    ids = {**token_ids(options.source, options.end_of_text), **facts.ids}
    table = published_table(to_table(config), str(dtype).removeprefix("torch."), ids)
    try:
        with folder_atomic(folder) as made:
            writer = DcpWriter(made, options.file_bytes)
            state = _StateDict(writer, config, options, _settings(run, run.step_of(checkpoint)), checkpoint.num_updates)
            for name, stored in _tensors(checkpoint, config, options.states):
                state.add(name, stored)
            if block_specs(config)[-1].tied_to:
                writer.alias(state.path(output_name(config)), of=state.path(next(iter(stored_parts(config)))))
            files = writer.finish()
            others: dict[str, str | bytes] = {CONFIG: json.dumps(table, indent=2, sort_keys=True) + "\n"}
            others |= {**carried_files(options.source, options.end_of_text), **facts.files}
            for name, content in others.items():
                write_atomic(made / name, content)
    except OSError as error:
        raise ModelError(f"cannot write {folder}: {error.strerror or error}") from error
    return sorted([*files, *others])


def stored_dtype(checkpoint: Checkpoint) -> str:
    """The dtype of a checkpoint's parameters: fp32, bf16 or fp64."""
    return checkpoint.stored[0] if checkpoint.stored else "fp32"


def _check_states(checkpoint: Checkpoint) -> None:
    groups = {group for layout in checkpoint.layout.values() for group, _ in layout.values()} - {FROZEN}
    fix = "give --weights-only"
    if lora_of(checkpoint) is not None:
        raise CheckpointError(
            f"{checkpoint.folder} has adapters, which an export folds into the weights; their optimizer states belong "
            f"to no weight: {fix}"
        )
    for group in sorted(groups - {ADAMW}):
        raise CheckpointError(
            f"{checkpoint.folder} has optimizer states of {group}, but only those of adamw are exported: {fix}"
        )


@dataclass(frozen=True, kw_only=True)
class _Stored:
    # A tensor under its Hugging Face name.
    values: dict[str, Tensor]  # by kind: its value and AdamW's moments of it
    decays: bool  # by weight decay


def _tensors(checkpoint: Checkpoint, config: ModelConfig, states: bool) -> Iterator[tuple[str, _Stored]]:
    by_block: dict[str, dict[str, Parts]] = {}
    for name, parts in stored_parts(config).items():
        by_block.setdefault(parts[0][0], {})[name] = parts
    for block, found in _blocks(checkpoint, states):
        for name, parts in by_block.get(block, {}).items():
            kinds = found[parts[0][1]]
            yield (
                name,
                _Stored(
                    values={
                        kind: joined([found[param][kind] for _, param, _, _ in parts], parts[0][3]) for kind in kinds
                    },
                    decays=len(found[parts[0][1]][_VALUE].shape) > 1,
                ),
            )


def _blocks(checkpoint: Checkpoint, states: bool) -> Iterator[tuple[str, dict[str, dict[str, Tensor]]]]:
    # (block, parameter -> kind -> whole tensor in Terrace's layout)
    if not states:
        for block, values in groupby(merged_values(checkpoint), key=lambda each: each[0]):
            yield block, {name: {_VALUE: value} for _, name, value in values}
        return
    for block in checkpoint.layout:
        found = {}
        for name, kinds in checkpoint.read(block).items():
            first = next(iter(kinds))  # the value
            found[name] = {_VALUE: kinds[first]} | {kind: kinds[kind] for kind in _MOMENTS if kind in kinds}
        yield block, found


class _StateDict:
    # Writes tensors under the keys of a program's state dict.
    def __init__(
        self, writer: DcpWriter, config: ModelConfig, options: DcpExport, settings: Mapping[str, Any], step: int
    ):
        self._writer, self._config, self._options = writer, config, options
        self._settings, self._step, self._dtype = settings, torch.tensor(float(step)), options.dtype

    def path(self, name: str) -> tuple[str, ...]:
        own = program_name(name, self._options.naming)
        return (own,) if self._options.naming == TORCHTITAN else ("model", own)

    def add(self, name: str, stored: _Stored) -> None:
        values = {kind: self._ordered(name, value) for kind, value in stored.values.items()}
        value = values.pop(_VALUE)
        self._writer.tensor(self.path(name), value if self._dtype is None else rounded(value, self._dtype, name))
        if not values:
            return
        own = program_name(name, self._options.naming)
        for kind, state in values.items():
            self._writer.tensor((OPTIMIZER, f"state.{own}.{kind}"), state)
        self._writer.tensor((OPTIMIZER, f"state.{own}.step"), self._step)
        for key, setting in self._settings.items():
            # torchtitan has one group, which decays everything.
            if key == "weight_decay" and not stored.decays and self._options.naming == HUGGING_FACE:
                setting = 0.0
            self._writer.object((OPTIMIZER, f"param_groups.{own}.{key}"), setting)

    def _ordered(self, name: str, value: Tensor) -> Tensor:
        return to_titan(value, heads_of(self._config, name)) if self._options.naming == TORCHTITAN else value


def _settings(run: RunFolder, step: int) -> dict[str, Any]:
    # Keys of a parameter group in torch.optim.AdamW, and those that torch's schedulers add. `lr` is the rate of the
    # next step, as after scheduler.step().
    optimizer = run.optimizer
    return {
        "lr": run.rate_after(step),
        "initial_lr": optimizer.lr,
        "betas": (optimizer.beta1, optimizer.beta2),
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "decoupled_weight_decay": True,
    }
