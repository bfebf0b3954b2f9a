"""Checks and names a user's blocks for an engine, and broadcasts their values."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from terrace.base.errors import ConfigError, ModelError
from terrace.base.schema import dump
from terrace.comm.byte_views import as_bytes
from terrace.model.spec import BlockSpec
from terrace.runtime.gathered import gather_plain


def named(blocks: object) -> tuple[list[str], list[nn.Module]]:
    """Names and modules of `blocks`. Raises `ModelError` for blocks that a trainer cannot take."""
    # A whole model gives no order in which its modules run.
    if isinstance(blocks, nn.Module) and not isinstance(blocks, (nn.Sequential, nn.ModuleList)):
        raise ModelError(
            f"blocks is one {type(blocks).__name__}: give the list of modules that run one after the other, such as "
            "[embedding, *layers, head] (terrace.blocks_of makes it of a transformers model)"
        )
    if isinstance(blocks, (Mapping, nn.ModuleDict)):
        names, modules = [str(name) for name in blocks], list(blocks.values())
    else:
        modules = list(blocks)  # type: ignore[call-overload]
        names = [getattr(block, "block_name", f"block.{index}") for index, block in enumerate(modules)]
    if not modules:
        raise ModelError("blocks is empty: give at least one module")
    for name, module in zip(names, modules, strict=True):
        if not isinstance(module, nn.Module):
            raise ModelError(f"block {name} is a {type(module).__name__}, not a torch.nn.Module: wrap it in one")
        for key, tensor in module.named_parameters():
            if tensor.device.type == "meta":
                raise ModelError(f"{name}.{key} is on the meta device: give the blocks values first (to_empty, load)")
    # Reversed, so that the first name of a repeated module wins.
    first = {id(module): name for name, module in zip(reversed(names), reversed(modules), strict=True)}
    for name, module in zip(names, modules, strict=True):
        if first[id(module)] != name and any(True for _ in module.parameters()):
            raise ModelError(
                f"blocks {first[id(module)]} and {name} are the same module: give each its own (copy.deepcopy); two "
                "modules may hold the same parameter"
            )
    # Checkpoints and parameters are addressed by block name.
    if len(set(names)) < len(names):
        raise ModelError(f"two blocks have the same name: {names}; give each its own")
    return names, modules


def places(names: Sequence[str], blocks: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, str, tuple[str, str]]]:
    """Yields every parameter as (module, attribute, (block, parameter) of its owner)."""
    owners: dict[int, tuple[str, str]] = {}
    for block_name, block in zip(names, blocks, strict=True):
        for name, param in block.named_parameters():
            # The first block that holds a shared parameter owns it.
            owners.setdefault(id(param), (block_name, name))
    for block in blocks:
        for module in block.modules():
            # Every place counts here, so that a tied parameter is replaced in all of them.
            for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
                yield module, name, owners[id(param)]


def declared_of(blocks: Sequence[nn.Module]) -> tuple[BlockSpec, ...]:
    """The specs of blocks that `terrace.blocks_of` made with a declaration; empty if any block has none."""
    found = [getattr(block, "declared", None) for block in blocks]
    return tuple(spec for spec in found if isinstance(spec, BlockSpec)) if None not in found else ()


def hidden_dims(specs: Sequence[BlockSpec], activation: tuple[int, int] | None) -> tuple[BlockSpec, ...]:
    """The specs with dims of the hidden size marked as "hidden", which gives the size of a pipeline's messages."""
    if activation is None:
        return ()

    def dims(shape: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
        return tuple(("hidden" if size == activation[1] else "size", size) for size in shape)

    found = tuple(
        replace(spec, params=tuple(replace(param, dims=dims(param.shape)) for param in spec.params)) for spec in specs
    )
    if not any(name == "hidden" for spec in found for param in spec.params for name, _ in param.dims):
        raise ConfigError(f"activation = {activation}: no parameter has a dim of {activation[1]}; give the hidden size")
    return found


def spread(blocks: Sequence[nn.Module], specs: Sequence[BlockSpec], device: torch.device) -> None:
    """Broadcasts rank 0's values. Raises `ModelError` if a rank has other blocks."""
    # Compared first: broadcasts of different shapes would hang.
    everyone = gather_plain([dump(spec) for spec in specs], device)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise ModelError(f"rank {rank} has other blocks than rank 0: make the same ones on every rank")
    seen = set()
    with torch.no_grad():
        for block in blocks:
            for tensor in (*block.parameters(), *block.buffers()):
                # A shared tensor is sent once.
                if id(tensor) not in seen and tensor.numel():
                    seen.add(id(tensor))
                    moved = tensor.detach().to(device, copy=True).contiguous()
                    dist.broadcast(moved, 0)
                    tensor.copy_(moved)


def move_buffers(blocks: Sequence[nn.Module], device: torch.device) -> None:
    """Moves the buffers of blocks to a device. Parameters move when an engine takes them."""
    for module in (module for block in blocks for module in block.modules()):
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device != device:
                module._buffers[name] = buffer.to(device)


def digest(tensor: Tensor) -> str:
    """Hash of a tensor's values and shape."""
    # Bytes are viewed, so any dtype can be hashed; the shape is part of the digest.
    values = as_bytes(tensor.detach().cpu().reshape(-1))
    return hashlib.sha256(values.numpy().tobytes()).hexdigest() + str(tuple(tensor.shape))
