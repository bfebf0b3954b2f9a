"""Projections of matrices into small spaces (terrace.plan.projected has their formulas)."""

from terrace.plan.update import GALORE
from terrace.runtime.projections.galore import Galore
from terrace.runtime.projections.interface import Projection
from terrace.runtime.projections.lsp import Lsp
from terrace.runtime.settings import OptimizerConfig

__all__ = ["Projection", "projection_of"]


def projection_of(config: OptimizerConfig) -> Projection:
    if config.name == GALORE:
        return Galore(config.rank)
    return Lsp(config.rank, config.density, config.alpha)
