"""What a run that follows its cluster (`train.follow`) has in every step: shares of members, or formats between them.

`deals.jsonl` of the run folder has each deal before the first step that it holds for. A resumed run and `terrace
replay` have the same shares in the same steps, so that their sums are over the same micro-batches, and the same formats
of messages between the stages of a pipeline (terrace.plan.members), so that these round alike.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from terrace.base.errors import CheckpointError, ConfigError
from terrace.base.files import write_atomic
from terrace.base.fitting import parse_table
from terrace.base.foreign import read_lines
from terrace.base.schema import load
from terrace.base.sealed import sealed_json

DEALS = "deals.jsonl"
Shares = tuple[int, ...]
Formats = Mapping[str, tuple[str, ...]]
_NONE: Formats = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Dealt:
    """Shares, or formats by message class and boundary, that hold from a step on; `step` is the number of steps done
    before it.

    `predicted_s` are the predicted seconds of a step on what was measured; 0 for the first shares or formats.
    """

    step: int
    shares: tuple[int, ...] = ()
    predicted_s: float = 0.0
    formats: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class Deals:
    """The shares of every step, and the formats: `given` and `formats` up to the first of `dealt`, which ascend by
    step.
    """

    def __init__(self, given: Shares, dealt: Sequence[Dealt] = (), formats: Formats = _NONE) -> None:
        self.given, self.dealt, self.formats = given, list(dealt), formats

    def at(self, step: int) -> Shares:
        """The shares of step `step`, counted from 0. A thread may ask while another adds later steps."""
        return next((each.shares for each in reversed(self.dealt) if each.step <= step), self.given)

    def formats_at(self, step: int) -> Formats:
        """The formats of step `step`, counted from 0."""
        return next((each.formats for each in reversed(self.dealt) if each.step <= step), self.formats)

    def add(self, dealt: Dealt) -> None:
        self.dealt += [] if self.dealt else [Dealt(step=0, shares=self.given, formats=self.formats)]
        self.dealt.append(dealt)

    def write(self, folder: Path) -> None:
        """Writes `deals.jsonl` of a run folder. Raises `OSError`."""
        write_atomic(folder / DEALS, "".join(sealed_json(json.dumps(_plain(each))) for each in self.dealt))


def _plain(dealt: Dealt) -> dict[str, Any]:
    own = {"step": dealt.step, "predicted_s": dealt.predicted_s, "shares": dealt.shares, "formats": dict(dealt.formats)}
    return {name: value for name, value in own.items() if value or name not in ("shares", "formats")}


def read_deals(folder: Path) -> tuple[Dealt, ...]:
    """What a run has dealt, in order; empty for a run that never dealt anew.

    Raises `CheckpointError` for a damaged file, without which the run's numbers cannot be repeated.
    """
    path = folder / DEALS
    try:
        found = (
            tuple(load(Dealt, parse_table(line), DEALS) for line in read_lines(path, folder)) if path.exists() else ()
        )
        if any(later.step <= dealt.step for dealt, later in pairwise(found)) or any(
            not each.shares and not each.formats for each in found
        ):
            raise ValueError("its steps do not ascend, or one names no shares and no formats")
    except (OSError, ValueError, ConfigError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(
            f"{path} says which shares and formats the members of the run had, and cannot be read ({why}): put a copy "
            "back, or delete it to begin with those of the plan, which sums or rounds otherwise"
        ) from error
    return found


def deals_to_resume(folder: Path, step: int, earlier: Mapping[str, Any], given: Shares) -> tuple[Dealt, ...]:
    """The deals of a run in `folder` that is resumed after `step` steps, with `given` as plan.shares.

    `earlier` is the configuration of the run before.

    Shares that the user changes hold from that step on, in place of what was dealt later. Raises as `read_deals` does,
    and `CheckpointError` for shares of another run.
    """
    found = tuple(each for each in read_deals(folder) if each.shares)
    before = tuple(earlier.get("plan", {}).get("shares", ()))
    if before == given:
        for each in found:
            if (len(each.shares), sum(each.shares)) != (len(given), sum(given)):
                raise CheckpointError(
                    f"{folder / DEALS} has shares = {list(each.shares)}, of other members or micro-batches than "
                    f"plan.shares = {list(given)}: put the run's own file back, or delete it to begin with plan.shares"
                )
        return found
    # With another number of members or micro-batches no earlier deal can be repeated.
    if not step or (len(before), sum(before)) != (len(given), sum(given)):
        return ()
    kept = tuple(each for each in found if each.step < step) or (Dealt(step=0, shares=before),)
    return (*kept, Dealt(step=step, shares=given))


def formats_to_resume(folder: Path, step: int, before: Formats, given: Formats) -> tuple[Dealt, ...]:
    """As `deals_to_resume`, of a pipeline whose boundaries had the formats `before`, and have those `given`."""
    found = tuple(each for each in read_deals(folder) if each.formats)
    numbers = {len(names) for each in (given, *(each.formats for each in found)) for names in each.values()}
    if not found or len(numbers) > 1:
        # With another number of members no earlier deal can be repeated.
        return ()
    if dict(before) == dict(given):
        return found
    return (*(each for each in found if each.step < step), Dealt(step=step, formats=given)) if step else ()
