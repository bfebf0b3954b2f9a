"""Roles whose results can be worked out by hand, for tests of calls and runtimes."""

import os
import signal
import time

import torch
import torch.distributed as dist

from terrace.base.errors import DataError
from terrace.launch.world import World
from terrace.rl.calls.call import call
from terrace.rl.calls.layout import RoleLayout
from terrace.rl.values.ragged import Ragged
from terrace.rl.values.rows import Rows


def prompts_of(*lengths: int) -> Rows:
    """Prompts of these lengths, each of the number of its row."""
    texts = tuple(f"row {row}" for row in range(len(lengths)))
    return Rows({"prompts": Ragged.of([torch.full((num,), row) for row, num in enumerate(lengths)]), "texts": texts})


class Scaler:
    """Scales numbers, and names the process in which it ran."""

    def __init__(self, world: World | None, factor: float = 1.0) -> None:
        self.rank, self.num_ranks = (0, 1) if world is None else (world.rank, world.world_size)
        self.factor, self.added = factor, 0.0

    @call(split="data", take="data")
    def generate(self, rows: Rows, longer: int = 1) -> Rows:
        responses = [prompt.repeat(longer) for prompt in rows.ragged("prompts").rows()]
        empty = torch.zeros(0, dtype=torch.int64)
        column = Ragged.of([*responses, empty]).take(torch.arange(len(rows)))
        return Rows({"responses": column, "made_by": torch.full((len(rows),), self.rank)})

    @call(split="data", take="data")
    def score(self, rows: Rows) -> Rows:
        return Rows(
            {"scores": self.factor * rows.ragged("prompts").sums(), "scored_by": torch.full((len(rows),), os.getpid())}
        )

    @call(split="data", take="mean")
    def update(self, rows: Rows) -> dict[str, float]:
        """The mean over rows, and the sum over all ranks."""
        scores = rows.tensor("scores").double()
        total = scores.sum()
        if self.num_ranks > 1:
            dist.all_reduce(total)
        self.added += float(total)
        return {"mean": float(scores.mean()), "total": float(total)}

    @call(take="all")
    def state(self, plus: float = 0.0) -> tuple[int, float]:
        return self.rank, self.added + plus

    @call(take="first")
    def longest(self, rows: Rows) -> int:
        return int(rows.ragged("prompts").lengths.max())

    @call(take="all")
    def pid(self) -> int:
        return os.getpid()

    @call(split="data", take="data")
    def echo(self, rows: Rows) -> Rows:
        return rows

    @call(split="data", take="data")
    def wrong(self, rows: Rows) -> dict[str, float]:
        return {"rows": len(rows)}

    @call(split="data", take="data")
    def change(self, rows: Rows) -> Rows:
        """Changes its rows in place, which a method must not."""
        rows.tensor("scores").zero_()
        return Rows({"zeros": rows.tensor("scores")})

    @call(take="all")
    def fail(self, rank: int, how: str) -> int:
        """Fail on one rank, while the others wait for it."""
        if self.rank == rank:
            _fail(how)
        if self.num_ranks > 1:
            dist.barrier()
        return self.rank

    @call(take="all")
    def num_files(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    @call(take="all")
    def wait_for(self, path: str) -> bool:
        while not os.path.exists(path):
            time.sleep(0.001)
        return True

    @call(take="first")
    def touch(self, path: str) -> None:
        open(path, "w").close()

    def hidden(self) -> None:
        """No call."""


def _fail(how: str) -> None:
    if how == "bug":
        raise KeyError("a reward of the user")
    if how == "input":
        raise DataError("row 3 has no prompt")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stalled":
        time.sleep(600.0)


class Paired(Scaler):
    """Two ranks work on the same rows; the second of each pair answers."""

    @staticmethod
    def layout(num_ranks: int, **_: object) -> RoleLayout:
        pairs = tuple(rank // 2 for rank in range(num_ranks))
        seconds = tuple(range(1, num_ranks, 2))
        return RoleLayout(num_ranks, {"data": pairs}, {"data": seconds})


class Unmakeable:
    """Its constructor fails."""

    def __init__(self, world: World | None) -> None:
        raise DataError("no folder 'models/none'")
