"""Words about unequal members: what shares of a batch bring."""

from terrace.base.words import counted, seconds
from terrace.cluster.cluster import Cluster
from terrace.planner.members import Deal


def unequal_words(cluster: Cluster, deal: Deal | None) -> str:
    """The shares, what equal ones would take, and who waits; why there are none; "" if members are alike."""
    tier = cluster.tiers[-1]
    if len(cluster.alike) == 1:
        return ""
    if deal is None:
        return (
            f"members of tier {tier.name} differ, and no plan that was found can have shares: the batch has fewer "
            "micro-batches than members, or messages cross the tier in every micro-batch"
        )
    shares, longest_s = deal.plan.shares, max(deal.waits_s)
    if not shares:
        return (
            f"stages = {list(deal.plan.stages)} of a pipeline of the {counted(tier.size, 'member')} of tier "
            f"{tier.name}: step {seconds(deal.estimate.step_s)}, with the stages of equal members "
            f"{seconds(deal.even_s)}, so {deal.gain:.2f} times the tokens a second"
        )
    each = f"shares = {list(shares)} of the {counted(tier.size, 'member')} of tier {tier.name}"
    if len(set(shares)) == 1:
        return f"{each}: no others are faster"
    return (
        f"{each}: step {seconds(deal.estimate.step_s)}, with equal shares {seconds(deal.even_s)}, so {deal.gain:.2f} "
        f"times the tokens a second; member {deal.waits_s.index(longest_s)} waits longest for the slowest, "
        f"{seconds(longest_s)} a step"
    )
