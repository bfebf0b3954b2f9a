"""Detects runs with too few messages for an outer momentum or a sparse format to settle.

A momentum m averages over 1 / (1 - m) exchanges. A sparse format that keeps one of N elements sends an element every N
messages on average. Both need about ten times as many messages to settle.
"""

from terrace.cluster.cluster import Cluster
from terrace.plan.layout import Layout
from terrace.plan.plan import Plan
from terrace.plan.wire import CHANGES, MessageClass

_FEWEST = 10.0  # time constants, after which exp(-10) of the initial value is left


def few_exchanges(cluster: Cluster, plan: Plan, num_steps: int) -> str:
    """Notice for a run of `num_steps` steps with numbers and a remedy; "" if there are enough messages."""
    outer, found = plan.outer, list[str]()
    # The last step of a run exchanges everything that is still pending.
    num_exchanges = -(-num_steps // outer.every)
    if outer.beta:
        remembered = 1.0 / (1.0 - outer.beta)
        if num_exchanges < round(_FEWEST * remembered, 6):
            words = f"outer.momentum = {outer.beta:g} remembers {remembered:.3g} exchanges of a block"
            found.append(f"{words}, and the run has {num_exchanges}")
    for message, name, kept_of in _sparse(cluster, plan):
        num = num_exchanges if message is MessageClass.OUTER else num_steps
        if num < _FEWEST * kept_of:
            words = f"wire.{message.value} = {name!r} sends an element every {kept_of} messages in the mean"
            found.append(f"{words}, and the run has {num} of a block")
    if not found:
        return ""
    every = f" (one exchange every {outer.every})" * outer.has_islands
    fewer = ", a smaller outer.every, a lower outer.momentum" * outer.has_islands
    sparse = ", denser messages" * bool(_sparse(cluster, plan))
    return (
        f"few exchanges in {num_steps} steps{every}: {'; '.join(found)}. Ten times as many let them settle: use more "
        f"steps{fewer}{sparse}"
    )


def _sparse(cluster: Cluster, plan: Plan) -> list[tuple[MessageClass, str, int]]:
    """(Class, format, N) of each class with a format that keeps one of N elements; the sparsest of its tiers."""
    layout, found = Layout.of(cluster, plan), list[tuple[MessageClass, str, int]]()
    for message in CHANGES:
        tiers = (tier for tier, degree in zip(layout.tiers, layout.degrees, strict=True) if degree > 1)
        formats = [plan.wire_format(message, tier) for tier in tiers]
        sparsest = max(formats, key=lambda each: each.kept_of, default=None)
        if sparsest is not None and sparsest.kept_of:
            found.append((message, sparsest.name, sparsest.kept_of))
    return found
