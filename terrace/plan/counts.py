"""Expert statistics that the ranks of a stage all-reduce once a step: one int64 row per mixture of experts.

A row holds the token count of each expert, then how many token rows ranks sent, received and multiplied. The rows of
all mixtures are concatenated, padded so that every tier divides them, reduce-scattered from the innermost tier outward
and gathered back. With P numbers and degrees n_0, n_1, ... of the ranks with different tokens, a rank sends over tier i

    2 (n_i - 1) P / (n_0 ... n_i)

numbers a step. A stage without mixtures sends none.
"""

from collections.abc import Iterable, Sequence

from terrace.model.experts.config import ExpertsConfig
from terrace.model.spec import BlockSpec
from terrace.plan.hops import Hop
from terrace.plan.layout import Layout
from terrace.plan.wire import COUNT_BYTES, COUNT_FORMAT

OF_ROWS = ("sent", "received", "multiplied")


def num_choices(block: BlockSpec) -> int:
    """Number of experts that a block's router chooses from; 0 without a router."""
    experts = experts_of(block)
    return 0 if experts is None else experts.num_experts


def experts_of(block: BlockSpec) -> ExpertsConfig | None:
    mixture = block.declared.mixture
    return mixture.experts if mixture.each and block.has_stacks else None


def counted(blocks: Sequence[BlockSpec], indexes: Iterable[int]) -> tuple[int, ...]:
    """Those of the blocks `indexes` whose router choices are counted."""
    return tuple(index for index in indexes if num_choices(blocks[index]))


def num_counts(blocks: Iterable[BlockSpec]) -> int:
    """Length of the statistics of all mixtures in `blocks`, without padding."""
    return sum(num + len(OF_ROWS) for num in map(num_choices, blocks) if num)


def choices_bytes(block: BlockSpec) -> int:
    """Bytes of a block's per-expert token counts in a checkpoint; 0 without a mixture."""
    return COUNT_BYTES * num_choices(block)


def count_hops(layout: Layout, num: int) -> tuple[Hop, ...]:
    """Hops that reduce `num` numbers over the ranks of a stage; the gather reverses them. Empty if `num` is 0."""
    padded = layout.padded(num)
    tiers = (tier for tier in layout.inside if num and layout.degrees[tier] > 1)
    return tuple(Hop(tier, layout.degrees[tier], COUNT_FORMAT, padded // layout.span(tier)) for tier in tiers)
