"""A rank's readings after every step, in addition to the result of the step."""

import resource
import sys
import time
from collections import defaultdict
from typing import Any

import torch

from terrace.runtime.engine import Engine
from terrace.train.utilisation import Utilisation


class Gauges:
    """Reads the engine's counters; measures nothing by itself."""

    def __init__(self, engine: Engine, used: Utilisation) -> None:
        self._engine, self._used = engine, used
        self._before: dict[str, int] = {}
        self._sent()

    def read(self, num_tokens: int, step_s: float) -> dict[str, Any]:
        """Fields of a `StepRecord` for the step that has just ended."""
        return {
            "tokens_per_s_per_device": num_tokens / step_s / self._used.num_devices,
            "mfu": self._used.mfu(step_s),
            "hfu": self._used.hfu(step_s),
            "sent_bytes": self._sent(),
            "memory_bytes": self._engine.comm.meter.peak(),
            "peak_memory_bytes": self._peak(),
            "time": time.time(),
        }

    def _sent(self) -> dict[str, int]:
        total: dict[str, int] = defaultdict(int)
        for (_, tier), size in self._engine.comm.ledger.total().items():
            total[tier] += size
        # The ledger counts from the start; a record has the bytes since the line before.
        new = {tier: total[tier] - self._before.get(tier, 0) for tier in self._engine.program.layout.tiers}
        self._before = dict(total)
        return {tier: size for tier, size in new.items() if size}

    def _peak(self) -> dict[str, int]:
        device = self._engine.device
        if device.type == "cuda":
            return {
                "allocated": torch.cuda.max_memory_allocated(device),
                "reserved": torch.cuda.max_memory_reserved(device),
            }
        unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss: getrusage(2)
        return {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
