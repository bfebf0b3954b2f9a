"""Planner: searches for the plan with the shortest predicted step for a model, a cluster and a batch, with reasons."""

from terrace.planner.evaluate import Estimate, Evaluator
from terrace.planner.explain import Verdict, preset_verdicts, reasons
from terrace.planner.pins import Pins, parse_axes, parse_pins
from terrace.planner.scaling import Point, curve
from terrace.planner.search import Found, Search, find, runs_today
from terrace.planner.space import Space
from terrace.planner.task import Choice, Placement, Task, plan_of

__all__ = [
    "Choice",
    "Estimate",
    "Evaluator",
    "Found",
    "Pins",
    "Placement",
    "Point",
    "Search",
    "Space",
    "Task",
    "Verdict",
    "curve",
    "find",
    "parse_axes",
    "parse_pins",
    "plan_of",
    "preset_verdicts",
    "reasons",
    "runs_today",
]
