"""Declares the dims of a `transformers` model's parameters, so that tensor and context axes can be used with it.

A tensor axis shards parameters along dims of heads, inner features or vocabulary, which the declaration names. A
context axis shards the tokens of a row and must replace attention: the module that has the output projection uses
terrace.model.attention while a block runs, and its own implementation in the model's own forward.

A declaration is verified before use: every parameter has dims, projections are `nn.Linear`, norms agree with the
modules by which a tensor axis replaces them, and blocks with terrace.model.attention reproduce the model's logits.
"""

import copy
import fnmatch
import importlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terrace.base.errors import ModelError, did_you_mean
from terrace.model.attention_plans import DeclaredAttention
from terrace.model.blocks import block_specs
from terrace.model.config import parse_model
from terrace.model.hf.names import sources
from terrace.model.params import ParamSpec
from terrace.model.spec import BlockSpec

_HEADS, _KV_HEADS = "heads", "kv_heads"
_COUNTED = ("hidden", "intermediate", "vocab", "head_dim", "positions")  # a unit is one element
_IMPLEMENTATION, _ORIGINAL = "terrace", "sdpa"
_SITE = "terrace_attention"  # plain attribute of the attention module, not a child module
_EPSILONS = ("eps", "variance_epsilon")
_NORM_TOLERANCE = 1e-4  # for values near 1; 16-bit norms differ in the last bit


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """Quantities of the dims of a decoder's parameters. Raises `ModelError` for an unknown quantity.

    - `heads`, `kv_heads`: numbers of query heads and key-value heads; `kv_heads` is `heads` by default;
    - `dims`: pattern over the model's parameter names -> one quantity per dim: `hidden` (the residual stream), `heads`,
      `kv_heads`, `intermediate` (the inner size of the MLP), `vocab`, `head_dim` or `positions`.
    """

    heads: int
    kv_heads: int | None = None
    dims: Mapping[str, Sequence[str]]

    def __post_init__(self) -> None:
        for name, number in ((_HEADS, self.heads), (_KV_HEADS, self.kv_heads)):
            if number is not None and number < 1:
                raise ModelError(f"{name} = {number} of a declaration must be at least 1")
        for pattern, names in self.dims.items():
            for name in names:
                if name not in (_HEADS, _KV_HEADS, *_COUNTED):
                    raise ModelError(
                        f"dims[{pattern!r}] counts {name!r}, which no axis knows"
                        f"{did_you_mean(name, (_HEADS, _KV_HEADS, *_COUNTED))}"
                    )

    @classmethod
    def of(cls, model: nn.Module) -> "Declaration":
        """The declaration of a `transformers` model of a family that `terrace train --model` reads, from its config.

        Raises `ModelError` for another family, for one whose tensors hold several projections or experts, and for
        parameters that the family has not, as adapters and the wrappers of DDP and `torch.compile` bring them.
        """
        config = getattr(model, "config", None)
        if not isinstance(model, nn.Module) or not hasattr(config, "to_json_string"):
            raise ModelError(
                f"{type(model).__qualname__} is no transformers model, which has a config: give the model itself, such "
                "as the .module of a wrapper, or write its declaration (docs/declaring.md)"
            )
        config = parse_model(json.loads(cast(Any, config).to_json_string()))
        stored, dims = sources(config), dict[str, Sequence[str]]()
        for block in block_specs(config):
            for param in block.params:
                source = stored[block.name, param.name]
                if source.parts or source.transposed or source.num_stacked:
                    raise ModelError(
                        f"{source.name} of {config.family} holds several projections or experts, or is transposed, and "
                        "a declaration names whole dims: train it with terrace train --model FOLDER"
                    )
                # One pattern for all layers, which have the same names.
                pattern = re.sub(r"\.\d+\.", ".*.", source.name)
                dims[pattern] = tuple("hidden" if counted == "features" else counted for counted, _ in param.dims)
        made = cls(heads=config.num_heads, kv_heads=config.num_kv_heads, dims=dims)
        for name, weight in model.named_parameters():
            try:
                made.dims_of(name, tuple(weight.shape))
            except ModelError as error:
                raise ModelError(
                    f"{type(model).__qualname__} is not {config.family} as its config says: {name} "
                    f"{list(weight.shape)} has no dims there; give the whole model without adapters or wrappers"
                ) from error
        return made

    def dims_of(self, name: str, shape: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
        """(quantity, units) of each dim of the parameter `name`. Raises `ModelError` unless one pattern fits."""
        fitting = [pattern for pattern in self.dims if fnmatch.fnmatchcase(name, pattern)]
        if len(fitting) != 1:
            found = " and ".join(repr(pattern) for pattern in fitting) if fitting else "no pattern"
            raise ModelError(
                f"{name} {list(shape)} fits {found} of the declaration, and must fit one: declare its dims there"
            )
        names = self.dims[fitting[0]]
        if len(names) != len(shape):
            raise ModelError(
                f"{name} has the shape {list(shape)}, and dims[{fitting[0]!r}] names {len(names)} dims: name each"
            )
        # "features": embedding and output matrix keep whole rows, even if an axis shards the residual stream.
        of_table = "features" if "vocab" in names else "hidden"
        return tuple(
            (of_table if each == "hidden" else each, self._units(name, each, size))
            for each, size in zip(names, shape, strict=True)
        )

    def _units(self, name: str, counted: str, size: int) -> int:
        if counted not in (_HEADS, _KV_HEADS):
            return size
        units = self.heads if counted == _HEADS or self.kv_heads is None else self.kv_heads
        if size % units:
            raise ModelError(
                f"{name} has a dim of {size} declared as {counted}, and {counted} = {units} does not divide it: "
                "correct the number or the dims"
            )
        return units


def declared_specs(blocks: Sequence[nn.Module], declaration: Declaration) -> tuple[BlockSpec, ...]:
    """Specs of the blocks of `terrace.blocks_of`, with the dims of `declaration`."""
    owners: dict[int, int] = {}
    specs = []
    for index, block in enumerate(blocks):
        names: Any = block.original_names
        own = [
            (name, param) for name, param in block.named_parameters() if owners.setdefault(id(param), index) == index
        ]
        params = tuple(
            ParamSpec(name=name, shape=tuple(param.shape), dims=declaration.dims_of(names[name], tuple(param.shape)))
            for name, param in own
        )
        specs.append(BlockSpec(name=str(block.block_name), params=params))
    _check_sizes(specs)
    return tuple(specs)


def _check_sizes(specs: Sequence[BlockSpec]) -> None:
    # A quantity has the same size everywhere; for heads and key-value heads this is the size of a head.
    first: dict[str, tuple[int, str]] = {}
    for spec in specs:
        for param in spec.params:
            for size, (counted, units) in zip(param.shape, param.dims, strict=True):
                key, own = ("hidden" if counted == "features" else counted), size
                if counted in (_HEADS, _KV_HEADS):
                    key, own = "a head", size // units
                known, where = first.setdefault(key, (own, f"{spec.name}.{param.name}"))
                if known != own:
                    raise ModelError(
                        f"{spec.name}.{param.name} {list(param.shape)} gives {key} the size {own}, and {where} "
                        f"{known}: correct the dims of one of them"
                    )


def attend_as_declared(layer: nn.Module, spec: BlockSpec, prefix: str, window: int, what: str) -> DeclaredAttention:
    """Make a layer use terrace.model.attention while its block runs. Names in `spec` begin with `prefix`.

    Raises `ModelError` unless the layer has exactly one output projection of heads and its attention can be replaced.
    """
    dims = {param.name.removeprefix(prefix): [name for name, _ in param.dims] for param in spec.params}
    outputs = [name for name, names in dims.items() if names == ["hidden", _HEADS]]
    if len(outputs) != 1:
        raise ModelError(
            f"{spec.name} of {what} has {len(outputs)} parameters with the dims (hidden, heads), and must have one: "
            "declare the output projection of attention so"
        )
    module: Any = layer.get_submodule(outputs[0].rpartition(".")[0].rpartition(".")[0])
    config = getattr(module, "config", None)
    if getattr(config, "_attn_implementation", None) not in (_ORIGINAL, _IMPLEMENTATION):
        raise ModelError(
            f"{type(module).__name__} of {what} does not attend by attn_implementation = {_ORIGINAL!r}: load the model "
            "with it"
        )
    grouped = any(names[0] == _KV_HEADS for names in dims.values())
    attention = DeclaredAttention(window, grouped)
    _register()
    # A copy, since the model's own forward creates masks from the shared configuration.
    module.config = copy.copy(config)
    module.config._attn_implementation = _IMPLEMENTATION
    module.__dict__[_SITE] = attention
    return attention


def _register() -> None:
    # Imported here, since transformers is needed only for its own models.
    utils = importlib.import_module("transformers.modeling_utils")
    utils.AttentionInterface.register(_IMPLEMENTATION, _attention)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Attention function with the interface of `transformers`: heads (B, N, S, D) to (B, S, N, D)."""
    attention: DeclaredAttention = module.__dict__[_SITE]
    if not attention.is_running:
        functions = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
        found: tuple[Tensor, Tensor | None] = functions[_ORIGINAL](module, query, key, value, attention_mask, **options)
        return found
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise ModelError(
                f"{type(module).__name__} attends with {name}, which declared attention does not have: leave the "
                "declaration out"
            )
    window = options.get("sliding_window") or 0
    if window != attention.window:
        raise ModelError(
            f"{type(module).__name__} attends within {window or 'all'} tokens, and its configuration says "
            f"{attention.window or 'all'}: leave the declaration out"
        )
    if options.get("dropout"):
        raise ModelError(
            f"{type(module).__name__} drops {options['dropout']} of its scores: set attention_dropout to 0"
        )
    return attention(query, key, value, options.get("scaling")).transpose(1, 2).contiguous(), None


def check_modules(block: nn.Module, spec: BlockSpec, what: str) -> dict[str, float]:
    """Verify the modules of a block. Returns the epsilon of each norm by module name.

    Raises `ModelError` for a module that a tensor axis could not replace with an equivalent one.
    """
    epsilons: dict[str, float] = {}
    for param in spec.params:
        name, _, ending = param.name.rpartition(".")
        module = block.get_submodule(name)
        counted = [each for each, _ in param.dims]
        if len(counted) == 1 and ending == "weight":
            epsilons[name] = _checked_norm(module, f"{spec.name}.{name}", what)
        elif (
            len(counted) == 2
            and "vocab" not in counted
            and type(module) is not nn.Linear
            and "positions" not in counted
        ):
            raise ModelError(
                f"{spec.name}.{name} of {what} is a {type(module).__name__}: a declared matrix belongs to an nn.Linear"
                "; leave the declaration out"
            )
    return epsilons


@torch.no_grad()
def _checked_norm(module: Any, name: str, what: str) -> float:
    eps = next((float(found) for key in _EPSILONS if isinstance(found := getattr(module, key, None), float)), None)
    if eps is None:
        raise ModelError(
            f"{name} of {what} is declared as a norm and has no epsilon ({' or '.join(_EPSILONS)}): leave the "
            "declaration out"
        )
    weight, bias = module.weight, getattr(module, "bias", None)
    x = torch.linspace(-1.5, 2.0, 3 * weight.numel(), dtype=weight.dtype, device=weight.device).view(3, -1)
    # Weights other than one, to detect modules that multiply by 1 + weight.
    before = weight.detach().clone()
    try:
        weight.copy_(torch.linspace(0.5, 1.5, weight.numel()))
        found = module(x)
        wanted = normed(x, weight, bias, eps)
    finally:
        weight.copy_(before)
    if found.shape != x.shape or (found - wanted).abs().max() > (_NORM_TOLERANCE if x.dtype.itemsize > 2 else 0.05):
        raise ModelError(
            f"{name} of {what} is a {type(module).__name__} that computes neither torch's rms_norm nor its layer_norm, "
            "which a tensor axis would put in its place: leave the declaration out"
        )
    return eps


def normed(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """RMS norm, or with a bias layer norm, of torch."""
    if bias is None:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.layer_norm(x, weight.shape, weight, bias, eps)
