"""The tensor axis at run time: single-device blocks, cut over ranks from outside."""

from terrace.runtime.tensor.apply import Objective, make_axis, parallelise, slice_value
from terrace.runtime.tensor.modules import TensorAxis

__all__ = ["Objective", "TensorAxis", "make_axis", "parallelise", "slice_value"]
