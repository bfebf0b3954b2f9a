"""Gradient messages cut into parts, sent in the gaps between a layer's expert messages.

`Plan.expert_gaps` is the share of a block's gradient in each part. Part 0 is sent where the whole message would be,
part g in gap g of the backward that follows (terrace.program.block_program.routed): with b chunks, gaps 1 .. b overlap
the matmuls of a chunk, and gap b + 1, after the last combine, overlaps attention.

A part is a range of columns of a flat buffer. With P padded elements and n ranks in an island, view the buffer as
(n, F = P / n), one slice per row; part p is columns [a_p, b_p). Every rank sends the same share on every hop, and each
element is summed over the same peers in the same order as in one message, so sums in a dtype are bitwise equal. REDUCE
and SYNC are cut at the same columns, so that each part of a SYNC can follow its part of the REDUCE.

Parts begin at multiples of 8 blocks of the wire formats. 8 blocks are a multiple of the 16 bytes that messages are
padded to, so the parts have as many bytes in total as one message. Rounding in a block format depends on the cut.
"""

from itertools import accumulate

from terrace.plan.hops import arena_bytes, gather_buffers, reduce_buffers
from terrace.plan.layout import Layout
from terrace.plan.plan import Plan
from terrace.plan.routes import block_hops
from terrace.plan.wire import FORMATS, GRADIENTS, ROUTES, MessageClass

_BLOCKS = 8  # of 16 elements and 4 bits at least, with a scale of 2 bytes each: a multiple of 16 bytes

Columns = tuple[int, int]  # (start, stop)


def shares_words(plan: Plan) -> str:
    """The shares of gradients in gaps, worded as the end of a sentence; "" if there are none."""
    shares = ", ".join(f"{share:.3g}" for share in plan.gap_shares)
    return f"; gradients in the gaps of experts' messages, in parts of {shares}" if shares else ""


def gaps_words(asked: Plan, found: Plan) -> str:
    """Notice if `expert_gaps = "auto"` found no shares worth using; "" otherwise."""
    if not asked.finds_gaps or found.expert_gaps:
        return ""
    return (
        'expert_gaps = "auto" takes none: no share of the gradients in the gaps of the experts makes a step noticeably '
        "shorter"
    )


def part_columns(plan: Plan, layout: Layout, padded: int) -> tuple[Columns, ...]:
    """(Start, stop) columns of each part of a flat buffer with `padded` elements; a part can be empty."""
    shares, size = plan.gap_shares, padded // slices_of(layout)
    tiers = [tier for tier, degree in zip(layout.tiers, layout.degrees, strict=True) if degree > 1]
    unit = max((_BLOCKS * plan.wire_format(each, tier).block for each in GRADIENTS for tier in tiers), default=0) or 1
    last = max((part for part, share in enumerate(shares) if share), default=0)
    ends = [min(size, int(size * total)) // unit * unit for total in accumulate(shares)]
    ends[last:] = [size] * (len(ends) - last)
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def slices_of(layout: Layout) -> int:
    """Number of slices that each part cuts across: one per rank of an island."""
    return layout.span(layout.tier_of("island"))


def part_buffers(plan: Plan, layout: Layout, message: MessageClass, numel: int) -> tuple[list[int], list[int]]:
    """Bytes of each buffer for the reduction and the gather of a part with `numel` elements, in order.

    The columns of a part are not contiguous, so they are packed before they are sent.
    """
    reduction, gathering = block_hops(layout, plan, message, numel)
    route, summed = ROUTES[message], FORMATS[plan.sums].element_bytes
    held = FORMATS[plan.compute].element_bytes if message is MessageClass.REDUCE else summed
    reduced, gathered = list[int](), list[int]()
    if reduction and route.reduction is not None:
        packed = numel // layout.span(layout.tier_of(route.reduction[0])) * held
        reduced = [packed, *reduce_buffers(plan, message, reduction)]
    if gathering and route.gathering is not None:
        packed = numel // layout.span(layout.tier_of(route.gathering[1])) * summed
        gathered = [packed, *gather_buffers(plan, message, gathering)]
    return reduced, gathered


def largest_part_bytes(plan: Plan, layout: Layout, message: MessageClass, padded: int) -> int:
    """Bytes of message buffers for the largest part of a flat buffer; 0 if gradients are not cut into parts."""
    if not plan.expert_gaps or message not in GRADIENTS:
        return 0
    sizes = {stop - start for start, stop in part_columns(plan, layout, padded)}
    buffers = (part_buffers(plan, layout, message, size * slices_of(layout)) for size in sizes)
    return max(max(map(arena_bytes, each)) for each in buffers)
