"""The shares of members (terrace.plan.members) of every step of a run that deals them anew (`train.follow`).

`deals.jsonl` of the run folder has each deal before the first step that it holds for. A resumed run and `terrace
replay` have the same shares in the same steps, so that their sums are over the same micro-batches.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from terrace.base.errors import CheckpointError, ConfigError
from terrace.base.files import write_atomic
from terrace.base.fitting import parse_table
from terrace.base.foreign import read_lines
from terrace.base.schema import load
from terrace.base.sealed import sealed_json

DEALS = "deals.jsonl"
Shares = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Dealt:
    """Shares that hold from a step on; `step` is the number of steps done before it.

    `predicted_s` are the predicted seconds of a step on the speeds that were measured; 0 for the first shares.
    """

    step: int
    shares: tuple[int, ...]
    predicted_s: float = 0.0


class Deals:
    """The shares of every step: `given` up to the first of `dealt`, which ascend by step."""

    def __init__(self, given: Shares, dealt: Sequence[Dealt] = ()) -> None:
        self.given, self.dealt = given, list(dealt)

    def at(self, step: int) -> Shares:
        """The shares of step `step`, counted from 0. A thread may ask while another adds later steps."""
        return next((each.shares for each in reversed(self.dealt) if each.step <= step), self.given)

    def add(self, dealt: Dealt) -> None:
        """Adds shares of later steps."""
        self.dealt += [] if self.dealt else [Dealt(step=0, shares=self.given)]
        self.dealt.append(dealt)

    def write(self, folder: Path) -> None:
        """Writes `deals.jsonl` of a run folder. Raises `OSError`."""
        write_atomic(folder / DEALS, "".join(sealed_json(json.dumps(asdict(each))) for each in self.dealt))


def read_deals(folder: Path) -> tuple[Dealt, ...]:
    """What a run has dealt, in order; empty for a run that never dealt anew.

    Raises `CheckpointError` for a damaged file, without which the run's numbers cannot be repeated.
    """
    path = folder / DEALS
    try:
        found = (
            tuple(load(Dealt, parse_table(line), DEALS) for line in read_lines(path, folder)) if path.exists() else ()
        )
        if any(later.step <= dealt.step for dealt, later in pairwise(found)) or any(not each.shares for each in found):
            raise ValueError("its steps do not ascend, or one names no shares")
    except (OSError, ValueError, ConfigError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(
            f"{path} says which shares the members of the run had, and cannot be read ({why}): put a copy back, or "
            "delete it to begin with plan.shares, which sums the same rows in another order"
        ) from error
    return found


def deals_to_resume(folder: Path, step: int, earlier: Mapping[str, Any], given: Shares) -> tuple[Dealt, ...]:
    """The deals of a run in `folder` that is resumed after `step` steps, with `given` as plan.shares.

    `earlier` is the configuration of the run before.

    Shares that the user changes hold from that step on, in place of what was dealt later. Raises as `read_deals` does,
    and `CheckpointError` for shares of another run.
    """
    found, before = read_deals(folder), tuple(earlier.get("plan", {}).get("shares", ()))
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
