"""Formats of `plan.products`; their rules are in terrace.plan.products."""

import re
from dataclasses import dataclass
from functools import lru_cache

from terrace.base.errors import PlanError, did_you_mean

FP8 = "fp8"
NAMES = (FP8, f"{FP8}:row", f"{FP8}+e4m3", f"{FP8}:row+e4m3")


@dataclass(frozen=True)
class ProductFormat:
    """The format of products: `by_row` scales rows, else whole operands; `gradients` is e5m2 or e4m3."""

    name: str
    by_row: bool
    gradients: str


@lru_cache(maxsize=16)
def parse_products(text: str) -> ProductFormat:
    """The format named by `text`; raises `PlanError` for an unknown one."""
    found = re.fullmatch(r"fp8(:row)?(?:\+(e4m3))?", text)
    if found is None:
        raise PlanError(f"products = {text!r} is no format of products{did_you_mean(text, NAMES)}")
    return ProductFormat(text, found[1] is not None, found[2] or "e5m2")
