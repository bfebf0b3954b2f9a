"""Blocks through torch.compile: the same numbers while parameters are freed and gathered; what cannot be is refused."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from terrace.base.errors import ConfigError, PlanError
from terrace.cluster.cluster import Cluster
from terrace.launch.start import LocalPool
from terrace.launch.world import World
from terrace.model import attention
from terrace.program.lowering import build_stages
from terrace.runtime import compiled
from tests.support.parity import Case, Outcome, check, exact, train
from tests.support.toys import MODELS, cluster_of

MODEL = "llama tied"


def train_compiled(world: World, cluster: Cluster, cases: Sequence[Case]) -> list[Outcome]:
    """As `train`, by torch's compiler up to code generation, which takes seconds for every rank."""

    def compile_blocks(modules: Sequence[nn.Module]) -> None:
        for module in modules:
            module.compile(backend="aot_eager", fullgraph=True)

    with patch("terrace.runtime.engine.compile_blocks", compile_blocks):
        outcomes = train(world, cluster, cases)
    torch.compiler.reset()
    return outcomes


def test_compiled_blocks_equal_one_process(pool: LocalPool) -> None:
    cluster = cluster_of(1, 2)
    names = ("ddp", "zero3")
    cases = [Case(exact(name, cluster), num_micros=2, model=MODEL, compiled=True) for name in names]
    cases.append(replace(cases[1], plan=replace(cases[1].plan, recompute=("block.1",))))
    check(pool, cluster, cases, train_compiled)


def test_documents_of_another_batch_compile_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention.PerMicroBatch, "get", attention.PerMicroBatch.get)  # as before, in the end
    monkeypatch.setattr(attention, "attend_in_pieces", attention.attend_in_pieces)
    torch.compiler.reset()
    embedding, layer, *_ = MODELS[MODEL].blocks(torch.float64)
    tokens, graphs = torch.arange(16).view(2, 8) % 7, []
    starts = ([0, 3, 8], [0, 8], [0, 1, 6, 8], [0, 5, 6, 7, 8], [0, 2, 8])
    rows = [torch.cat([torch.arange(end - begin) for begin, end in pairwise(each)]) for each in starts]
    of_batches = [torch.stack([rows[index], rows[index // 2]]) for index in range(5)]
    with torch.no_grad():
        expected = [layer(embedding(tokens), positions) for positions in of_batches]
        compiled.compile_blocks([layer], backend="aot_eager")
        for positions, whole in zip(of_batches, expected, strict=True):
            torch.testing.assert_close(layer(embedding(tokens), positions), whole)
            graphs.append(counters["stats"]["unique_graphs"])
    torch.compiler.reset()
    assert graphs[0] > 0
    assert graphs[1:] == graphs[:-1]


def test_parts_of_a_backward_are_not_compiled() -> None:
    cluster, specs = cluster_of(1, 4), MODELS["deep llama tied"].declared
    split = exact("ddp", cluster, mapping={"node": {"pipeline": 4}}, schedule="zb-h1")
    with pytest.raises(PlanError, match="schedule = 'zb-h1'"):
        compiled.check_compiles(build_stages(cluster, split, specs, 4, 8))
    compiled.check_compiles(build_stages(cluster, replace(split, schedule="1f1b"), specs, 4, 8))
    tensor = exact("ddp", cluster, mapping={"node": {"tensor": 2, "data": 2}})
    with pytest.raises(PlanError, match="tensor axis"):
        compiled.check_compiles(build_stages(cluster, tensor, specs, 1, 8))


def test_mixtures_are_not_compiled() -> None:
    cluster = cluster_of(1)
    programs = build_stages(cluster, exact("ddp", cluster), MODELS["mixture, grouped"].declared, 1, 8)
    with pytest.raises(PlanError, match=r"mixture of experts \(layers.1\): .*leave train.compile out"):
        compiled.check_compiles(programs)


def test_operations_that_are_recomputed_are_not_compiled() -> None:
    plan = exact("ddp", cluster_of(1), recompute=("layers.*: mlp",))
    programs = build_stages(cluster_of(1), plan, MODELS[MODEL].declared, 1, 8)
    with pytest.raises(PlanError, match=r"names operations of layers: .*or leave train.compile out"):
        compiled.check_compiles(programs)


def test_a_machine_that_cannot_compile_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(function: object) -> object:
        raise RuntimeError("no compiler found\nand more")

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.raises(ConfigError, match=r"RuntimeError: no compiler found\): install"):
        compiled.check_compiler(torch.device("cpu"))
