"""The footprint against the memory that a step of one process really takes, and against itself."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from terrace.base.errors import PlanError
from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import load_cluster
from terrace.model.block_operations import layer_operations
from terrace.model.blocks import block_specs, num_params
from terrace.model.config import ModelConfig, parse_model
from terrace.model.decoder import build_blocks, token_loss
from terrace.model.init import initialise
from terrace.plan.keep import Keep
from terrace.plan.kinds import Kinds
from terrace.plan.plan import Plan
from terrace.plan.presets import PRESETS, preset
from terrace.runtime.batch import Batch
from terrace.runtime.engine import Engine
from terrace.runtime.setup import Blocks, Workload
from terrace.simulate.footprint import footprint, stage_footprint, work_of
from terrace.simulate.fullest import Job, fullest_stage
from terrace.simulate.moments import Phase
from tests.support.activations import layer_activations
from tests.support.allocations import allocated, seeded
from tests.support.lanes import use_lane
from tests.support.nightly import in_turns
from tests.support.state_formula import model_state_bytes
from tests.support.toys import cluster_of

VOCAB, HIDDEN, LAYERS, BATCH = 307, 64, 4, 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_SIZES: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS}
_SIZES |= {"num_attention_heads": 4}
_LLAMA = _SIZES | {"model_type": "llama", "intermediate_size": 160, "num_key_value_heads": 2}
_GPT2 = {"model_type": "gpt2", "vocab_size": VOCAB, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": 4}
_GPT2 |= {"n_positions": 512, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS = {
    "llama": parse_model(_LLAMA),
    "llama tied": parse_model(_LLAMA | {"tie_word_embeddings": True}),
    "gpt_neox": parse_model(_SIZES | {"model_type": "gpt_neox", "intermediate_size": 256}),
    "gpt2": parse_model(_GPT2),
}
SEVEN_B = parse_model(
    {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
    }
)
INPUTS = Keep(activations="disk", piece=1 << 12)
PLANS: dict[str, tuple[str, dict[str, Any], int, int]] = {  # preset, changes, sequence, micro-batches
    "nothing recomputed": ("zero3", {}, 256, 2),
    "every layer recomputed": ("zero3", {"recompute": ("layers.*",)}, 256, 2),
    "all recomputed": ("ddp", {"recompute": ("*",)}, 256, 2),
    "attention recomputed": ("zero3", {"recompute": ("layers.*: attention",)}, 256, 2),
    "operations recomputed in some": (
        "ddp",
        {"recompute": ("layers.* every 2: attention, mlp, norms", "layers.1")},
        256,
        2,
    ),
    "a unit": ("zero3", {"unit": 2}, 256, 2),
    "a unit, some recomputed": ("zero3", {"unit": 2, "recompute": ("layers.1", "layers.2")}, 256, 4),
    "inputs on a disk": ("ddp", {"keep": INPUTS}, 256, 2),
    "inputs of recomputed layers on a disk": ("ddp", {"keep": INPUTS, "recompute": ("*",)}, 256, 2),
    "a unit, inputs on a disk": ("zero3", {"keep": INPUTS, "recompute": ("layers.*",), "unit": 2}, 256, 4),
    "little to compute": ("zero3", {"prefetch": 2}, 16, 1),
}


def measured_step(model: ModelConfig, plan: Plan, sequence: int, num_micros: int) -> int:
    """Return the most bytes of tensors alive in the second step of one process."""
    cluster, dtype = cluster_of(1), DTYPES[plan.compute]
    blocks, specs = build_blocks(model, device="cpu", dtype=dtype), block_specs(model)
    initialise(blocks, model, seed=0, dtype=dtype)
    tokens = [torch.randint(0, VOCAB, (BATCH, sequence), generator=seeded(micro)) for micro in range(num_micros)]
    batches = [Batch(part, part.roll(-1)) for part in tokens]
    with use_lane("eager"):
        engine = Engine(
            Blocks(blocks, names=[spec.name for spec in specs], declared=specs),
            Workload(cluster=cluster, plan=plan, num_micros=num_micros, sequence=sequence),
            token_loss,
        )
    engine.step(batches, 1e-3)
    peak, _, _ = allocated(lambda: engine.step(batches, 1e-3))
    engine.close()
    state = model_state_bytes(cluster, plan, specs, num_micros)
    before = sum(state[category] for category in ("params", "grads", "optimizer"))
    return before + sum(batch.inputs.nbytes + batch.labels.nbytes for batch in batches) + peak


@pytest.mark.parametrize(("name", "compute", "case"), in_turns(8, MODELS, DTYPES, PLANS))
def test_a_step_takes_what_is_predicted(name: str, compute: str, case: str) -> None:
    """Within 0.5 %, for a few numbers a token, and 5 % in bf16, where a CPU's products take scratch memory."""
    base, changes, sequence, num_micros = PLANS[case]
    values: dict[str, Any] = {"micro_batch": BATCH, "compute": compute} | changes
    plan = replace(preset(base, cluster_of(1)), **values)
    wanted = footprint(cluster_of(1), plan, kinds(MODELS[name]), sequence, num_micros, backend="cpu")
    measured = measured_step(MODELS[name], plan, sequence, num_micros)
    # The ring is not memory of torch.
    unseen = wanted["context"] + (2 * ((1 << 12) * DTYPES[compute].itemsize + 4096) if plan.keep.is_below else 0)
    assert sum(wanted.values()) - unseen == pytest.approx(measured, rel=0.005 if compute == "fp32" else 0.05)


