"""Values of `tensor_chunks` that no plan can have."""

import re
from dataclasses import replace
from typing import Any

import pytest

from terrace.base.errors import ConfigError, PlanError
from terrace.base.schema import load
from terrace.cluster.cluster import Cluster
from terrace.model.lora.config import LoraConfig, with_adapters
from terrace.plan.plan import Plan
from terrace.plan.validate import validate
from tests.support.fused import on_cuda
from tests.support.toys import MODELS, cluster_of

BLOCKS = MODELS["wide llama, 8 kv heads"].declared
TWO = {"package": {"tensor": 2}}


def plan_of(mapping: dict[str, Any], value: int | str, **changes: Any) -> Plan:
    states = {"params": "device", "grads": "device", "optimizer": "device"}
    return load(Plan, states | {"mapping": mapping, "tensor_chunks": value} | changes, "plan")


def test_fused_where_rows_share_memory() -> None:
    factored = {"package": {"tensor": {"rows": 2, "columns": 2}}}
    # A tier of one device joins nothing.
    for sizes, mapping in (((2, 2), TWO), ((4, 2), factored), ((1, 2), {"node": {"tensor": 2}})):
        validate(on_cuda(cluster_of(*sizes)), plan_of(mapping, "fused"), BLOCKS)


REFUSED = [
    (on_cuda(cluster_of(2)), {}, "fused", {}, "tensor_chunks = 'fused' has no effect"),
    (on_cuda(cluster_of(2)), TWO, "fused", {"sequence_parallel": False}, "tensor_chunks = 'fused' has no effect"),
    (on_cuda(cluster_of(2)), {"package": {"tensor": {"columns": 2}}}, "fused", {}, "'fused' has no effect"),
    (
        cluster_of(2),
        TWO,
        "fused",
        {},
        "only CUDA devices have symmetric memory, and device.backend is 'cpu'; write a ",
    ),
    (on_cuda(cluster_of(2, 2)), {"node": {"tensor": 2}}, "fused", {}, "'package', and these are on 'node'; map all"),
    (
        on_cuda(cluster_of(2, 2)),
        TWO | {"node": {"tensor": 2}},
        "fused",
        {},
        "rows share memory on the innermost tier of several devices, 'package', and these are on 'package' and 'node'",
    ),
    (
        on_cuda(cluster_of(2)),
        TWO,
        "fused",
        {"wire": {"tensor": {"package": "int8"}}},
        "values are read in fp32, as they are computed, and wire.tensor.package = 'int8' rounds them; leave the format",
    ),
    (on_cuda(cluster_of(2)), TWO, 0, {}, "tensor_chunks = 0: a message travels in at least 1 part"),
]


@pytest.mark.parametrize(("cluster", "mapping", "value", "changes", "words"), REFUSED)
def test_refused(cluster: Cluster, mapping: dict[str, Any], value: int | str, changes: Any, words: str) -> None:
    with pytest.raises(PlanError, match=re.escape(words)):
        validate(cluster, plan_of(mapping, value, **changes), BLOCKS)


def test_products_of_8_bits_beside_it_are_refused() -> None:
    cluster = on_cuda(cluster_of(2))
    peaks = {"fp32": 1e14, "bf16": 1e15, "fp8": 2e15}
    cluster = replace(cluster, device=replace(cluster.device, peak_flops_per_s=peaks))
    with pytest.raises(PlanError, match="products = 'fp8' with tensor_chunks = 'fused'"):
        validate(cluster, plan_of(TWO, "fused", products="fp8"), BLOCKS)


def test_adapters_beside_it_are_refused() -> None:
    blocks = with_adapters(BLOCKS, LoraConfig(rank=2, targets=("layers.*.mlp.*",)))
    validate(on_cuda(cluster_of(2)), plan_of(TWO, 2), blocks)
    with pytest.raises(PlanError, match=r"tensor_chunks = .fused. with adapters: .*; write a number of parts"):
        validate(on_cuda(cluster_of(2)), plan_of(TWO, "fused"), blocks)


def test_operations_recomputed_beside_it_are_refused() -> None:
    with pytest.raises(PlanError, match="recompute names mlp with tensor_chunks = 'fused'"):
        validate(on_cuda(cluster_of(2)), plan_of(TWO, "fused", recompute=("layers.*: mlp",)), BLOCKS)


@pytest.mark.parametrize("value", ["fusd", 1.5, True])
def test_words_and_numbers_that_are_no_value(value: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"tensor_chunks = {value!r} is not one of its values")):
        plan_of(TWO, value)
