"""QK-clip: attention scores are bounded by scaling the matrices of queries and keys (Kimi K2, arXiv 2507.20534, section
2.1 and Algorithm 1).

With S the largest score of a head in a step, factor 1 / sqrt(D) included, and gamma = min(1, tau / S), the step ends
with

    rows of queries and keys of the head          times sqrt(gamma)
    rotated rows of latent attention's queries    times gamma: all heads share the rotated key, which is left alone
    queries of heads that share a key             times gamma: their key is left alone for the same reason

so that the scores of the step's tokens with the new parameters are gamma times as large, and no other head changes.
Biases are scaled as rows. A soft cap comes after S. No tensors.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from terrace.base.errors import PlanError
from terrace.model.operations import Delta, Norm, Product
from terrace.model.spec import BlockSpec
from terrace.plan.dims import is_layer
from terrace.plan.plan import Plan
from terrace.plan.update import parse_update

# Scores that are in memory at a time while their maximum is taken. On a CPU as many as fit a cache. On a GPU a guess:
# 256 queries of 64 heads over 4,096 keys, 128 MB in bf16.
MOST_SCORES = {"cpu": 1 << 20, "cuda": 1 << 26}

_HIDDEN_BYTES = 3  # of a pair of tokens while its mask is made

Part = tuple[int, int, float]  # (first row of a head, last row + 1, power of gamma)


@dataclass(frozen=True)
class HeadRows:
    """A parameter with `size` rows for each query head, of which those of `parts` are scaled."""

    name: str
    size: int
    parts: tuple[Part, ...]


def part_rows(before: int, most: int) -> int:
    """The largest number of queries n (at least 1) for which n (n + `before`) scores of a head are at most `most`."""
    return max(1, (math.isqrt(before**2 + 4 * most) - before) // 2)


def score_bytes(length: int, heads: int, item: int, backend: str) -> int:
    """Upper bound of the bytes of scores and masks in memory at a time, for causal rows of `length` tokens."""
    pairs = min(length**2, max(length, MOST_SCORES[backend] // heads))
    return pairs * (heads * item + _HIDDEN_BYTES)


def head_rows(block: BlockSpec) -> tuple[HeadRows, ...]:
    """The parameters that QK-clip scales in a block; none without attention whose queries and keys are products."""
    core, products = block.operations.core, {each.name: each for each in block.operations.of(Product)}
    is_latent = "key-value up" in products
    key = "key-value up" if is_latent else "key"
    if not core.heads or not {"query", key} <= products.keys():
        return ()
    if is_latent:
        unshared = products[key].outputs.size - core.value_dim
        of_query = (0, unshared, 0.5), (unshared, core.head_dim, 1.0)
        return *_rows(products["query"], *of_query), *_rows(products[key], (0, unshared, 0.5))
    if core.is_grouped:
        return _rows(products["query"], (0, core.head_dim, 1.0))
    each = (0, core.head_dim, 0.5)
    return *_rows(products["query"], each), *_rows(products[key], each)


def _rows(product: Product, *parts: Part) -> tuple[HeadRows, ...]:
    names = ["weight", *["bias"] * product.has_bias]
    return tuple(HeadRows(f"{product.weight}.{name}", product.outputs.size, parts) for name in names)


def check_score_clip(plan: Plan, blocks: Sequence[BlockSpec]) -> None:
    """Raise `PlanError` where no matrix could bound the scores of a layer, or where updates do not end a step."""
    if not parse_update(plan.update).clips_scores:
        return
    # Linear layers beside others have no scores, and normalise queries and keys.
    layers = [block for index, block in enumerate(blocks) if is_layer(blocks, index) and not block.operations.of(Delta)]
    for block in layers or blocks[:1]:
        if why := _why_not(block):
            raise PlanError(f"optimizer.qk_clip: {block.name} {why}; leave it out")
    if plan.keep.optimizer_below or plan.keep.updates_on_host or plan.keep.layer_wise:
        raise PlanError("optimizer.qk_clip beside states or updates below the device (keep): leave one of them out")


def _why_not(block: BlockSpec) -> str:
    """Why the scores of a layer cannot be bounded; "" if they can."""
    rows = {each.name for each in head_rows(block)}
    if not rows:
        return "has no softmax attention with known products for queries and keys, whose scores could be bounded"
    for norm in block.operations.of(Norm):
        if norm.name in ("query norm", "key norm"):
            return f"has a {norm.name} behind the product, so scores do not depend on the size of its matrix"
    frozen = [param.name for param in block.params if param.name in rows and not param.trainable]
    return f"does not train {frozen[0]}, which would be scaled" if frozen else ""
