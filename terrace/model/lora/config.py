"""Low-rank adapters (LoRA, Hu et al. 2106.09685): targets, and specs of a model with adapters. Needs no torch.

A target is the matrix W (out, in) of a linear layer. W is frozen; A (rank, in) and B (out, rank) are trained:

    y = x W^T + b + (alpha / rank) x A^T B^T

Everything except the adapters is frozen: it has no gradients and no optimizer states, and the compute dtype. With a
`base` all matrices of linear layers, targets or not, are held in that format instead (terrace.model.base_formats).
The modules are in `terrace.model.lora.modules`.
"""

import fnmatch
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from terrace.base.alike import once_each
from terrace.base.errors import ConfigError, ModelError, did_you_mean
from terrace.model.base_formats import BASE_FORMATS
from terrace.model.params import STACKED, ParamSpec
from terrace.model.spec import BlockSpec

DOWN, UP = "lora_a", "lora_b"  # parameters A and B, next to the weight of a target
_WEIGHT = ".weight"


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """The section `[lora]` of a run. Raises `ConfigError` for invalid values."""

    rank: int  # of the two matrices of an adapter
    alpha: float = 16.0  # an adapter counts alpha / rank times
    targets: tuple[str, ...] = ("layers.*",)  # patterns over block.parameter: weights of linear layers
    base: Literal["nf4"] | None = None  # format of the frozen matrices of layers; None: plan.compute

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"lora.rank = {self.rank} must be at least 1; leave [lora] out to train the model itself")
        if not 0 < self.alpha < 1e9:
            raise ConfigError(f"lora.alpha = {self.alpha} must be a positive number below 1e9")
        if not self.targets:
            raise ConfigError('lora.targets is empty: name weights, such as "layers.*.attention.*", or leave it out')

    @property
    def scale(self) -> float:
        """Factor of the adapter's output, alpha / rank."""
        return self.alpha / self.rank


def is_adapter(param: str) -> bool:
    """Whether a parameter, by its name inside a block, belongs to an adapter."""
    return param.rpartition(".")[2] in (DOWN, UP)


def adapter_names(weight: str) -> tuple[str, str]:
    """Names inside a block of A and B for the target `weight`."""
    module = weight.removesuffix(_WEIGHT)
    return f"{module}.{DOWN}", f"{module}.{UP}"


def targets(blocks: Sequence[BlockSpec], lora: LoraConfig) -> set[tuple[str, str]]:
    """(block, weight) of every target in the `blocks` of a decoder without adapters.

    Only weights of linear layers are targets; other parameters that a pattern matches are ignored. Raises `ModelError`
    for a pattern that matches no such weight, or that matches experts or their router.
    """
    routed = [f"{block.name}.{param.name}" for block in blocks for param in block.params if _is_routed(param)]
    for pattern in lora.targets:
        if found := fnmatch.filter(routed, pattern):
            raise ModelError(
                f"lora.targets pattern {pattern!r} matches {found[0]}, and adapters on experts or their router are not "
                'implemented: name other weights, such as "layers.*.attention.*"'
            )
    names = {
        f"{block.name}.{param.name}": (block.name, param.name)
        for block in blocks[1:-1]
        for param in block.params
        if _is_linear(param)
    }
    # A pattern without a match is probably a typing error.
    for pattern in lora.targets:
        if not fnmatch.filter(names, pattern):
            raise ModelError(
                f"lora.targets pattern {pattern!r} matches no weight of a linear layer{did_you_mean(pattern, names)}"
            )
    return {
        where for name, where in names.items() if any(fnmatch.fnmatchcase(name, pattern) for pattern in lora.targets)
    }


def _is_linear(param: ParamSpec) -> bool:
    # Stacks of experts and the short convolutions of linear layers (features, 1, taps) are no matrices.
    return param.is_matrix and param.decays and param.name.endswith(_WEIGHT) and not _is_routed(param)


def _is_routed(param: ParamSpec) -> bool:
    return bool(param.dims) and param.dims[0][0] in (STACKED, "choices", "router")


def with_adapters(blocks: Sequence[BlockSpec], lora: LoraConfig) -> tuple[BlockSpec, ...]:
    """Freeze `blocks` and add adapters to the targets; parameters are in the order of `named_parameters`."""
    chosen = targets(blocks, lora)
    _check_rank(blocks, chosen, lora.rank)
    weights = [frozenset(weight for name, weight in chosen if name == block.name) for block in blocks]
    codes = ["", *[lora.base or ""] * (len(blocks) - 2), ""]  # of the matrices of layers
    # Equal layers keep sharing one tuple of parameters.
    adapted = once_each(
        lambda each: tuple(_adapted(*each, lora.rank)),
        [(block.params, own, code) for block, own, code in zip(blocks, weights, codes, strict=True)],
    )
    return tuple(replace(block, params=params) for block, params in zip(blocks, adapted, strict=True))


def _check_rank(blocks: Sequence[BlockSpec], chosen: Collection[tuple[str, str]], rank: int) -> None:
    # A rank above the smaller side adds parameters but no expressiveness. The error names the matrix with the smallest
    # side, since a rank that fits it fits all.
    matrices = [param for block in blocks for param in block.params if (block.name, param.name) in chosen]
    least = min(matrices, key=lambda param: min(param.shape), default=None)
    if least is not None and rank > min(least.shape):
        out_size, in_size = least.shape
        raise ModelError(
            f"lora.rank = {rank} exceeds the smaller side of {least.name} ({out_size} x {in_size}): use at most "
            f"{min(least.shape)}, or leave the matrix out of lora.targets"
        )


def _frozen(param: ParamSpec, code: str) -> ParamSpec:
    if not code or not _is_linear(param):
        return replace(param, trainable=False)
    block, in_size = BASE_FORMATS[code].block, param.shape[-1]
    if in_size % block:
        raise ModelError(
            f"lora.base = {code!r} holds rows of matrices in blocks of {block} elements, and {param.name} has rows of "
            f"{in_size}: leave lora.base out"
        )
    return replace(param, trainable=False, code=code)


def _adapted(params: Sequence[ParamSpec], weights: frozenset[str], code: str, rank: int) -> Iterator[ParamSpec]:
    pending: list[ParamSpec] = []
    for param in params:
        module = param.name.rpartition(".")[0]
        if pending and pending[0].name.rpartition(".")[0] != module:  # after a bias, if the layer has one
            yield from pending
            pending = []
        yield _frozen(param, code)
        if param.name in weights:
            (out_size, in_size), (down, up) = param.shape, adapter_names(param.name)
            out_dim, in_dim = param.dims or (("", out_size), ("", in_size))
            pending = [
                ParamSpec(name=down, shape=(rank, in_size), dims=(("rank", rank), in_dim)),
                ParamSpec(name=up, shape=(out_size, rank), dims=(out_dim, ("rank", rank))),
            ]
    yield from pending
