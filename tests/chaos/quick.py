"""Imported by the fork server of the campaign's commands: a short sample at the end of a run, and a clock that jumps.

A module of its own, so that importing the campaign changes nothing.
"""

import random
import time
from importlib import import_module

from terrace.train import sample

_DAY_S = 86400.0
_now_s = time.time


def _jumping() -> float:
    return _now_s() + random.uniform(-_DAY_S, _DAY_S)


sample._SAMPLE_TOKENS = 1
time.time = _jumping
import_module("tests.support.warm")
