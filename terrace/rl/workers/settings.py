"""The settings of a role's engine."""

from dataclasses import dataclass, field

from terrace.cluster.cluster import Cluster
from terrace.model.config import ModelConfig
from terrace.plan.plan import Plan
from terrace.runtime.settings import OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Arguments of a role's engine: `num_micros` micro-batches per step and data rank, `sequence` labels per row.

    `weights` is a Hugging Face folder or a checkpoint; empty means initialisation from `seed`.
    """

    model: ModelConfig
    cluster: Cluster
    plan: Plan
    num_micros: int
    sequence: int
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    weights: str = ""
    seed: int = 0
