"""Layers are measured as runs have them: on CUDA compiled, and where that does not work a line says so."""

import pytest
import torch
from torch._dynamo.utils import counters

from terrace.probe import compute
from terrace.probe.compute import COMPILES_BY, measure_layers
from terrace.probe.timing import Stopwatch

WATCH = Stopwatch(1, torch.device("cpu"))
FLOPS_PER_S = 1e9


@pytest.mark.parametrize("backend", [None, "eager"])
def test_layers_are_compiled_each_for_its_own_sizes(backend: str | None) -> None:
    counters.clear()
    said = list[str]()
    samples, host_s = measure_layers(WATCH, FLOPS_PER_S, 2.0, said.append, backend)
    assert host_s > 0
    assert all(sample.forward_s > 0 and sample.backward_s > 0 for sample in samples)
    if backend is None:
        assert said == ["layers"]
        assert not counters["frames"]
    else:
        assert said[0] == "layers, compiled"
        assert len(said) == 1 + len(samples), "the watchdog hears of each"
        # The trial and the smallest layer, too; a graph for any sizes would serve several.
        assert counters["frames"]["ok"] == counters["stats"]["unique_graphs"] == 2 + len(samples)
        assert not counters["graph_break"]
        assert not counters["unimplemented"]


def test_where_nothing_can_be_compiled_a_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert COMPILES_BY == {"cpu": None, "cuda": "inductor"}, "as `train.compile` is by default"
    monkeypatch.setattr(compute, "_NUM_LAYERS", 1)
    said = list[str]()
    samples, _ = measure_layers(WATCH, FLOPS_PER_S, 0.5, said.append, "no-such-backend")
    assert samples
    assert said[0] == "layers, compiled"
    assert said[1].startswith("layers that are not compiled: torch.compile does not work here (InvalidBackend: ")
