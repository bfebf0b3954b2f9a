"""Blocks through torch.compile, whole and in parts: the same numbers while parameters are freed and gathered."""

import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from terrace.base.errors import ConfigError, TrainingError
from terrace.cluster.cluster import Cluster
from terrace.launch.start import LocalPool
from terrace.launch.world import World
from terrace.model import attention
from terrace.program.lowering import build_stages
from terrace.runtime import compiled
from terrace.train import prepare
from terrace.train.resolve import resolve
from tests.support.nightly import nightly
from tests.support.parity import Case, Outcome, check, exact, run, train
from tests.support.tiny_runs import environment, one_line, write_run
from tests.support.toys import MODELS, cluster_of

MODEL = "llama tied"


def train_compiled(world: World, cluster: Cluster, cases: Sequence[Case]) -> list[Outcome]:
    """As `train`, by torch's compiler up to code generation, which takes seconds for every rank."""

    def compile_blocks(modules: Iterable[nn.Module]) -> None:
        for module in modules:
            module.compile(backend="aot_eager", fullgraph=True)

    def compile_parts(modules: Iterable[nn.Module]) -> None:
        assert compiled.compile_parts(modules, backend="aot_eager"), "nothing to compile"

    with (
        patch("terrace.runtime.engine.compile_blocks", compile_blocks),
        patch("terrace.runtime.engine.compile_parts", compile_parts),
    ):
        outcomes = train(world, cluster, cases)
    assert counters["stats"]["unique_graphs"] > 0
    torch.compiler.reset()
    return outcomes


@pytest.mark.parametrize(("name", "again"), [("zero3", ("block.1",)), *nightly(("zero3", ()), ("ddp", ("block.1",)))])
def test_compiled_blocks_equal_one_process(pool: LocalPool, name: str, again: tuple[str, ...]) -> None:
    """What ddp does with compiled blocks zero3 does, too, beside freeing and gathering their parameters."""
    cluster = cluster_of(1, 2)
    plan = exact(name, cluster, recompute=again)
    check(pool, cluster, [Case(plan, num_micros=2, model=MODEL, compiled=True)], train_compiled)


def in_parts(cluster: Cluster) -> dict[str, tuple[str, dict[str, object]]]:
    """Plans on four ranks whose blocks are compiled in parts: reason, model and changes of the plan."""
    inside = {"node": {"data": 4}}
    return {
        "tensor axis": ("llama tied", {"mapping": {"node": {"tensor": 2, "data": 2}}}),
        "attend together": ("llama tied", {"mapping": {"node": {"context": 2, "data": 2}}}),
        "an expert": ("mixture, grouped", {"mapping": inside}),
        "recompute": ("llama tied", {"recompute": ("*.1: mlp, norms",), "mapping": inside}),
        "two parts": ("deep llama tied", {"mapping": {"node": {"pipeline": 4}}, "schedule": "zb-h1"}),
    }


@pytest.mark.nightly  # compiling takes a minute
def test_blocks_in_parts_equal_one_process(pool: LocalPool) -> None:
    cluster, cases = cluster_of(1, 4), list[Case]()
    for why, (model, changes) in in_parts(cluster).items():
        plan, micros = exact("zero3" if "schedule" not in changes else "ddp", cluster, **changes), 4
        programs = build_stages(cluster, plan, MODELS[model].declared, micros, 8)
        assert why in compiled.why_parts(programs)
        assert compiled.compiles_words(programs).startswith("torch.compile: the parts between products, since ")
        cases.append(Case(plan, num_micros=micros, model=model, compiled=True))
    check(pool, cluster, cases, train_compiled)


def test_operations_that_are_recomputed_have_the_bits_of_compiled_ones_that_are_not(pool: LocalPool) -> None:
    cluster = cluster_of(1)
    plans = [exact("ddp", cluster, recompute=each) for each in ((), ("*.1: mlp, norms",))]
    kept, again = (
        outcome
        for (outcome,) in run(pool, cluster, [Case(plan, model=MODEL, compiled=True) for plan in plans], train_in_parts)
    )
    assert (again.losses, again.norms) == (kept.losses, kept.norms)
    assert torch.equal(again.parameters, kept.parameters)


