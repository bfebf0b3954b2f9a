"""Words about unequal members: their devices, and what shares of a batch bring."""

from typing import TYPE_CHECKING

from terrace.base.words import counted, seconds
from terrace.cluster.cluster import Cluster
from terrace.cluster.members import Member
from terrace.plan.wire import BETWEEN_STAGES

if TYPE_CHECKING:  # commands that show a cluster need no planner
    from terrace.planner.members import Deal


def devices_words(cluster: Cluster) -> str:
    tier, words = cluster.tiers[-1], list[str]()
    for each in tier.members or (Member(count=tier.size),):
        number = each.count * cluster.world_size // tier.size
        speed = "" if each.speed == 1 else f" at {each.speed:g} of its speed"
        words.append(f"{number} x {(each.device or cluster.device).name}{speed}")
    return " + ".join(words)


def unequal_words(cluster: Cluster, deal: "Deal | None") -> str:
    """The shares, what equal ones would take, and who waits; why there are none; "" if members are alike."""
    tier = cluster.tiers[-1]
    if len(cluster.alike) == 1:
        return ""
    if deal is None:
        return (
            f"members of tier {tier.name} differ, and no plan with shares is faster: equal ones suit the speeds, the "
            "batch has fewer micro-batches than members, or messages cross the tier in every micro-batch"
        )
    shares, longest_s = deal.plan.shares, max(deal.waits_s)
    if not shares:
        more = f", order = {list(deal.plan.order)}" if deal.plan.order else ""
        for message in BETWEEN_STAGES:
            name = deal.plan.wire.get(message.value, {}).get(tier.name, "")
            more += f", wire.{message.value}.{tier.name} = {name!r}" if name else ""
        return (
            f"stages = {list(deal.plan.stages)}{more} of a pipeline of the {counted(tier.size, 'member')} of tier "
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
