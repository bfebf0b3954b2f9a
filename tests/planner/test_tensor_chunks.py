"""Tensor messages in parts and fused with products in a search: allowed, chosen where shorter, and never unasked."""

import re
import tomllib
from dataclasses import replace

import pytest

from terrace.base.errors import PlanError
from terrace.cluster.presets import load_cluster
from terrace.model.config import parse_model
from terrace.plan.recompute import WHOLE
from terrace.planner.pins import parse_pins
from terrace.planner.products import ProductsFound, find_with
from terrace.planner.space import Space
from terrace.planner.task import Task
from terrace.planner.tensor_chunks import find_cut, take_chunks
from tests.support.planning import Planning, here

__all__ = ["here"]
pytestmark = pytest.mark.timeout(240)
SHAPE = {"hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672}
MODEL = parse_model({"model_type": "llama", "vocab_size": 32000, "num_hidden_layers": 4, **SHAPE})
TASK = Task(model=MODEL, cluster=load_cluster("dgx-h100").resized(1), batch=16, sequence=4096)


def space_of(*pins: str, task: Task = TASK) -> Space:
    return Space(task=task, pins=parse_pins(pins, task.cluster, []))


def search(space: Space) -> ProductsFound:
    return find_with(None, space, {}, [], 3, 100)


def test_the_shortest_of_all_that_are_allowed() -> None:
    """Of eight rows a fused message leaves an eighth, of two a half, and then parts are shorter."""
    for rows, best in ((8, "fused"), (2, 4)):
        found = find_cut([2, "fused", 4], space_of(f"tensor={rows}"), search)
        steps = {value: step for value, step in found.step_s.items() if step is not None}
        assert list(steps) == [1, 2, "fused", 4]
        assert found.value == best == min(steps, key=steps.__getitem__)
        searched = found.products.searched
        for each in searched.found.best:
            assert searched.evaluator.plan(each.candidate).tensor_chunks == best
            # The search and the program that would train say one step.
            assert searched.evaluator.played(each.candidate).step_s == pytest.approx(each.step_s)


def test_never_unasked_and_only_where_a_plan_can_have_it() -> None:
    plain = find_cut([], space_of("tensor=8"), search)
    assert (plain.value, list(plain.step_s)) == (1, [1])
    # Without rows there is nothing to cut, so the steps tie.
    data = find_cut(["fused", 4], space_of("tensor=1"), search)
    assert data.value == 1
    assert len(set(data.step_s.values())) == 1
    # Rows over two tiers share no memory: they send whole messages.
    task = replace(TASK, cluster=load_cluster("gb200-nvl72").resized(1), batch=72)
    spread = find_cut(["fused"], space_of("tensor=8", task=task), search)
    assert spread.value == 1
    assert len(spread.products.searched.found.best[0].candidate.mesh.tiers("rows")) == 2
    assert spread.step_s["fused"] == spread.step_s[1]


def test_pipelines_with_tensor_rows_have_them_too() -> None:
    """Their stages are priced without ranks inside; the program that would train has the same parts."""
    task = replace(TASK, cluster=load_cluster("dgx-h100").resized(2), batch=32)
    found = find_cut([4], space_of("tensor=8", "pipeline=2", task=task), search)
    whole_s, cut_s = found.step_s[1], found.step_s[4]
    assert whole_s is not None
    assert cut_s is not None
    assert cut_s < whole_s
    best = found.products.searched.found.best[0]
    assert found.products.searched.evaluator.plan(best.candidate).tensor_chunks == 4
    assert best.candidate.mesh.total("pipeline") == 2


@pytest.mark.parametrize("operations", [None, ("mlp",)])
def test_beside_them_tensor_ranks_recompute_whole_layers_alone(operations: tuple[str, ...] | None) -> None:
    for value in (4, "fused"):
        again = replace(TASK, tensor_chunks=value, operations=operations).recomputations
        parts = {
            tensor: {
                name
                for one in again.chain(tensor=tensor, context=False, partly=True)
                for name in (*again.values[one].parts, *again.values[one].least)
            }
            for tensor in (False, True)
        }
        assert "mlp" in parts[False]
        assert parts[True] <= {*WHOLE}


REFUSED = [
    ("fused", "lab", "--allow tensor_chunks=fused: only CUDA devices have symmetric memory"),
    ("fusd", "dgx-h100", "--allow tensor_chunks=fusd: give a number of parts from 2 to 64, or 'fused'"),
    ("1", "dgx-h100", "--allow tensor_chunks=1: give a number of parts from 2 to 64"),
    ("65", "dgx-h100", "--allow tensor_chunks=65: give a number"),
]


@pytest.mark.parametrize(("value", "cluster", "words"), REFUSED)
def test_refused(value: str, cluster: str, words: str) -> None:
    task = replace(TASK, cluster=load_cluster(cluster), compute="fp32", batch=16)
    with pytest.raises(PlanError, match=re.escape(words)):
        take_chunks([f"tensor_chunks={value}"], task)


def test_one_device_has_no_tensor_axis() -> None:
    one = load_cluster("dgx-h100").resized(1)
    one = replace(one, tiers=(replace(one.tiers[0], size=1), *one.tiers[1:]))
    with pytest.raises(PlanError, match="has no effect: cluster 'dgx-h100' is one device; leave it out"):
        take_chunks(["tensor_chunks=4"], replace(TASK, cluster=one))


def test_on_the_command_line(here: Planning) -> None:
    """A plan's file says how its messages are cut; the words say the step of each way."""
    words = ("--nodes", "1", "--pin", "tensor=4", "--allow", "tensor_chunks=fused", "--allow", "tensor_chunks=2")
    said = here.say("plan", *words, "--out", "a.toml", cluster="dgx-h100", batch=64)
    assert said.code == 0, said
    used = "allowed and used: tensor_chunks; with tensor messages whole step " in said.out
    assert used or "allowed and not used: tensor_chunks; with tensor messages whole step " in said.out
    with open("a.toml", "rb") as file:
        value = tomllib.load(file)["tensor_chunks"]
    assert value in ((2, "fused") if used else (1,))
    assert here.say("plan", *words[:4], "--out", "b.toml", cluster="dgx-h100", batch=64).code == 0
    with open("b.toml", "rb") as file:
        assert tomllib.load(file)["tensor_chunks"] == 1
