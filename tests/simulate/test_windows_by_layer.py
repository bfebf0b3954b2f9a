"""Prices and memory of layers that differ in their windows, and of capped scores."""

from dataclasses import replace
from typing import Literal

import pytest

from terrace.cluster.presets import load_cluster
from terrace.model.block_operations import layer_operations
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig, parse_model
from terrace.model.kinds import LayerKind, Scales
from terrace.plan.kinds import Kinds
from terrace.plan.presets import preset
from terrace.simulate.activations import activations_of
from terrace.simulate.footprint import footprint, work_of
from terrace.simulate.layers import seconds_of
from terrace.simulate.masks import causal_pairs
from terrace.train.utilisation import step_flops
from tests.support.toys import cluster_of

SEQUENCE, WINDOW = 8192, 512  # so long that the host is not what a layer waits for
TABLE = {"model_type": "qwen3", "vocab_size": 61, "hidden_size": 2048, "num_hidden_layers": 3}
TABLE |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 5504}
WHOLE = parse_model(TABLE)
KINDS = (LayerKind(sliding_window=WINDOW, rope_theta=1e4), LayerKind(rope_theta=1e4), LayerKind(rope_theta=1e4))
MIXED = replace(WHOLE, kinds=KINDS)
NARROW = replace(WHOLE, sliding_window=WINDOW)


def layer_s(model: ModelConfig, index: int, device: str) -> float:
    cluster = load_cluster(device)
    plan = replace(preset("ddp", cluster), mapping={})
    work = work_of(cluster, plan, layer_operations(model), SEQUENCE, cluster.device.type)
    return seconds_of(cluster.device, work, block_specs(model)[index]).forward_s


def test_a_layer_costs_what_its_window_leaves() -> None:
    for device in ("local", "dgx-h100"):
        windowed, whole, _ = (layer_s(MIXED, index, device) for index in (1, 2, 3))
        assert windowed < whole
        assert (windowed, whole) == (layer_s(NARROW, 1, device), layer_s(WHOLE, 1, device))


def test_flops_of_a_step_are_summed_over_the_layers() -> None:
    plan = replace(preset("ddp", cluster_of(1)), mapping={})
    each = {model: step_flops(block_specs(model), plan, 2, SEQUENCE) for model in (MIXED, WHOLE, NARROW)}
    assert each[MIXED].attention * 3 == each[NARROW].attention + 2 * each[WHOLE].attention
    width = 4 * 2 * MIXED.num_heads * MIXED.head_dim * 3  # of a pair in both sequences, forward and backward
    assert each[NARROW].attention == 3 * width * causal_pairs(SEQUENCE, WINDOW)
    assert each[MIXED].products == each[WHOLE].products


def test_masks_are_kept_for_each_window() -> None:
    plan = replace(preset("ddp", cluster_of(1)), mapping={})
    held = {}
    for name, model in (("mixed", MIXED), ("whole", WHOLE), ("narrow", NARROW)):
        found = footprint(cluster_of(1), plan, Kinds.of(block_specs(model)), SEQUENCE, 1, backend="cpu")
        held[name] = found["batch"]
    assert held["whole"] < held["narrow"] == held["mixed"]


@pytest.mark.parametrize(("device", "compute"), [("local", "fp32"), ("dgx-h100", "bf16")])
def test_capped_scores_pass_through_memory(device: str, compute: Literal["fp32", "bf16"]) -> None:
    """Without FlexAttention the scores are kept twice, capped and as weights."""
    cluster, capped = load_cluster(device), replace(WHOLE, scales=Scales(attention_cap=5.0))
    plan, backend = replace(preset("ddp", cluster), mapping={}, compute=compute), cluster.device.type
    found = []
    for model in (WHOLE, capped):
        work = work_of(cluster, plan, layer_operations(model), SEQUENCE, backend, attention="sdpa")
        block = block_specs(model)[1]
        found.append((seconds_of(cluster.device, work, block).forward_s, activations_of(work, block, backend)))
    assert found[0][0] < found[1][0]
    scores = 4 * plan.micro_batch * WHOLE.num_heads * SEQUENCE**2
    assert sum(found[1][1].saved.values()) - sum(found[0][1].saved.values()) > 1.9 * scores
    # FlexAttention caps in its kernel.
    assert work_of(cluster, plan, layer_operations(capped), SEQUENCE, "cuda").flash
