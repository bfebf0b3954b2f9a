"""The simulator: the very program that the runtime executes, priced and played forward in time."""

from terrace.simulate.changes import Change, best_change, changes
from terrace.simulate.cost import Costs, step_costs
from terrace.simulate.critical import CriticalPath, critical_path, critical_words, exposed_by_axis, exposed_by_tier
from terrace.simulate.curve import MemoryCurve, memory_curve
from terrace.simulate.events import simulate
from terrace.simulate.recorded import RecordedStep, record_step
from terrace.simulate.recording import Recording, Span, record
from terrace.simulate.stages import StagesStep, record_stages, simulate_stages
from terrace.simulate.step import Prediction, Step, play_whole, predict_step, resolved
from terrace.simulate.work import Work

__all__ = [
    "Change",
    "Costs",
    "CriticalPath",
    "MemoryCurve",
    "Prediction",
    "RecordedStep",
    "Recording",
    "Span",
    "StagesStep",
    "Step",
    "Work",
    "best_change",
    "changes",
    "critical_path",
    "critical_words",
    "exposed_by_axis",
    "exposed_by_tier",
    "memory_curve",
    "play_whole",
    "predict_step",
    "record",
    "record_stages",
    "record_step",
    "resolved",
    "simulate",
    "simulate_stages",
    "step_costs",
]
