"""Parameters and FLOPs of a block's operations. Pure: needs no torch."""

from collections.abc import Iterator
from functools import lru_cache

from terrace.model import operations as ops
from terrace.model.experts.config import ExpertsConfig
from terrace.model.params import STACKED, ParamSpec

_ONE = ops.Dim("channels", 1)  # a convolution reads one feature for each that it writes


@lru_cache(maxsize=256)
def params_of(operations: ops.Operations) -> tuple[ParamSpec, ...]:
    """Parameters of a block, in the order of `named_parameters` of its module.

    Within a submodule its own parameters come first, then matrices, then norms, as in its constructor.
    """
    modules: dict[str, list[tuple[int, list[ParamSpec]]]] = {}
    ends = any(isinstance(operation, ops.Loss | ops.Score) for operation in operations)
    for operation in operations:
        found = _params(operation)
        module = "" if ends or not found else found[0].name.partition(".")[0]
        place = 0 if isinstance(operation, ops.Core | ops.Delta) else 2 if isinstance(operation, ops.Norm) else 1
        modules.setdefault(module, []).append((place, found))
    ordered = (found for own in modules.values() for _, found in sorted(own, key=lambda each: each[0]))
    return tuple(param for found in ordered for param in found)


def _params(operation: ops.Operation, *, is_stacked: bool = False) -> list[ParamSpec]:
    match operation:
        case ops.Norm():
            parts = ("weight", "bias") if operation.kind == "layer" else ("weight",)
            return [_param(f"{operation.weight}.{part}", operation.over) for part in parts]
        case ops.Product():
            stack = (ops.Dim(STACKED, operation.stack),) if is_stacked else ()
            found = [_param(f"{operation.weight}.weight", *stack, operation.outputs, operation.inputs)]
            bias = [_param(f"{operation.weight}.bias", *stack, operation.outputs)]
            return found + bias if operation.has_bias else found
        case ops.Core():
            return [_param(operation.sinks, ops.Dim("heads", operation.heads))] if operation.sinks else []
        case ops.Convolution():
            return [
                _param(f"{operation.weight}.weight", operation.source.features, _ONE, ops.Dim("taps", operation.taps))
            ]
        case ops.Delta():
            heads = ops.Dim("heads", operation.heads)
            return [_param(operation.log_decay, heads), _param(operation.decay_bias, operation.decays)]
        case ops.Mixture():
            return list(_mixture_params(operation))
        case ops.LookUp():
            hidden = operation.target.features
            if not operation.owns:
                return []
            found = [_table(operation.weight, operation.vocabulary, hidden)]
            positions = ops.Dim("positions", operation.positions)
            return [*found, _param("positions", positions, hidden)] if operation.positions else found
        case ops.Loss():
            hidden = operation.source.features._replace(size=1)
            return [_table(operation.weight, operation.vocabulary, hidden)] if operation.owns else []
        case ops.Score():
            # Replicated on all tensor ranks, as are the hidden states before it.
            features = operation.source.features._replace(counts="features")
            return [_param(f"{operation.weight}.weight", operation.target.features, features)]
        case _:
            return []


def _mixture_params(mixture: ops.Mixture) -> Iterator[ParamSpec]:
    yield from _router_params(mixture.experts, (mixture.hidden.counts, mixture.hidden.units))
    for operation in mixture.each:
        yield from _params(operation, is_stacked=True)  # also with a single expert
    for operation in (*mixture.shared, *mixture.shared_gate):
        yield from _params(operation)


def _router_params(experts: ExpertsConfig, hidden: tuple[str, int]) -> list[ParamSpec]:
    """Parameters of a mixture's router for tokens of size `hidden`, in order. No optimizer updates the bias."""
    choices, size = ("choices", experts.num_experts), ("router", experts.router_size)
    dims: dict[str, tuple[tuple[str, int], ...]] = {"weight": (choices, size if experts.router_size else hidden)}
    if experts.has_biases:
        dims["logit_bias"] = (choices,)
    if experts.gate == "noisy":
        dims["noise"] = (choices, hidden)
    if experts.gate == "cosine":
        dims |= {"projection": (size, hidden), "temperature": (("temperature", 1),)}
    if experts.biased:
        dims["bias"] = (choices,)
    return [
        ParamSpec(
            name=f"mlp.router.{name}",
            shape=tuple(each for _, each in of),
            dims=of,
            trainable=name != "bias",
            is_expert_bias=name == "bias",
        )
        for name, of in dims.items()
    ]


def _table(name: str, vocabulary: int, hidden: ops.Dim) -> ParamSpec:
    # "features": rows stay whole under axes that cut the residual stream ("hidden").
    return _param(name, ops.Dim("vocab", vocabulary), hidden._replace(counts="features"))


def _param(name: str, *dims: ops.Dim) -> ParamSpec:
    return ParamSpec(
        name=name, shape=tuple(dim.numel for dim in dims), dims=tuple((dim.counts, dim.units) for dim in dims)
    )


def active_numel(operations: ops.Operations, param: ParamSpec) -> int:
    """Elements of a parameter that are active for one token: all, or those of the chosen experts.

    0 for a stack of experts if the block does not declare how many experts a token has.
    """
    if not param.is_stack:
        return param.numel
    return param.numel // param.num_parts * operations.mixture.experts.per_token if operations.mixture.each else 0


@lru_cache(maxsize=4096)
def forward_flops(operations: ops.Operations, batch_size: int, sequence: int) -> int:
    """FLOPs of the matrix products in one forward pass on (B, S) tokens.

    A product of (m, k) and (k, n) counts 2mnk; only the chosen experts of a token count. Attention counts the full
    S x S square, 2 B S^2 for each element of a query and of a value, as published FLOP counts do, although a causal
    kernel may skip half of it. Biases, norms, activations, RoPE and the embedding look-up are not counted.
    """
    tokens = batch_size * sequence
    return sum(2 * tokens * _multiplications(operations, each, sequence) for each in operations)


def _multiplications(operations: ops.Operations, operation: ops.Operation, sequence: int) -> int:
    """Multiplications per token."""
    match operation:
        case ops.Core():
            return sequence * operation.heads * (operation.head_dim + operation.value_dim)
        case ops.Convolution():
            return operation.taps * operation.source.features.numel
        case ops.Delta():
            return operation.multiplications
        case ops.PlainProduct():
            return operation.source.features.numel * operation.target.features.numel
        case ops.LookUp():
            return 0
        case ops.Loss():
            return 0 if operation.only_reads else operation.source.features.numel * operation.vocabulary
        case _:
            return sum(active_numel(operations, param) for param in _params(operation) if param.is_matrix)
