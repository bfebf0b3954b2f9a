"""The numbers that the ranks of a stage add up once a step for its mixtures of experts: int64, a row for each.

A row has the tokens of each expert, then the rows of tokens that ranks sent, received and multiplied on their way. The
numbers of all mixtures stand one after the other, padded so that every tier divides them, and are summed from the
innermost tier outward and gathered back: with P numbers and degrees n_0, n_1, ... of the ranks with different tokens, a
rank sends over tier i

    2 (n_i - 1) P / (n_0 ... n_i)

numbers a step. Only mixtures send any.
"""

from collections.abc import Iterable, Sequence

from terrace.model.experts.config import ExpertsConfig
from terrace.model.spec import BlockSpec
from terrace.plan.hops import Hop
from terrace.plan.layout import Layout
from terrace.plan.wire import COUNT_BYTES, COUNT_FORMAT

OF_ROWS = ("sent", "received", "multiplied")


def experts_of(block: BlockSpec) -> ExpertsConfig | None:
    """The mixture of a block; None where it has none."""
    mixture = block.declared.mixture
    return mixture.experts if mixture.each and block.has_stacks else None


def mixtures(blocks: Sequence[BlockSpec], indexes: Iterable[int]) -> tuple[int, ...]:
    """The blocks among `indexes` that have a mixture."""
    return tuple(index for index in indexes if experts_of(blocks[index]) is not None)


def num_counts(blocks: Iterable[BlockSpec]) -> int:
    """Numbers of the mixtures of `blocks`."""
    return sum(experts.num_experts + len(OF_ROWS) for experts in map(experts_of, blocks) if experts is not None)


def choices_bytes(block: BlockSpec) -> int:
    """Bytes of the tokens of each expert of a block, as a checkpoint has them; 0 without a mixture."""
    experts = experts_of(block)
    return 0 if experts is None else COUNT_BYTES * experts.num_experts


def count_hops(layout: Layout, num: int) -> tuple[Hop, ...]:
    """The hops of the reduction of `num` numbers over the ranks of a stage; a gather takes them back. None of none."""
    padded = layout.padded(num)
    tiers = (tier for tier, degree in enumerate(layout.degrees) if num and degree > 1 and tier <= layout.island)
    return tuple(Hop(tier, layout.degrees[tier], COUNT_FORMAT, padded // layout.span(tier)) for tier in tiers)
