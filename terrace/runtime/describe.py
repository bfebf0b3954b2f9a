"""Block specs of modules, and the replacement of their parameters by views of flat buffers.

A parameter that two blocks share (a tied embedding) belongs to the first; the later block is tied to it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from terrace.base.errors import ModelError
from terrace.model.params import ParamSpec
from terrace.model.spec import BlockSpec, freeze


def describe(blocks: Sequence[nn.Module], names: Sequence[str], frozen: Sequence[str] = ()) -> tuple[BlockSpec, ...]:
    """Specs of `blocks`.

    `frozen` holds patterns matched against `block.parameter`; parameters without `requires_grad` are frozen too.
    Raises `ModelError` for a pattern without a match.
    """
    owners: dict[int, int] = {}
    specs = []
    for index, (block, name) in enumerate(zip(blocks, names, strict=True)):
        params: list[ParamSpec] = []
        tied_to: list[int] = []
        for param_name, param in block.named_parameters():
            # The first block in which a parameter appears owns it.
            owner = owners.setdefault(id(param), index)
            if owner == index:
                shape = tuple(param.shape)
                params.append(ParamSpec(name=param_name, shape=shape, trainable=param.requires_grad))
            elif owner not in tied_to:
                tied_to.append(owner)
        specs.append(BlockSpec(name=name, params=tuple(params), tied_to=tuple(tied_to)))
    return freeze(specs, frozen)


def with_dims(specs: Sequence[BlockSpec], declared: Sequence[BlockSpec]) -> tuple[BlockSpec, ...]:
    """`specs` with the parameter dims and codes and the computations of `declared`, specs of the same blocks.

    Raises `ModelError` if parameters differ in name or shape.
    """
    if not declared:
        return tuple(specs)
    result = []
    for spec, other in zip(specs, declared, strict=True):
        dims = {param.name: param for param in other.params}
        for param in spec.params:
            if param.name not in dims or dims[param.name].shape != param.shape:
                raise ModelError(
                    f"{spec.name}.{param.name} {param.shape} is not what its block declares: {other.params}; "
                    "mend the declaration"
                )
        params = tuple(
            replace(param, dims=own.dims, is_expert_bias=own.is_expert_bias, code=own.code)
            for param, own in ((param, dims[param.name]) for param in spec.params)
        )
        result.append(replace(other, name=spec.name, params=params, tied_to=spec.tied_to))
    return tuple(result)


def replace_parameters(blocks: Sequence[nn.Module], replacements: Mapping[int, nn.Parameter]) -> None:
    """Replace parameters in place, under all their names. `replacements` maps ids of old parameters to new ones."""
    for block in blocks:
        for module in block.modules():
            # Duplicates included: a tied parameter is replaced under each of its names.
            for name, old in list(module.named_parameters(recurse=False, remove_duplicate=False)):
                setattr(module, name, replacements[id(old)])
