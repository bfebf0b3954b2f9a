"""On-disk format of a checkpoint, which does not depend on the plan.

A checkpoint is a folder `step-00000100` with a `manifest.json` and safetensors files. Each file holds pieces: boxes
of whole parameters, as tensors of the box's shape named `block/parameter[0:4,8:16]/kind`. So any rank of any plan
finds its elements by intersecting boxes. The group of a parameter determines its kinds of state
(terrace.runtime.states); the first kind is its value. A frozen matrix held in codes is an array of the bytes of its
records, and its constants are stored beside it. Padding is not stored, and no element is stored twice. The manifest has

    groups   group -> kinds of state
    layout   block -> parameter -> [group, shape of the whole parameter]
    files    file -> its size, its CRC-32 and its pieces: block -> parameter -> boxes
    loss_scale  in fp16: its table (terrace.runtime.loss_scale)
    islands  with islands: their number and their cycle (terrace.checkpoint.islands)

and, in `checksum`, the SHA-256 of its other entries. A CRC-32 detects every damage within 32 bits and misses any
other with probability 2^-32; it guards against bad disks and truncated copies, not against an attacker, and costs
less than half of SHA-256. A checkpoint is written into a hidden folder next to its final one, synced, and renamed, so
it exists completely or not at all.

Format 2, which can still be read, has SHA-256 checksums of files and no optimizer other than AdamW.
"""

import hashlib
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from terrace.base.boxes import Box, to_text
from terrace.base.errors import CheckpointError
from terrace.base.foreign import open_file
from terrace.base.parsing import parse_json
from terrace.checkpoint.islands import ONE, Islands
from terrace.model.base_formats import BASE_FORMATS, CONSTANT_BYTES
from terrace.model.spec import BlockSpec
from terrace.plan.counts import choices_bytes
from terrace.plan.dims import is_layer
from terrace.plan.plan import Plan
from terrace.plan.projected import numbers_of
from terrace.plan.slices import tables_of
from terrace.plan.state_formats import stored_bytes
from terrace.plan.update import parse_update
from terrace.plan.wire import FORMATS
from terrace.runtime.settings import OptimizerConfig
from terrace.runtime.states import (
    ADAMW,
    CONSTANTS,
    FROZEN,
    KINDS,
    OUTER_MOMENTUM,
    UNTRAINED,
    constants_name,
    group_of,
    is_trained,
    kinds_of,
)

FORMAT, FORMAT_2 = 3, 2
LOSS_SCALE, ROW_WISE = "loss_scale", "row_wise"  # keys of a manifest
_GROUPS_2 = {"trainable": ADAMW, "frozen": FROZEN}
MAX_STEPS = 10**12  # no run comes near
_READ_BYTES = 4 << 20
_FP32_BYTES = 4

Group = str
BlockLayout = dict[str, tuple[Group, list[int]]]  # parameter -> group, shape
Files = dict[str, dict[str, Any]]  # file -> its entry in the manifest


def folder_of(run_folder: Path, step: int) -> Path:
    return run_folder / "checkpoints" / folder_name(step)


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def is_checkpoint_name(name: str) -> bool:
    return re.fullmatch(r"step-\d{1,18}", name) is not None


