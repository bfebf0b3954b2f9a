"""Checks that shapes agree."""

from torch import Tensor

from terrace.base.errors import DataError


def check_shapes(**tensors: Tensor) -> None:
    """Raise `DataError` unless all shapes are equal: torch would broadcast a scalar over the others."""
    first, *others = tensors
    for name in others:
        if tensors[name].shape != tensors[first].shape:
            raise DataError(
                f"{name} of shape {tuple(tensors[name].shape)} beside {first} of shape {tuple(tensors[first].shape)}: "
                "must be the same"
            )
