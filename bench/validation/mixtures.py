"""Published training steps of mixtures of experts, as the plans that their systems name."""

from dataclasses import dataclass, replace

from bench.models import GPT_OSS_120B, MIXTRAL
from bench.validation.rows import Row, Table
from terrace.cluster.cluster import Cluster
from terrace.cluster.named_software import run_by, software_named
from terrace.cluster.presets import load_cluster
from terrace.model.block_operations import layer_operations
from terrace.model.blocks import block_specs, model_flops
from terrace.model.config import ModelConfig, parse_model
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.simulate.footprint import work_of
from terrace.simulate.step import Step, predict_step

_ONE = {"forward": 1, "backward": 1}  # chunk: neither system hid its dispatch

_TEXT = """
TFLOP/s a GPU in bf16, dropless with even routing: the model FLOPs of a step (active experts, the whole square of
attention) over the predicted seconds. Mixtral 8x7B by Megatron-Core 0.8 on 64 H100 (expert 8, pipeline 4 with 8
chunks); Qwen3-235B-A22B by Megatron Bridge 25.11 on 256 GB200 in domains of 64 (expert 32, pipeline 8 with 3 chunks).
gpt-oss-120b by the same release on 64 GB200 of one domain (expert 64). Optimizer states are over the data ranks, one
sequence a micro-batch. Dispatch is this project's: a token crosses a tier once for every unit with one of its experts,
nothing hides it. Presets as they are, run by `te-2024` and by `te`; memory is not part of the row.

The rows of Megatron Bridge are counted from its tokens/s (4916 and 15876 a GPU). Its own TFLOP/s, 728 and 488, are of
other FLOPs: by tokens/s they have half the square of attention for Qwen3, and none of it for gpt-oss.

The prediction for gpt-oss-120b is too fast by a fifth. Little of this is known: the recipe of that run computes norms
and the activation of experts again, a few passes over memory, and the predicted step nothing. Sinks and biases are
priced as passes over memory, with attention and products as fast as without them; the source does not say how fast
they were. Each row has a limit of its own: 10 %, 12 % and 22 %.
"""


@dataclass(frozen=True, kw_only=True)
class _Published:
    name: str
    model: ModelConfig
    cluster: Cluster
    plan: Plan
    batch: int
    limit: float  # on the absolute error
    sequence: int = 4096
    teraflops: float = 0.0  # a GPU, with the whole square of attention
    tokens_per_s: float = 0.0  # a GPU, where the source's FLOPs are others

    def table_row(self) -> Row:
        plan = replace(self.plan, compute="bf16", micro_batch=1)
        ranks = self.cluster.world_size
        stages = 1
        for row in plan.mapping.values():
            degree = row.get("pipeline", 1)
            assert isinstance(degree, int)
            stages *= degree
        step = Step(
            cluster=self.cluster,
            plan=plan,
            blocks=block_specs(self.model),
            num_micros=self.batch * stages // ranks,
            sequence=self.sequence,
            work=work_of(self.cluster, plan, layer_operations(self.model), self.sequence),
        )
        flops = model_flops(self.model, self.sequence, self.batch)
        published = self.teraflops or self.tokens_per_s * flops / (self.batch * self.sequence) / 1e12
        found = flops / ranks / predict_step(step).step_s / 1e12
        return Row(cells=(self.name, str(ranks)), published=published, modelled=found, limit=self.limit)


def _mixtral() -> _Published:
    cluster = run_by(load_cluster("dgx-h100").resized(8), software_named("te-2024"))
    model = parse_model(MIXTRAL)
    plan = replace(
        preset("zero1", cluster),
        mapping={"node": {"data": 8}, "system": {"data": 2, "pipeline": 4}},
        experts={"node": {"expert": 8}},
        expert_chunks=_ONE,
        schedule="interleaved:8",
    )
    return _Published(
        name="Mixtral 8x7B", model=model, cluster=cluster, plan=plan, batch=256, limit=0.10, teraflops=438.0
    )


def _qwen3() -> _Published:
    whole = load_cluster("gb200-nvl72")
    tray, rack, system = whole.tiers
    cluster = replace(whole, tiers=(tray, replace(rack, size=16), replace(system, size=4)))
    cluster = run_by(cluster, software_named("te"))
    model = parse_model(
        {
            "model_type": "qwen3_moe",
            "vocab_size": 151936,
            "hidden_size": 4096,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "max_position_embeddings": 40960,
        }
    )
    plan = replace(
        preset("zero1", cluster),
        mapping={"rack": {"data": 8, "pipeline": 2}, "system": {"pipeline": 4}},
        experts={"tray": {"expert": 4}, "rack": {"expert": 8}},
        expert_chunks=_ONE,
        schedule="interleaved:3",
    )
    return _Published(
        name="Qwen3-235B-A22B", model=model, cluster=cluster, plan=plan, batch=8192, limit=0.12, tokens_per_s=4916.0
    )


def _gpt_oss() -> _Published:
    whole = load_cluster("gb200-nvl72")
    tray, rack, _ = whole.tiers
    cluster = run_by(replace(whole, tiers=(tray, replace(rack, size=16))), software_named("te"))
    plan = replace(
        preset("zero1", cluster),
        mapping={"tray": {"data": 4}, "rack": {"data": 16}},
        experts={"tray": {"expert": 4}, "rack": {"expert": 16}},
        expert_chunks=_ONE,
    )
    model = parse_model(GPT_OSS_120B)
    return _Published(
        name="gpt-oss-120b",
        model=model,
        cluster=cluster,
        plan=plan,
        batch=1280,
        limit=0.22,
        sequence=8192,
        tokens_per_s=15876.0,
    )


def table() -> Table:
    """The published rates beside those of the predicted steps."""
    return Table(
        title="Megatron, mixtures of experts",
        text=_TEXT,
        heads=("model", "GPUs"),
        unit="TFLOP/s a GPU",
        rows=[each.table_row() for each in (_mixtral(), _qwen3(), _gpt_oss())],
        mean_limit=0.15,
        max_limit=0.22,
    )
