"""The simulator: the very program that the runtime executes, priced and played forward in time."""

from terrace.simulate.cost import Costs, step_costs
from terrace.simulate.events import simulate

__all__ = ["Costs", "simulate", "step_costs"]
