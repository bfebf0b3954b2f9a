"""Hardware FLOPs of a step that recomputes operations of layers."""

from dataclasses import replace

from terrace.model.blocks import block_specs
from terrace.plan.presets import preset
from terrace.train.utilisation import step_flops
from tests.support.activations import MODELS
from tests.support.toys import cluster_of

MODEL = replace(MODELS["llama"], num_layers=3)
PLAN = preset("ddp", cluster_of(1))


def test_hardware_flops_count_attention_that_is_recomputed() -> None:
    """Its causal pairs once more in each layer that an entry names; activations and norms count nothing."""
    blocks, pair = block_specs(MODEL), 4 * 2 * MODEL.num_heads * MODEL.head_dim
    kept = step_flops(blocks, PLAN, 2, 8)
    for recompute, layers in (
        ("layers.*: attention, mlp", 3),
        ("layers.* first 1: attention", 1),
        ("*: norms, mlp", 0),
    ):
        some = step_flops(blocks, replace(PLAN, recompute=(recompute,)), 2, 8)
        assert some.hardware - kept.hardware == some.again == layers * pair * 8 * 9 // 2
        assert some.masked_again == layers * pair * (8**2 - 8 * 9 // 2)
        assert kept.hardware == kept.model
        assert some.model == kept.model
