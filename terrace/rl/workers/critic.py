"""The critic: an engine with a scalar head, which predicts the value of the state before each token."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from terrace.checkpoint.reading import Checkpoint, resume
from terrace.launch.world import World
from terrace.rl.algorithms.aggregation import Aggregation
from terrace.rl.algorithms.batches import WEIGHTS, values_objective_of
from terrace.rl.algorithms.losses import value_loss
from terrace.rl.algorithms.metrics import Sums
from terrace.rl.calls.call import call
from terrace.rl.calls.layout import RoleLayout
from terrace.rl.values.ragged import Ragged
from terrace.rl.values.rows import Rows
from terrace.rl.workers.engine_rows import TEXTS, device_of, engine_of, means_of, own_rows, saved, step_batches, values
from terrace.rl.workers.settings import EngineSettings

_COLUMNS = ("old_values", "returns")


class Critic:
    """The worker of a critic; `value_clip` clips values around those before the update (`losses.value_loss`)."""

    def __init__(self, world: World | None, *, settings: EngineSettings, value_clip: float | None = None) -> None:
        """`settings.model` has a scalar head. Raises as the engine does."""
        self._settings, self._sums = settings, Sums()

        def loss(found: Ragged, columns: Mapping[str, Tensor]) -> Tensor:
            old, returns, weights = (columns[name].to(found.values.dtype) for name in (*_COLUMNS, WEIGHTS))
            self._sums.add("tokens", len(old))
            if value_clip is not None:
                self._sums.add("vf_clipfrac", ((found.values - old).abs() > value_clip).sum())
            return value_loss(found.values, old, returns, weights, clip=value_clip)

        self._engine = engine_of(world, settings, values_objective_of(loss), device_of(settings))

    @classmethod
    def layout(cls, num_ranks: int, *, settings: EngineSettings, **_: object) -> RoleLayout:
        return RoleLayout.of(settings.cluster, settings.plan)

    @call(split="data", take="data", balance="rows", reads=TEXTS)
    def values(self, rows: Rows) -> Rows:
        """`values` before each token of the responses."""
        return Rows({"values": values(self._engine, rows)})

    # Not split by tokens, as in `Actor.update`: a step needs equally many rows on all data ranks.
    @call()
    def update(self, rows: Rows, *, lr: float) -> dict[str, float]:
        """Train one step on a mini-batch with columns `old_values` and `returns`. Returns the critic's metrics."""
        self._sums.clear()
        (step,) = step_batches(self._engine, own_rows(self._engine, rows), _COLUMNS, Aggregation("token-mean"))
        result = self._engine.step([batch for _, batch in step], lr)
        return {
            "vf_loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            **means_of(self._engine, self._sums.read()),
        }

    @call()
    def save(self, folder: Path, step: int, facts: Mapping[str, Any], keep: int) -> str:
        """Write a checkpoint with `facts` and keep the newest `keep` (None: all). Returns the checkpoint's folder."""
        return saved(self._engine, self._settings, folder, step, facts, keep)

    @call()
    def resume(self, folder: Path) -> None:
        resume(self._engine, Checkpoint(folder))