def kinds(model: ModelConfig) -> Kinds:
    return Kinds.of(block_specs(model))


def total(cluster: Cluster, plan: Plan, model: ModelConfig, *args: Any, **kwargs: Any) -> int:
    return sum(footprint(cluster, plan, kinds(model), *args, **kwargs).values())


def dgx(nodes: int) -> Cluster:
    return load_cluster("dgx-a100").resized(nodes)


def bf16(name: str, cluster: Cluster, **changes: Any) -> Plan:
    return replace(preset(name, cluster), compute="bf16", **changes)


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(sorted(PRESETS)), micro_batch=st.integers(1, 4), num_micros=st.integers(1, 4))
def test_what_frees_memory_does(name: str, micro_batch: int, num_micros: int) -> None:
    cluster = dgx(2)
    plan = bf16(name, cluster, micro_batch=micro_batch)
    here = total(cluster, plan, SEVEN_B, 2048, num_micros)
    assert total(cluster, replace(plan, recompute=("layers.*",)), SEVEN_B, 2048, num_micros) < here
    assert total(cluster, replace(plan, micro_batch=micro_batch + 1), SEVEN_B, 2048, num_micros) > here
    assert total(cluster, plan, SEVEN_B, 4096, num_micros) > here
    assert total(dgx(4), bf16(name, dgx(4), micro_batch=micro_batch), SEVEN_B, 2048, num_micros) <= here
    parts = footprint(cluster, plan, kinds(SEVEN_B), 2048, num_micros)
    assert parts["context"] > 0
    assert parts["allocator"] > 0
    names: tuple[Phase, ...] = ("forward", "backward", "update")
    phases = {name: total(cluster, plan, SEVEN_B, 2048, num_micros, phase=name) for name in names}
    assert here == max(phases.values())
    assert phases["update"] < phases["forward"] <= here


