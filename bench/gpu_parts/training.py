"""Steps of a Llama-style stack in bf16 with fp32 master parameters, by one contestant of several.

    python -m bench.gpu --only "training:engine compiled"

Contestants are the engine, a plain PyTorch loop and FSDP2's `fully_shard` on a world of one; "compiled" passes every
block and the loss through `torch.compile`, and "engine liger" has the kernels of liger-kernel instead, where it is
installed. All train one batch from the values of seed 0, with the same clipping and fused AdamW. The stack has about
1 B parameters; "8B" takes six layers of Llama 3 8B's shape, or as many as memory holds states for.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from bench.common import ADAMW, decoder, free_port, local_cluster, micro_batches, torch_adamw
from bench.gpu_parts.exactness import new_engine
from bench.gpu_parts.setting import SECONDS, SKIPPED, Row, Setting
from terrace.model import liger
from terrace.model.blocks import block_specs, num_params
from terrace.model.config import ModelConfig, parse_model
from terrace.model.decoder import build_blocks, token_loss
from terrace.model.init import initialise
from terrace.model.part_kernel import PartChoice
from terrace.plan.plan import Plan
from terrace.plan.presets import command_plan
from terrace.runtime.batch import Batch as MicroBatch
from terrace.train.utilisation import step_flops

GOAL_MFU = 0.5
GOAL_RATIO = 1.0
MICROS = 2
LIGER = "engine liger"
_STATE_BYTES = 20  # of a parameter: bf16 copy and gradient, fp32 sum, master and two moments
_FOR_STATES = 0.6  # of the memory; the rest holds activations
_MOST_LAYERS = 6  # of 8B: initial values are drawn on the host, some 10 s for these 2.4 B parameters

Batch = tuple[Tensor, Tensor]
Step = Callable[[Sequence[Batch]], float]


def rows(setting: Setting, contestant: str) -> Iterator[Row]:
    """Step time, share of the peak, memory and loss."""
    who, is_compiled = contestant.removeprefix("8B ").split()[0], contestant.endswith("compiled")
    config, shape = stack(setting, is_large=contestant.startswith("8B"))
    if contestant == LIGER:
        if reason := liger.why_missing() if setting.is_cuda else "its kernels are for CUDA":
            yield Row("liger-kernel", reason, without=SKIPPED)
            return
        yield Row("liger-kernel", liger.words())
        step = engine(setting, config, is_compiled=False, kernels="liger")
    else:
        step = CONTESTANTS[who](setting, config, is_compiled)
    step_s, losses, first_s = timed(setting, step, config, shape)
    size = f"{num_params(config) / 1e9:.2f} B, {config.num_layers} layers, {MICROS} x {shape[0]} x {shape[1]}"
    tokens_per_s = MICROS * shape[0] * shape[1] / step_s
    yield Row(f"step of {size}", f"{step_s * 1e3:.1f} ms, {tokens_per_s:.0f} tokens/s, first step {first_s:.1f} s")
    yield _mfu(setting, config, shape, step_s, is_judged=contestant == "engine compiled")
    if setting.is_cuda:
        allocated, reserved = torch.cuda.max_memory_allocated() / 1e9, torch.cuda.max_memory_reserved() / 1e9
        yield Row("peak memory", f"{allocated:.1f} GB allocated, {reserved:.1f} GB reserved")
    yield Row("loss on one batch", f"{losses[0]:.3f} -> {losses[-1]:.3f}", losses[-1] < losses[0])
    yield from _compared(setting, contestant, step_s)


def stack(setting: Setting, *, is_large: bool) -> tuple[ModelConfig, tuple[int, int]]:
    """The model, and the sequences and tokens of its micro-batches."""
    small = decoder(setting.size(2048, 64), setting.size(18, 2), setting.size(32000, 257))
    shape = (setting.size(2 if is_large else 4, 1), setting.size(2048, 32))
    return large(setting) if is_large else small, shape


def timed(
    setting: Setting, step: Step, config: ModelConfig, shape: tuple[int, int]
) -> tuple[float, list[float], float]:
    """The median step after the first few, every loss, and the first step, which may compile; in seconds."""
    batches = [
        (tokens.to(setting.device), labels.to(setting.device))
        for tokens, labels in micro_batches(0, 0, MICROS, shape, config.vocab_size)
    ]
    times_s, losses = [], []
    for _ in range(setting.size(13, 3)):
        begin_s = time.perf_counter()
        losses.append(step(batches))
        setting.finish()
        times_s.append(time.perf_counter() - begin_s)
    return statistics.median(times_s[setting.size(3, 1) :]), losses, times_s[0]


def _mfu(setting: Setting, config: ModelConfig, shape: tuple[int, int], step_s: float, *, is_judged: bool) -> Row:
    flops = step_flops(block_specs(config), _plan(), MICROS * shape[0], shape[1])
    causal, square = (each / step_s / setting.peak_tflops / 1e12 for each in (flops.model, flops.model + flops.masked))
    found = f"{causal:.1%}; {square:.1%} with attention as the full square"
    subject, passes = f"MFU of {setting.peak_tflops:g} TFLOP/s", setting.goal(causal >= GOAL_MFU)
    return Row(subject, found, passes, f"{GOAL_MFU:.0%}") if is_judged else Row(subject, found)


def _compared(setting: Setting, contestant: str, step_s: float) -> Iterator[Row]:
    # Beside the contestants that ran before; each is a process of its own, so the seconds are kept in a file.
    known = _known(setting) | {contestant: step_s}
    (setting.folder / SECONDS).write_text(json.dumps(known), encoding="utf-8")
    for size in ("", "8B "):
        ours = f"{size}engine compiled"
        for name, theirs in (("plain PyTorch", f"{size}plain compiled"), ("FSDP2", f"{size}fsdp2 compiled")):
            if contestant in (ours, theirs) and ours in known and theirs in known:
                ratio = known[theirs] / known[ours]
                subject = f"the engine's tokens/s over those of {name}, both compiled{', 8B' * bool(size)}"
                yield Row(subject, f"{ratio:.3f}", setting.goal(ratio >= GOAL_RATIO), f"{GOAL_RATIO:g}")
    if contestant == LIGER and "engine compiled" in known:
        ratio = known["engine compiled"] / known[LIGER]
        yield Row("the engine's tokens/s with liger-kernel over those compiled", f"{ratio:.3f}")


def _known(setting: Setting) -> dict[str, float]:
    path = setting.folder / SECONDS
    found: dict[str, float] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def beside_bf16(setting: Setting, step_s: float) -> str:
    """How many times as fast a step of the compiled engine is as that in bf16, in words; "" where that is not known."""
    known = _known(setting).get("engine compiled")
    return "" if known is None else f", {known / step_s:.3f} times as fast as bf16"


def large(setting: Setting) -> ModelConfig:
    """Layers of Llama 3 8B's shape, as many as memory holds the states of, at most `_MOST_LAYERS`."""
    table: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
    }
    if setting.tiny:
        table |= {"vocab_size": 257, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
        table |= {"num_key_value_heads": 2}
    memory = torch.cuda.get_device_properties(0).total_memory if setting.is_cuda else 1 << 20
    layers = 1
    while layers < _MOST_LAYERS and _STATE_BYTES * num_params(_deeper(table, layers + 1)) < _FOR_STATES * memory:
        layers += 1
    return _deeper(table, layers)


def _deeper(table: dict[str, Any], layers: int) -> ModelConfig:
    return parse_model({**table, "num_hidden_layers": layers})


def _plan() -> Plan:
    return command_plan({"preset": "ddp", "compute": "bf16"}, local_cluster({"node": 1}))


def engine(
    setting: Setting, config: ModelConfig, is_compiled: bool, plan: Plan | None = None, kernels: PartChoice = "torch"
) -> Step:
    """The engine, under a plan of one device."""
    made = new_engine(
        config, plan or _plan(), setting.device, MICROS, watch=lambda: None, compiled=is_compiled, kernels=kernels
    )
    return lambda batches: made.step([MicroBatch(*batch) for batch in batches], ADAMW.lr).loss


def _blocks(setting: Setting, config: ModelConfig) -> list[nn.Module]:
    blocks = build_blocks(config)
    initialise(blocks, config, seed=0, device=torch.device(setting.device))
    return blocks


def plain(setting: Setting, config: ModelConfig, is_compiled: bool) -> Step:
    """A plain loop: bf16 parameters, gradients of micro-batches summed in fp32, fp32 masters under fused AdamW."""
    blocks = _blocks(setting, config)
    working = [parameter for block in blocks for parameter in block.parameters()]
    masters = [nn.Parameter(parameter.detach().clone()) for parameter in working]
    for block in blocks:
        block.to(torch.bfloat16)
    optimizer = torch_adamw(masters)
    if is_compiled:
        for block in blocks:
            block.compile()
    loss_of = _loss_of(is_compiled)

    def step(batches: Sequence[Batch]) -> float:
        total, count = torch.zeros((), device=setting.device), sum((labels >= 0).sum() for _, labels in batches)
        for tokens, labels in batches:
            loss = loss_of(_forward(blocks, tokens), labels) / count
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
            for master, parameter in zip(masters, working, strict=True):
                assert parameter.grad is not None
                master.grad = parameter.grad.float() if master.grad is None else master.grad.add_(parameter.grad)
                parameter.grad = None
        nn.utils.clip_grad_norm_(masters, ADAMW.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_copy_([*working], [*masters])
        return total.item()

    return step


def fsdp2(setting: Setting, config: ModelConfig, is_compiled: bool) -> Step:
    """FSDP2 over a world of one, with its own mixed precision."""
    backend = "nccl" if setting.is_cuda else "gloo"
    store = f"tcp://127.0.0.1:{free_port()}"
    dist.init_process_group(backend, init_method=store, rank=0, world_size=1)
    mesh = init_device_mesh(setting.device, (1,))
    blocks = _blocks(setting, config)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model: Any = nn.Sequential(*blocks)
    for block in model:
        if is_compiled:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    parameters = list(model.parameters())
    optimizer, loss_of = torch_adamw(parameters), _loss_of(is_compiled)

    def step(batches: Sequence[Batch]) -> float:
        total, count = torch.zeros((), device=setting.device), sum((labels >= 0).sum() for _, labels in batches)
        for micro, (tokens, labels) in enumerate(batches):
            model.set_requires_gradient_sync(micro == len(batches) - 1)
            loss = loss_of(model(tokens), labels) / count
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        nn.utils.clip_grad_norm_(parameters, ADAMW.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total.item()

    return step


def _loss_of(is_compiled: bool) -> Callable[[Tensor, Tensor], Tensor]:
    # Compiled too, or the logits would be copied in fp32, which the engine does not do.
    return torch.compile(token_loss) if is_compiled else token_loss


def _forward(blocks: Sequence[nn.Module], tokens: Tensor) -> Tensor:
    x = tokens
    for block in blocks:
        x = block(x)
    return x


CONTESTANTS: dict[str, Callable[[Setting, ModelConfig, bool], Step]] = {
    "engine": engine,
    "plain": plain,
    "fsdp2": fsdp2,
}
