"""The simulator: the very program that the runtime executes, priced and played forward in time."""

from terrace.simulate.cost import Costs, step_costs
from terrace.simulate.events import simulate
from terrace.simulate.work import Work

__all__ = ["Costs", "Work", "simulate", "step_costs"]
