"""Bounds of a model's sizes. Needs no torch."""

from collections.abc import Mapping

from terrace.base.errors import ModelError

_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "max_positions",
)
LARGEST_SIZE = 2**31 - 1  # kernels use 32-bit indices
_LARGEST = {"num_layers": 10**5}  # every layer is a block of its own


def check_sizes(config: object, names: Mapping[str, str]) -> None:
    """Raise `ModelError` if a size of a `ModelConfig` is out of bounds, or heads are not a multiple of key-value heads.

    `names` maps fields to the keys of the family, for messages.
    """
    sizes = {name: int(getattr(config, name)) for name in _SIZES}
    for name, size in sizes.items():
        if size < 1:
            raise ModelError(f"{names.get(name, name)} = {size} must be at least 1")
        if size > (most := _LARGEST.get(name, LARGEST_SIZE)):
            raise ModelError(f"{names.get(name, name)} = {size} must be at most {most}")
    if sizes["num_heads"] % sizes["num_kv_heads"]:
        raise ModelError(
            f"{names['num_heads']} = {sizes['num_heads']} is not a multiple of "
            f"{names.get('num_kv_heads', 'num_kv_heads')} = {sizes['num_kv_heads']}: change one of them"
        )