def complete(checkpoints: Path) -> list[Path]:
    """Complete checkpoints in a folder, oldest first."""
    if not checkpoints.is_dir():
        return []
    found = [path for path in checkpoints.iterdir() if is_checkpoint_name(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def latest(run_folder: Path) -> Path | None:
    found = complete(run_folder / "checkpoints")
    return found[-1] if found else None


def checkpoint_bytes(
    blocks: Sequence[BlockSpec], optimizer: OptimizerConfig, plan: Plan, *, num_islands: int = 1
) -> int:
    """Size of a checkpoint on disk, without headers and islands' figures. `blocks` are whole."""
    compute, master, summed = (FORMATS[each].element_bytes for each in (plan.compute, plan.master, plan.sums))
    rule = parse_update(plan.update)
    state, outer, total = stored_bytes(plan.optimizer_states or plan.sums, 1), plan.outer, 0
    for index, block in enumerate(blocks):
        for param in block.params:
            group = group_of(param, optimizer, is_layer(blocks, index))
            if param.code:
                total += BASE_FORMATS[param.code].coded_bytes(param.numel) + param.num_constants * CONSTANT_BYTES
                continue
            each = master + (len(kinds_of(group)) - 1) * state
            if group == FROZEN:
                each = max(compute, _FP32_BYTES) if param.is_expert_bias else compute
            else:
                # The momentum; each island's kinds, start and message. The anchor is the model's.
                own = 2 * (outer.delay > 0)
                each = num_islands * (each + own * summed) + (outer.num_slices - own) * summed
            total += param.numel * each
            if group == optimizer.group and rule.projects:
                total += param.num_parts * numbers_of(rule, param.part_shape) * summed
        total += choices_bytes(block)
    return total


def stored_as(plan: Plan) -> list[str]:
    """Formats of a plan's parameters and optimizer states, for the manifest."""
    return [plan.master, plan.optimizer_states or plan.sums]


def stored_note(where: str, stored: Sequence[str], plan: Plan) -> str:
    """A note if a run's plan stores states in other formats than the checkpoint did, else ""."""
    own = stored_as(plan)
    if not stored or list(stored) == own:
        return ""
    theirs, ours = (f"parameters in {each[0]} and optimizer states in {each[1]}" for each in (stored, own))
    return f"{where} was saved with {theirs}, and goes on with {ours}"


def is_row_wise(plan: Plan, blocks: Sequence[BlockSpec]) -> bool:
    """Whether a run updates only the used rows of its table, as docs/tables.md has it."""
    return bool(plan.vocabulary) and any(is_trained(table) for table in tables_of(blocks[0]))


def form_of(plan: Plan, blocks: Sequence[BlockSpec]) -> dict[str, Any]:
    """The keys of a manifest that say how a plan stores and updates its states. `blocks` are whole."""
    return {"stored": stored_as(plan), **({ROW_WISE: True} if is_row_wise(plan, blocks) else {})}


def row_wise_note(where: str, theirs: bool, ours: bool) -> str:
    """A note if a run updates used rows alone and the checkpoint's run updated all rows, or the reverse; else ""."""
    if theirs == ours:
        return ""
    before, now = ("the used rows" if each else "all rows" for each in (theirs, ours))
    return (
        f"{where} was saved with updates of {before} of its table, and goes on with updates of {now} (plan.vocabulary)"
    )


def block_layouts(blocks: Sequence[BlockSpec], optimizer: OptimizerConfig) -> dict[str, BlockLayout]:
    """Group and shape of every parameter, and of the constants of those held in codes. `blocks` are whole."""
    return {
        block.name: {
            param.name: (group_of(param, optimizer, is_layer(blocks, index)), list(param.stored.shape))
            for param in block.params
        }
        | {constants_name(param.name): (CONSTANTS, [param.num_constants]) for param in block.params if param.code}
        for index, block in enumerate(blocks)
    }


def tensor_name(block: str, parameter: str, box: Box, kind: str) -> str:
    return f"{block}/{parameter}[{to_text(box)}]/{kind}"


def manifest_of(
    blocks: Sequence[BlockSpec],
    optimizer: OptimizerConfig,
    step: int,
    num_updates: int,
    facts: Mapping[str, Any],
    files: Files,
    islands: Islands = ONE,
) -> dict[str, Any]:
    """Manifest of a model's checkpoint; `blocks` are whole."""
    more = (OUTER_MOMENTUM,) if islands.momentum else ()
    layout = block_layouts(blocks, optimizer)
    used = {group for parameters in layout.values() for group, _ in parameters.values()}
    return {
        "format": FORMAT,
        "step": step,
        "num_updates": num_updates,
        "facts": dict(facts),
        "groups": {group: [*kinds_of(group), *(() if group in UNTRAINED else more)] for group in sorted(used)},
        "layout": layout,
        "files": dict(sorted(files.items())),
        **({"islands": islands.table} if islands.table else {}),
    }


def encode(manifest: Mapping[str, Any]) -> str:
    return json.dumps({**manifest, "checksum": _checksum(manifest)}, indent=1)


def decode(text: str) -> dict[str, Any]:
    """Parse a serialized manifest. Raises `ValueError` if it is damaged."""
    manifest = parse_json(text)
    if not isinstance(manifest, dict):
        raise ValueError("it holds no table")
    found = manifest.pop("checksum", None)
    # Unknown formats pass: their error is about the version, not about damage.
    if manifest.get("format") in (FORMAT, FORMAT_2) and found != _checksum(manifest):
        raise ValueError("its checksum differs")
    return _from_format_2(manifest) if manifest.get("format") == FORMAT_2 else manifest


def is_intact(path: Path, entry: Mapping[str, Any]) -> bool:
    """Whether a file matches the checksum of its entry in the manifest. Raises `OSError`."""
    with open_file(path, path.parent) as file:
        # Format 2.
        if "crc32" not in entry:
            return bool(hashlib.file_digest(file, "sha256").hexdigest() == entry["sha256"])
        # In parts, since a file may be larger than the memory left during a run.
        crc = 0
        while chunk := file.read(_READ_BYTES):
            crc = zlib.crc32(chunk, crc)
    return bool(f"{crc:08x}" == entry["crc32"])


def check_model(
    where: Path, theirs: Mapping[str, BlockLayout], blocks: Sequence[BlockSpec], optimizer: OptimizerConfig
) -> None:
    """Raise `CheckpointError` for the first difference between a checkpoint's parameters and those of whole blocks."""
    here = block_layouts(blocks, optimizer)
    # The model's own order first, so that the first difference is the one nearest to the embedding.
    for block in (*here, *theirs):
        stored, wanted = _parameters(theirs.get(block)), _parameters(here.get(block))
        for name in (*wanted, *stored):
            if stored.get(name) != wanted.get(name):
                raise CheckpointError(
                    f"{where} is of another model: {block}.{name} is {stored.get(name, 'absent')} there and "
                    f"{wanted.get(name, 'absent')} here; use the model, optimizer and train.freeze it was saved with"
                )


def _from_format_2(manifest: dict[str, Any]) -> dict[str, Any]:
    layout = {
        block: {name: (_GROUPS_2[group], shape) for name, (group, shape) in parameters.items()}
        for block, parameters in manifest["layout"].items()
    }
    return {**manifest, "groups": {group: list(KINDS[group]) for group in _GROUPS_2.values()}, "layout": layout}


def _parameters(layout: BlockLayout | None) -> dict[str, str]:
    return {name: f"{group} {shape}" for name, (group, shape) in (layout or {}).items()}


def _checksum(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
