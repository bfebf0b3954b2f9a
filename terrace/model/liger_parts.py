"""Installs kernels of `liger-kernel` as attributes of a decoder's modules.

When a tensor axis replaces a norm, it moves the kernel to the new module (terrace.runtime.tensor.apply).
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from terrace.base.errors import ConfigError
from terrace.model import layers, liger
from terrace.model.decoder import Head
from terrace.model.layers import MLP, Attention, RMSNorm
from terrace.model.part_kernel import GATED, PARTS, Part, PartChoice
from terrace.model.rotary import Rotary

DEVICES = ("cuda",)  # supported devices; a test adds the CPU, for Triton's interpreter
_KERNELS = (liger.rms_norm, liger.rotate_both, liger.to_gradient, *liger.GATED.values())


@dataclass(frozen=True)
class _Place:
    """An attribute `name` of the object `owner` that computes a part, and the kernel to put there."""

    part: Part
    owner: object
    name: str
    kernel: Any


def serve(
    blocks: Iterable[nn.Module], choice: PartChoice, device: torch.device, parts: Collection[Part] = PARTS
) -> dict[Part, int]:
    """Install the kernels of `choice` for `parts` of `blocks`. Returns the number of modules changed, by part.

    Kernels are set on instances, not on classes. Raises `ConfigError` if the kernels of "liger" cannot run.
    """
    if choice == "torch":
        return {}
    if device.type not in DEVICES:
        raise ConfigError(f"train.kernels = {choice!r} cannot serve on {device}: its kernels are for CUDA")
    if reason := liger.why_missing():
        raise ConfigError(f"train.kernels = {choice!r} cannot serve: {reason}; leave train.kernels out")
    number = dict[Part, int]()
    for place in (each for each in _places(blocks) if each.part in parts):
        object.__setattr__(place.owner, place.name, place.kernel)
        number[place.part] = number.get(place.part, 0) + 1
    return number


def is_served(owner: object, name: str) -> bool:
    """Whether an attribute of a module is a liger kernel, which needs no compilation."""
    found = vars(owner).get(name)
    return getattr(found, "func", found) in _KERNELS


def any_served(blocks: Iterable[nn.Module]) -> bool:
    """Whether any part of `blocks` is computed by a liger kernel."""
    return any(is_served(place.owner, place.name) for place in _places(blocks))


def _places(blocks: Iterable[nn.Module]) -> Iterator[_Place]:
    for each in (each for block in blocks for each in block.modules()):
        if isinstance(each, RMSNorm):
            yield _Place("norms", each, "normal", liger.rms_norm)
        elif isinstance(each, MLP) and each.gate is not None and _activation(each) in GATED:
            yield _Place("gated activations", each, "_gated", liger.GATED[_activation(each)])
        elif isinstance(each, Head):
            yield _Place("loss", each, "to_gradient", liger.to_gradient)
        elif isinstance(each, Attention) and isinstance(each.rotary, Rotary):
            kernel = partial(liger.rotate_both, each.rotary.dim)
            yield _Place("rotary positions", each.rotary, "rotate_both", kernel)  # one object serves all layers


def _activation(module: MLP) -> str:
    return next(name for name, function in layers.ACTIVATIONS.items() if function is module.activation)