def train_in_parts(world: World, cluster: Cluster, cases: Sequence[Case]) -> list[Outcome]:
    """As `train_compiled`, in parts whatever the plan."""
    with patch("terrace.runtime.engine.why_parts", lambda *_: "a test"):
        return train_compiled(world, cluster, cases)


def test_parts_of_all_layers_are_few_graphs_of_one_engine() -> None:
    torch.compiler.reset()
    model = MODELS["deep llama tied"]
    first, second = (model.blocks(torch.float64) for _ in range(2))
    number = compiled.compile_parts(first, backend="aot_eager")
    before = counters["stats"]["unique_graphs"]
    for blocks in (first, second):
        x = torch.arange(16).view(2, 8) % 7
        for block in blocks:
            x = block(x)
        x.sum().backward()  # type: ignore[no-untyped-call]
    # A norm, a gated activation, and a turn of queries and keys.
    assert counters["stats"]["unique_graphs"] - before <= 4 < number
    assert not any(
        "to_gradient" in vars(block) and hasattr(block.to_gradient, "_torchdynamo_orig_callable") for block in second
    )
    torch.compiler.reset()


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


def test_whole_blocks_are_compiled_where_a_plan_lets_them() -> None:
    cluster, specs = cluster_of(1, 4), MODELS["deep llama tied"].declared
    plan = exact("ddp", cluster, mapping={"node": {"pipeline": 4}}, schedule="1f1b")
    programs = build_stages(cluster, plan, specs, 4, 8)
    assert compiled.why_parts(programs) == ""
    assert compiled.compiles_words(programs) == "torch.compile: whole blocks"


@pytest.mark.parametrize(
    ("asked", "kind", "works", "found"),
    [
        (None, "cpu", True, False),
        (False, "cuda", True, False),
        (True, "cpu", True, True),
        (None, "cuda", True, True),
        (None, "cuda", False, False),
        (True, "cuda", False, None),
    ],
)
def test_a_run_compiles_on_cuda_or_where_it_is_asked_to(
    asked: bool | None, kind: str, works: bool, found: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_compiler(device: torch.device) -> None:
        assert device.type == kind
        if not works:
            raise ConfigError("no compiler")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: kind == "cuda")
    monkeypatch.setattr(prepare, "check_compiler", check_compiler)
    run = resolve(None, {}, {})
    assert run.train.compile is None
    run = replace(run, train=replace(run.train, compile=asked))
    if found is None:
        with pytest.raises(ConfigError, match="no compiler"):
            prepare.compiles(run)
    else:
        assert prepare.compiles(run) is found


def test_a_machine_that_cannot_compile_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(function: object) -> object:
        raise RuntimeError("no compiler found\nand more")

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.raises(ConfigError, match=r"RuntimeError: no compiler found\): install"):
        compiled.check_compiler(torch.device("cpu"))


def test_a_compiler_that_fails_in_the_first_step_is_named_in_a_line() -> None:
    """Torch's own error, with the command and the linker's output."""
    from torch._inductor.exc import CppCompileError, InductorError

    error = CppCompileError(["/opt/c++", "a.cpp", "-o", "a.so"], "/usr/bin/ld: cannot find -lgomp\ncollect2: error")
    with pytest.raises(TrainingError) as caught, compiled.compiler_named():
        raise InductorError(error, None) from error
    said = str(caught.value)
    assert "(/opt/c++ printed: /usr/bin/ld: cannot find -lgomp)" in said
    assert said.endswith("or give --train.compile false")
    assert "\n" not in said
    with pytest.raises(ZeroDivisionError), compiled.compiler_named():  # all others stay as they are
        raise ZeroDivisionError


@pytest.mark.nightly
def test_a_run_whose_linker_fails_ends_in_a_line(tmp_path: Path) -> None:
    linker = tmp_path / "c++"
    linker.write_text(
        '#!/bin/sh\ncase "$*" in *--version*) exec g++ "$@";; esac\necho "ld: cannot find -lgomp" >&2\nexit 1\n'
    )
    linker.chmod(0o755)
    config = write_run(tmp_path, 1, steps=2)
    own = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "CXX": str(linker)}
    words = ["train", "--config", str(config), "--train.compile", "true", "--folder", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-m", "terrace", *words], env=environment() | own, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    said = one_line(done.stderr)
    assert f"{linker} printed: ld: cannot find -lgomp" in said
    assert "or give --train.compile false" in said
    assert not (tmp_path / "run").exists()
