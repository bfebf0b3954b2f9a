"""Entries of `recompute`: the blocks and operations that they name, and refusals."""

from dataclasses import replace
from typing import Any

import pytest

from terrace.base.errors import PlanError
from terrace.model.blocks import block_specs
from terrace.model.config import parse_model
from terrace.model.spec import freeze
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.plan.recompute import WHOLE, recomputed_parts
from terrace.plan.validate import validate
from tests.support.toys import MODELS, cluster_of

_SIZES = {"model_type": "llama", "vocab_size": 64, "hidden_size": 8, "intermediate_size": 16}
LLAMA = block_specs(parse_model(_SIZES | {"num_hidden_layers": 7, "num_attention_heads": 4}))
CLUSTER = cluster_of(2, 2)

PARTS: list[tuple[tuple[str, ...], list[tuple[str, ...]]]] = [
    (("*: attention",), [(), *[("attention",)] * 7, ()]),
    (("*: norms, attention",), [(), *[("attention", "norms")] * 7, ()]),
    (("layers.* first 2: mlp",), [(), *[("mlp",)] * 2, *[()] * 6]),
    (("layers.* every 3",), [(), WHOLE, (), (), WHOLE, (), (), WHOLE, ()]),
    (("layers.* first 9",), [(), *[WHOLE] * 7, ()]),
    (("head",), [*[()] * 8, WHOLE]),
    (("embedding",), [WHOLE, *[()] * 8]),
    # Entries add up, and a whole block has all operations.
    (
        ("layers.* every 2: norms", "layers.3: mlp", "layers.0"),
        [(), WHOLE, (), ("norms",), ("mlp",), ("norms",), (), ("norms",), ()],
    ),
]


@pytest.mark.parametrize(("recompute", "parts"), PARTS, ids=str)
def test_operations_of_layers(recompute: tuple[str, ...], parts: list[tuple[str, ...]]) -> None:
    assert list(recomputed_parts(recompute, LLAMA)) == parts
    frozen = freeze(LLAMA, ["embedding.*"])
    assert list(recomputed_parts(recompute, frozen)) == [(), *parts[1:]]  # its backward does not run


REFUSED: list[tuple[dict[str, Any], tuple[str, ...], str]] = [
    ({"mapping": {"node": {"context": 2}}}, ("layers.*: attention",), "its messages would be sent again"),
    ({"mapping": {"node": {"tensor": 2}}}, ("layers.*: norms",), "names norms under a tensor axis"),
    ({"mapping": {"node": {"tensor": 2}}, "tensor_chunks": 2}, ("layers.*: mlp",), "leave tensor_chunks out"),
]


@pytest.mark.parametrize(("changes", "recompute", "said"), REFUSED, ids=str)
def test_operations_that_cannot_be_recomputed_alone(changes: dict[str, Any], recompute: Any, said: str) -> None:
    plan: Plan = replace(preset("ddp", CLUSTER), **changes)
    validate(CLUSTER, replace(plan, recompute=("layers.*",)), LLAMA)
    with pytest.raises(PlanError, match=said):
        validate(CLUSTER, replace(plan, recompute=recompute), LLAMA)


def test_a_mixture_recomputes_its_attention_alone() -> None:
    plan = preset("zero3", CLUSTER)
    blocks = MODELS["experts in groups"].declared  # the first layer is dense
    validate(CLUSTER, replace(plan, recompute=("layers.*: attention", "layers.0: mlp, norms")), blocks)
    with pytest.raises(PlanError, match=r"recompute names mlp of layers\.1, a mixture of experts"):
        validate(CLUSTER, replace(plan, recompute=("layers.*: mlp",)), blocks)
