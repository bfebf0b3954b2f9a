"""Initial values of parameters, as a function of configuration, seed, name and shape only.

Every parameter has its own generator, seeded by a hash of the seed and its full name. Values therefore do not depend on
the order of initialisation, the rank or the plan.

Matrices are normal with standard deviation `init_std`, divided by sqrt(2 * num_layers) for the two projections that
write to the residual stream, as in GPT-2, so that its variance does not grow with depth. Norm weights are one (zero if
norms multiply by 1 + weight), biases zero, attention sinks normal as matrices are. In linear layers exp(log_decay) is
uniform in (0.01, 16) and the bias of the decay one, as in the released models; with a decay for each element of a key
it is uniform in (1, 16), and softplus of the bias is uniform in its logarithm, in (0.001, 0.1), as in Mamba. Matrix A
of a LoRA adapter is uniform in +-1 / sqrt(in), as in torch's Linear; B is zero, so that the adapter adds nothing at
first (Hu et al. 2106.09685, section 4.1).
"""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig
from terrace.model.lora.config import DOWN, UP

_TEMPERATURE = 0.3  # of a cosine gate: cosines within [-1, 1] can then tell choices apart; a guess
_LOG_DECAY, _DECAY_BIAS = "attention.log_decay", "attention.decay_bias"
_LINEAR_NORM = "attention.norm.weight"  # of linear layers: without an offset in families whose other norms have one
_RESIDUAL_OUTPUTS = ("attention.output.weight", "mlp.down.weight", "mlp.shared.down.weight")


def initial_value(config: ModelConfig, block_name: str, param_name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Initial value of one whole parameter, an fp32 CPU tensor of `shape`; callers slice their shard from it."""
    if param_name.endswith("router.temperature"):
        return torch.full(shape, math.log(_TEMPERATURE))
    if param_name == _DECAY_BIAS and config.delta.rank:
        generator = torch.Generator().manual_seed(_seed_of(seed, f"{block_name}.{param_name}"))
        return torch.empty(shape).uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp_().expm1_().log_()
    if param_name in (_DECAY_BIAS, _LINEAR_NORM):
        return torch.ones(shape)
    if param_name == _LOG_DECAY:
        generator = torch.Generator().manual_seed(_seed_of(seed, f"{block_name}.{param_name}"))
        return torch.empty(shape).uniform_(1.0 if config.delta.rank else 0.01, 16.0, generator=generator).log_()
    if param_name.endswith(("bias", UP)):
        return torch.zeros(shape)
    if param_name.endswith(DOWN):
        bound = 1 / math.sqrt(shape[1])
        generator = torch.Generator().manual_seed(_seed_of(seed, f"{block_name}.{param_name}"))
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)
    if len(shape) == 1 and not param_name.endswith(".sinks"):
        return torch.zeros(shape) if config.norm_offset else torch.ones(shape)
    std = config.init_std
    # GPT-2's scaling: the residual stream sums 2 outputs per layer.
    if param_name in _RESIDUAL_OUTPUTS:
        std /= math.sqrt(2 * config.num_layers)
    generator = torch.Generator().manual_seed(_seed_of(seed, f"{block_name}.{param_name}"))
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def initialise(
    blocks: Sequence[nn.Module],
    config: ModelConfig,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> None:
    """Initialise all blocks of a model in place, on one device; meta parameters are materialised.

    The `Parameter` objects stay the same, so ties and references to them remain valid.
    """
    specs = block_specs(config)
    assert len(specs) == len(blocks), f"{len(blocks)} blocks for a model of {len(specs)}"
    for spec, block in zip(specs, blocks, strict=True):
        for param in spec.params:
            value = initial_value(config, spec.name, param.name, param.shape, seed)
            old = block.get_parameter(param.name)
            new = nn.Parameter(value.to(device, dtype), requires_grad=old.requires_grad)
            # Assigning `.data` cannot turn a meta tensor into a real one; swapping keeps the object.
            swap_tensors(old, new)  # type: ignore[no-untyped-call]


def _seed_of(seed: int, name: str) -> int:
    # Not `hash`, which differs between processes.
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
