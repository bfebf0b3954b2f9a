"""Sizes of a mixture on one rank, without a plan."""

from typing import Any

from terrace.plan.expert_traffic import ExpertTraffic
from terrace.plan.wire import FORMATS


def traffic_of(tokens: int, choices: tuple[int, int], hidden: int, dtype: str = "fp32", **more: Any) -> ExpertTraffic:
    """Traffic of tokens that choose `choices` = (k, E) experts; rows travel in `dtype` unless `more` names formats."""
    per_token, num_experts = choices
    num_tiers, item_bytes = max(len(more["expert"]), len(more.get("rows", ()))), FORMATS[dtype].element_bytes
    uncoded = (FORMATS[dtype],) * num_tiers
    given: dict[str, Any] = {"dispatch": uncoded, "combine": uncoded, "rows": (1,) * num_tiers} | more
    return ExpertTraffic(
        tokens=tokens,
        num_experts=num_experts,
        per_token=per_token,
        num_choices=per_token,
        hidden=hidden,
        item_bytes=item_bytes,
        weight_bytes=item_bytes,
        **given,
    )
