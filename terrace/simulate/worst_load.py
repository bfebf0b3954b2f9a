"""Worst-case memory of experts beyond what a plan counts."""

import math

from terrace.model.spec import BlockSpec
from terrace.simulate.footprint import LOAD_FACTOR
from terrace.simulate.fullest import Job, fullest_stage


def worst_words(job: Job, blocks: tuple[BlockSpec, ...], sequence: int) -> str:
    """Sentence on the extra memory if all choices fall on one rank's experts; "" for none."""
    if not job.plan.experts:
        return ""
    expected, worst = (fullest_stage(job, blocks, sequence, load=load)[1] for load in (LOAD_FACTOR, math.inf))
    more = sum(worst.values()) - sum(expected.values())
    if more <= 0:
        return ""
    return (
        f"rows of a rank's experts are counted at {LOAD_FACTOR:g} times their mean; "
        f"{more / 1e9:.3g} GB more if all choices of all ranks fall on them"
    )
