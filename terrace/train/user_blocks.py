"""A user's blocks for an engine: checked, named, their values broadcast before and gathered after training."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from terrace.base.boxes import Box, whole, within
from terrace.base.errors import ConfigError, ModelError
from terrace.base.schema import dump
from terrace.checkpoint.parts import parts_of, slices_of
from terrace.comm.exchange import as_bytes, gather_plain
from terrace.model.spec import BlockSpec
from terrace.runtime.engine import Engine


class UserBlocks:
    """A user's modules, which run one after the other, with the places of their parameters.

    `dtypes` has each parameter's own dtype, by block and name. Raises `ModelError` for blocks that a trainer cannot
    take.
    """

    def __init__(self, blocks: object) -> None:
        self.names, self.modules = named(blocks)
        # Kept for `put_back`.
        self._places = list(places(self.names, self.modules))
        self.dtypes = {key: module.get_parameter(name).dtype for module, name, key in self._places}

    def full_name(self, block: str, name: str) -> str:
        """The name of a parameter in the model that the blocks were made of, else `block.name`."""
        module = self.modules[self.names.index(block)]
        original: Mapping[str, str] = getattr(module, "original_names", {})
        return original.get(name, f"{block}.{name}")

    def put_back(self, values: Mapping[tuple[str, str], Tensor], specs: Sequence[BlockSpec]) -> None:
        """Makes plain parameters of whole values, in the dtypes and places that they had."""
        trained = {(spec.name, param.name): param.trainable for spec in specs for param in spec.params}
        fresh = {
            key: nn.Parameter(value.to(self.dtypes[key]), requires_grad=trained[key]) for key, value in values.items()
        }
        for module, name, key in self._places:
            setattr(module, name, fresh[key])


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
    # Bytes are viewed, so any dtype can be hashed; the shape is part of the digest.
    values = as_bytes(tensor.detach().cpu().reshape(-1))
    return hashlib.sha256(values.numpy().tobytes()).hexdigest() + str(tuple(tensor.shape))


def whole_values(engine: Engine) -> Iterator[tuple[str, str, Tensor]]:
    """Yields (block, parameter, value) of the whole model on every rank: CPU tensors, in the master dtype if trained.

    With islands these are the anchor's values, which every island holds after `Engine.finish`. Every rank calls this
    and consumes all of it. One block is in flight at a time: each rank sends the boxes of which it is the first holder,
    as for a checkpoint.
    """
    # Refreshes of the last step may still write parameters.
    engine.drain()
    slices = slices_of(engine.program.mesh, engine.rank)
    for index, spec in enumerate(engine.state.specs):
        boxes: list[tuple[str, Box]] = []
        values: list[Tensor] = []
        # Only the first holder of a box sends it, so nothing travels twice.
        shapes = {param.name: param.shape for param in spec.params}
        for _, part in parts_of(engine.state.flats.get(index, ()), slices, first=True, own=False):
            if part.parameter not in shapes:  # states of optimizers beside the parameters
                continue
            value = next(iter(part.values.values()))  # the first kind of state is the value
            boxes.append((part.parameter, part.box))
            values.append(value.detach().to("cpu", copy=True))
        found: dict[str, Tensor] = {}
        # Boxes of all ranks together tile each parameter.
        everywhere = zip(engine.comm.exchange(boxes), engine.comm.exchange_tensors(values), strict=True)
        for boxes_there, values_there in everywhere:
            for (name, plain), value in zip(boxes_there, values_there, strict=True):
                box = tuple((begin, end) for begin, end in plain)
                if name not in found:
                    found[name] = torch.empty(shapes[name], dtype=value.dtype)
                found[name][within(box, whole(shapes[name]))].copy_(value)
        for name, shape in shapes.items():
            yield spec.name, name, found.get(name, torch.empty(shape))  # one without elements is nobody's
