"""Rewards from a model: its scalar output at the last token of a response.

The model was trained on pairs by `terrace train` (train.objective = "reward"), or is a transformers
`ForSequenceClassification` with one label.
"""

import torch

from terrace.launch.world import World
from terrace.rl.algorithms.batches import values_objective_of
from terrace.rl.calls.call import call
from terrace.rl.calls.layout import RoleLayout
from terrace.rl.values.ragged import Ragged
from terrace.rl.values.rows import Rows
from terrace.rl.workers.engine_rows import ALL, device_of, engine_of, values
from terrace.rl.workers.settings import EngineSettings


class RewardModel:
    """A worker that computes `column` for responses with a model that has a scalar head.

    `settings.sequence` must be one more than the labels of the longest prompt and response.
    """

    def __init__(self, world: World | None, *, settings: EngineSettings, column: str = "reward") -> None:
        self._column = column
        objective = values_objective_of(lambda found, _: found.values.sum())
        self._engine = engine_of(world, settings, objective, device_of(settings), freeze=ALL)

    @classmethod
    def layout(cls, num_ranks: int, *, settings: EngineSettings, column: str = "reward") -> RoleLayout:
        return RoleLayout.of(settings.cluster, settings.plan)

    @call(split="data", take="data", balance="rows", reads=("prompts", "responses"))
    def rewards(self, rows: Rows) -> Rows:
        """The column, fp32 (R)."""
        responses = rows.ragged("responses")
        # A value belongs to the state before a token, so append a token (any) to read the value after the last one.
        longer = Ragged.of([torch.cat([each, each.new_zeros(1)]) for each in (*responses.rows(), responses.values[:0])])
        asked = Rows({"prompts": rows.ragged("prompts"), "responses": longer.take(torch.arange(len(rows)))})
        found = values(self._engine, asked)
        return Rows({self._column: found.values[found.offsets[1:] - 1].float()})
