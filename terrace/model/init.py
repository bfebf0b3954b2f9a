"""Initial values of parameters, each a function of only (configuration, seed, name, shape).

Every parameter has its own generator, seeded by a hash of the seed and its full name. So a value does not
depend on the order of initialisation, on which rank makes it, or on the plan.

Matrices are normal with `init_std`; the two projections that write to the residual stream are scaled down
by sqrt(2 * num_layers), after GPT-2, so that the stream's variance does not grow with depth. Norm weights
are one (zero where norms multiply by 1 + weight) and biases zero. A of an adapter is uniform within 1 / sqrt(in), as a
linear layer of torch is, and B is zero, so that it adds nothing at first (Hu et al. 2106.09685, section 4.1).
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
_RESIDUAL_OUTPUTS = ("attention.output.weight", "mlp.down.weight", "mlp.shared.down.weight")


def initial_value(config: ModelConfig, block_name: str, param_name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """The initial value of one parameter, an fp32 CPU tensor of `shape`.

    Always the whole parameter: a caller that holds a shard cuts it from this.
    """
    if param_name.endswith("router.temperature"):
        return torch.full(shape, math.log(_TEMPERATURE))
    if param_name.endswith(("bias", UP)):
        return torch.zeros(shape)
    if param_name.endswith(DOWN):
        bound = 1 / math.sqrt(shape[1])
        generator = torch.Generator().manual_seed(_seed_of(seed, f"{block_name}.{param_name}"))
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)
    if len(shape) == 1:
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
    """Give all blocks of a model their values, in place, on one device; meta blocks become real.

    The `Parameter` objects stay the same, so ties and lists made of them stay valid.
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
    # Python's own hash differs from process to process; a digest is the same everywhere.
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
