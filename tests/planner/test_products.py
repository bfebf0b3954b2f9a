"""Products in 8-bit floats in a search: allowed, chosen where they are faster, and never unasked."""

import tomllib
from dataclasses import replace

import pytest

from terrace.base.errors import PlanError
from terrace.cluster.presets import load_cluster
from terrace.model.config import parse_model
from terrace.model.experts.config import ExpertsConfig
from terrace.plan.validate import validate
from terrace.planner.products import find_with, take_products
from terrace.planner.ranking import TIE
from terrace.planner.search import find
from terrace.planner.space import Space
from terrace.planner.task import Task
from tests.support.planning import Planning, here

__all__ = ["here"]
pytestmark = pytest.mark.timeout(240)
SHAPE = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}
MODEL = parse_model({"model_type": "llama", "vocab_size": 32000, "num_hidden_layers": 4, **SHAPE})


def task_on(name: str, sequence: int = 4096) -> Task:
    return Task(model=MODEL, cluster=load_cluster(name), batch=32, sequence=sequence)


def test_taken_where_faster() -> None:
    task = task_on("dgx-h100")
    products, rest = take_products(["products=fp8:row", "sync=int8"], task)
    assert (products, rest) == ("fp8:row", ["sync=int8"])
    space = Space(task=task)
    found, plain = find_with(products, space, {}, [], 3, 100), find_with(None, space, {}, [], 3, 100)
    assert plain.searched.space.task.products is None
    assert not plain.used
    assert found.used
    assert found.searched.space.task.products == "fp8:row"
    assert found.plain_s == plain.searched.found.best[0].step_s
    assert found.scaled_s == found.searched.found.best[0].step_s < found.plain_s
    for each in found.searched.found.best:  # also those with a pipeline, or tensor ranks
        assert found.searched.evaluator.plan(each.candidate).products == "fp8:row"


def test_plans_of_data_ranks_alone_are_compared_too() -> None:
    """The best of a search in 8 bits is no slower than its best without them is in 8 bits."""
    space = Space(task=task_on("dgx-h100"))
    plain, _ = find(space, 1, 100)
    scaled, evaluator = find(replace(space, task=replace(space.task, products="fp8:row")), 1, 100)
    there = evaluator.played(plain.best[0].candidate)
    assert there.step_s < plain.best[0].step_s
    assert scaled.best[0].step_s <= (1 + TIE) * there.step_s


@pytest.mark.parametrize("products", ["fp8", "fp8:row"])
def test_mixtures_are_searched_with_them(products: str) -> None:
    """Attention, the shared expert and all experts; the plan that is found runs."""
    experts = ExpertsConfig(num_experts=8, per_token=2, intermediate_size=14336)
    task = replace(task_on("dgx-h100"), model=replace(MODEL, experts=experts))
    taken, _ = take_products([f"products={products}"], task)
    found = find_with(taken, Space(task=task), {}, [], 1, 40)
    assert found.scaled_s is not None
    assert found.plain_s is not None
    assert found.used == (found.scaled_s < (1 - TIE) * found.plain_s)
    best = found.searched.found.best[0]
    plan = found.searched.evaluator.plan(best.candidate)
    validate(task.cluster, plan, task.blocks)


def test_held_as_codes_is_not_searched() -> None:
    task = replace(task_on("dgx-h100"), products="fp8", wire={"gather": {"node": "fp8"}})
    with pytest.raises(PlanError, match="not searched; leave the format out, or write 'fp8:128'"):
        find(Space(task=task), 1, 10)


def test_left_where_slower() -> None:
    """Products of few tokens are bound by the bytes that quantising moves."""
    task = task_on("dgx-h100", sequence=32)
    found = find_with("fp8", Space(task=replace(task, batch=16)), {}, [], 1, 50)
    assert not found.used
    assert found.scaled_s is not None
    assert found.plain_s is not None
    assert found.scaled_s > found.plain_s


def test_refused() -> None:
    for texts, cluster, words in (
        (["products=fp8"], "dgx-a100", r"--allow products=fp8: .* has no peak_flops_per_s\.fp8"),
        (["products=int8"], "dgx-h100", "is no format of products"),
        (["products=fp8", "products=fp8:row"], "dgx-h100", "all take as long, so give the one that you want"),
    ):
        with pytest.raises(PlanError, match=words):
            take_products(texts, task_on(cluster))


def test_on_the_command_line(here: Planning) -> None:
    """A plan's file says its products, and a search does not take them unasked."""
    said = here.say("plan", "--allow", "products=fp8", "--out", "a.toml", cluster="dgx-h100", batch=4096)
    assert said.code == 0, said
    text = said.out
    used = "allowed and used: products in fp8: step" in text
    assert used or "allowed and not used: products in fp8: step" in text
    with open("a.toml", "rb") as file:
        assert tomllib.load(file).get("products") == ("fp8" if used else None)
    assert here.say("plan", "--out", "b.toml", cluster="dgx-h100", batch=4096).code == 0
    with open("b.toml", "rb") as file:
        assert "products" not in tomllib.load(file)
