"""Blocks, and operations in them, that the backward recomputes instead of keeping their results.

An entry of `plan.recompute` names blocks, and optionally operations in them:

    layers.*                       whole layers
    layers.*: attention            in every layer softmax(Q K^T) V; queries, keys and values are kept
    layers.*: attention, mlp       and the activation (in a gated MLP, times up); the outputs of gate and up are kept
    layers.*: norms                the two norms on the residual stream; their inputs are kept
    layers.* first 8               the first 8 matching blocks
    layers.* every 2: attention    every second matching block, beginning with the first

Recomputing attention alone is selective recomputation (Korthikanti et al. 2205.05198, section 5). A recomputed
operation keeps only its inputs; its result is dropped even if the following matmul would otherwise keep it. The
entries of a block add up. Only decoder layers (`BlockSpec.attends`) have operations.
"""

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from terrace.base.errors import PlanError, did_you_mean
from terrace.model.operations import Activation, Core, Enter, Mixture, Norm, Operation, Operations

if TYPE_CHECKING:
    from terrace.model.spec import BlockSpec

OPERATIONS = ("attention", "mlp", "norms")
WHOLE = ("block",)  # instead of operations: the whole block, from its input

_SELECTION = re.compile(r"(?P<pattern>.+?)(?: +(?P<which>first|every) +(?P<number>\d+))?")


@dataclass(frozen=True, kw_only=True)
class Recomputation:
    """One parsed entry: blocks that match `pattern`, the `first` of them (0: all), one in `every`."""

    pattern: str
    first: int = 0
    every: int = 1
    operations: tuple[str, ...] = WHOLE

    def selects(self, names: Sequence[str], are_layers: Sequence[bool]) -> list[int]:
        """Indexes of the selected blocks; only decoder layers if the entry names operations."""
        named = [index for index, name in enumerate(names) if fnmatch.fnmatchcase(name, self.pattern)]
        if self.operations != WHOLE:
            named = [index for index in named if are_layers[index]]
        return named[: self.first or None : self.every]


@lru_cache(maxsize=256)
def parse_recomputation(entry: str) -> Recomputation:
    """Parse an entry. Raises `PlanError` if it is malformed."""
    blocks, colon, named = entry.partition(":")
    found = _SELECTION.fullmatch(blocks.strip())
    if found is None or " " in found["pattern"]:  # block names have no spaces, so what follows the pattern is malformed
        raise PlanError(
            f"recompute {entry!r}: an entry is a pattern of block names, then 'first K' or 'every K', then a colon and "
            f"operations ({', '.join(OPERATIONS)}), such as 'layers.* every 2: attention'"
        )
    number = int(found["number"] or 1)
    if number < 1:
        raise PlanError(f"recompute {entry!r}: {found['which']} 0 names no block; give a number of 1 or more")
    operations = tuple(each.strip() for each in named.split(",")) if colon else WHOLE
    for operation in operations if colon else ():
        if operation not in OPERATIONS:
            known = ", ".join(OPERATIONS)
            raise PlanError(f"recompute {entry!r}: {operation!r} is no operation of a layer; give one of {known}")
    first, every = (number if found["which"] == which else default for which, default in (("first", 0), ("every", 1)))
    return Recomputation(pattern=found["pattern"], first=first, every=every, operations=operations)


def recomputed_parts(recompute: Sequence[str], blocks: Sequence["BlockSpec"]) -> tuple[tuple[str, ...], ...]:
    """What each block's backward recomputes: nothing, some of `OPERATIONS` in their order, or `WHOLE`.

    A first block without trainable parameters has no backward, so nothing is recomputed.
    """
    if not recompute:
        return ((),) * len(blocks)
    names, are_layers = tuple(block.name for block in blocks), tuple(block.attends for block in blocks)
    found = _parts(tuple(recompute), names, are_layers)
    return found if blocks[0].num_trainable else ((), *found[1:])


def meant(pattern: str, names: Sequence[str]) -> str:
    """The pattern that may be meant by one that matches no block, as `did_you_mean` says it."""
    # Layers are many and alike, so one pattern stands for all of them.
    kinds = [name.rpartition(".")[0] for name in names]
    known = dict.fromkeys(f"{kind}.*" if kind else name for kind, name in zip(kinds, names, strict=True))
    return did_you_mean(pattern, known)


def operations_in(parts: tuple[str, ...]) -> tuple[str, ...]:
    """The recomputed operations of a block; none if the whole block is recomputed."""
    return () if parts == WHOLE else parts


def operations_named(layer: Operations, name: str) -> Sequence[Operation]:
    """The operations of a layer that `name`, one of `OPERATIONS`, stands for."""
    if name == "attention":
        return layer.of(Core)
    if name == "mlp":
        return [operation for operation in layer.passed if isinstance(operation, Activation)]
    assert name == "norms", f"{name} is no operation of a layer"
    read = {operation.source.name for operation in layer if isinstance(operation, Enter | Mixture)}
    return [norm for norm in layer.of(Norm) if norm.target.name in read]


@lru_cache(maxsize=256)
def _parts(
    recompute: tuple[str, ...], names: tuple[str, ...], are_layers: tuple[bool, ...]
) -> tuple[tuple[str, ...], ...]:
    found: list[set[str]] = [set() for _ in names]
    for entry in map(parse_recomputation, recompute):
        for index in entry.selects(names, are_layers):
            found[index].update(entry.operations)
    return tuple(WHOLE if WHOLE[0] in parts else tuple(each for each in OPERATIONS if each in parts) for parts in found)