def test_tensor_and_pipeline_ranks() -> None:
    """Eight tensor ranks hold an eighth of the matrices; a first stage holds as many micro-batches as stages."""
    cluster = dgx(4)
    replicated = bf16("ddp", cluster)
    tensor = replace(replicated, mapping={"node": {"tensor": 8}})
    seven = kinds(SEVEN_B)
    whole, cut = (footprint(cluster, plan, seven, 2048, 8) for plan in (replicated, tensor))
    assert whole["params"] == 2 * num_params(SEVEN_B)
    assert cut["params"] == pytest.approx(whole["params"] / 8, rel=1e-3)
    # Whole, a layer's backward is the worst moment; cut, the head's, which adds as much as its logits take.
    assert (whole["logits"], cut["logits"]) == (0, 2 * 2048 * 32000 // 8)  # bf16, an eighth of the vocabulary
    assert 0 < cut["activations"] - whole["activations"] / 8 < 1.05 * cut["logits"]
    piped = replace(tensor, mapping={"node": {"tensor": 8}, "system": {"pipeline": 4}})
    held = (range(9), range(9, 17), range(17, 25), range(25, 34))
    stages = [stage_footprint(cluster, piped, seven, 2048, 8, [held[stage]], [4 - stage]) for stage in range(4)]
    assert sum(stage["params"] for stage in stages) == cut["params"]
    first, second = stages[0]["activations"], stages[1]["activations"]
    assert first == pytest.approx(second * 4 / 3, rel=1e-9)  # the embedding keeps nothing
    assert stages[3]["logits"] > 0 == stages[0]["logits"]
    two = footprint(cluster, piped, seven, 2048, 2, held=held[0])
    assert two["activations"] == pytest.approx(first / 2, rel=1e-9)
    interleaved = stage_footprint(cluster, piped, seven, 2048, 8, [range(5), range(5, 9)], [5, 6])["activations"]
    assert interleaved == pytest.approx(first * 5.5 / 4, rel=1e-9)
    uneven = footprint(cluster, piped, seven, 2048, 8, held=range(5))["activations"]
    assert uneven == pytest.approx(first / 2, rel=1e-9)
    assert fullest_stage(Job(cluster=cluster, plan=piped, num_micros=8), block_specs(SEVEN_B), 2048) == (0, stages[0])


@pytest.mark.parametrize(
    ("backend", "compute", "kv_heads", "sequence", "flash"),
    [
        ("cuda", "bf16", 8, 64, True),
        ("cuda", "fp32", 32, 64, True),
        ("cuda", "fp32", 8, 64, True),
        ("cuda", "fp64", 8, 64, False),
        ("cpu", "fp32", 8, 64, True),
        ("cpu", "bf16", 8, 128, False),
        ("cpu", "bf16", 8, 129, True),
    ],
)
def test_which_attention_runs(backend: Any, compute: Any, kv_heads: int, sequence: int, flash: bool) -> None:
    model = replace(SEVEN_B, num_kv_heads=kv_heads)
    plan = replace(preset("zero3", dgx(2)), compute=compute)
    assert work_of(dgx(2), plan, layer_operations(model), sequence, backend).flash == flash


@pytest.mark.parametrize(("head_dim", "kv_heads", "flash"), [(256, 8, True), (512, 8, False), (512, 32, True)])
def test_scores_of_long_grouped_heads_are_written_on_cuda(head_dim: int, kv_heads: int, flash: bool) -> None:
    """The flash kernel takes heads of up to 256, the other fused one no groups: their scores are kept, in fp32."""
    model = replace(SEVEN_B, head_dim=head_dim, num_kv_heads=kv_heads)
    work = work_of(dgx(2), bf16("zero3", dgx(2)), layer_operations(model), 2048, "cuda")
    assert work.flash == flash
    saved = layer_activations(work, "cuda").saved
    scores = 2048 * 2048 * model.num_heads * 4
    assert (saved["attention"] >= scores) != flash


def test_what_cannot_be_is_refused() -> None:
    cluster = dgx(2)
    plan = bf16("zero3", cluster)
    with pytest.raises(PlanError, match="in_flight = 9 of 8 micro-batches"):
        footprint(cluster, plan, kinds(SEVEN_B), 2048, 8, in_flight=9)


@pytest.mark.parametrize(("model", "share"), [(MODELS["llama"], None), (SEVEN_B, 0.05)])
def test_what_the_allocator_reserves_beyond_tensors(model: ModelConfig, share: float | None) -> None:
    """A share of the tensors, at least the pages of two streams; a CPU's allocator keeps nothing."""
    cluster = load_cluster("dgx-a100")
    parts = footprint(cluster, preset("zero3", cluster), Kinds.of(block_specs(model)), 256, 1)
    tensors = sum(size for name, size in parts.items() if name not in ("allocator", "context"))
    assert parts["allocator"] == (44 << 20 if share is None else int((1.05 - 1) * tensors))
    local = cluster_of(2)
    assert footprint(local, preset("zero3", local), Kinds.of(block_specs(model)), 256, 1)["allocator"] == 0
