"""DeepSpeed's ZeRO-3, with its secondary copy on the node (hpZ), and ZeRO++ with quantized messages.

The client's optimizer is torch's AdamW, because DeepSpeed's own needs a C++ build. Its quantizers need CUDA; on a CPU,
DeepSpeed stops during setup, and the results keep its message.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from bench.lab.contest import Batch, Contestant, Result, Setting, new_adamw
from bench.lab.job import ADAMW
from bench.lab.launch import tell_deepspeed
from bench.lab.ring import ring_reduce_scatter
from terrace.model.decoder import token_loss


def load(ranks_per_node: int) -> Any:
    """The module; raises `ModuleNotFoundError` with installation instructions."""
    tell_deepspeed(ranks_per_node)
    try:
        import deepspeed
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(f"{missing}; install the extra `lab`, with DS_BUILD_OPS=0") from missing
    # An inference kernel that would be compiled when communication starts: minutes on a busy machine.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def make(
    setting: Setting,
    *,
    hpz: bool = False,
    quantized: bool = False,
    live: int = 4_000_000,
    prefetch: int = 2_000_000,
) -> Contestant:
    """The training loop; `live` and `prefetch` limit the parameters gathered, and fetched ahead."""
    job = setting.job
    deepspeed = load(job.ranks_per_node)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    deepspeed.comm.comm.cdb.reduce_scatter_function = ring_reduce_scatter
    model = nn.Sequential(*setting.blocks)
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model,
        optimizer=new_adamw(list(model.parameters())),
        config=_config(setting, hpz, quantized, live, prefetch),
        dist_init_required=False,
    )

    def step(batches: Sequence[Batch]) -> Result:
        total = 0.0
        for tokens, labels in batches:
            loss = token_loss(engine(tokens), labels) / setting.micro_tokens
            engine.backward(loss)  # divides by the number of micro-batches
            engine.step()
            total += loss.item() / len(batches)
        return Result(loss=total, grad_norm=float(engine.get_global_grad_norm()))

    def states() -> list[Tensor]:
        found = list(optimizer.fp32_partitioned_groups_flat)
        for state in optimizer.optimizer.state.values():
            found += [value for name, value in state.items() if name != "step"]
        return found

    return Contestant(step=step, states=states, close=engine.destroy)


def _config(setting: Setting, hpz: bool, quantized: bool, live: int, prefetch: int) -> dict[str, Any]:
    job = setting.job
    zero: dict[str, Any] = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_max_live_parameters": live,
        "stage3_prefetch_bucket_size": prefetch,
        "overlap_comm": True,
    }
    if hpz:
        zero["zero_hpz_partition_size"] = job.ranks_per_node
    if quantized:
        zero |= {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    return {
        "train_micro_batch_size_per_gpu": setting.micro_batch,
        "gradient_accumulation_steps": setting.num_micros,
        "gradient_clipping": ADAMW.clip,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "bf16",
        "zero_optimization": zero,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }
