"""A case with and without states or inputs of layers below the device."""

from dataclasses import replace

import torch

from terrace.cluster.cluster import Cluster
from terrace.launch.start import LocalPool
from terrace.plan.keep import Keep
from tests.support.parity import Case, run


def check_same_bits(pool: LocalPool, cluster: Cluster, case: Case, keep: Keep) -> None:
    """Losses, gradient norms and parameters are equal bit by bit, and bytes are those of the program."""
    cases = [replace(case, plan=replace(case.plan, keep=each)) for each in (Keep(), keep)]
    before, after = run(pool, cluster, cases)
    assert not any(outcome.complaint for outcome in after), [outcome.complaint for outcome in after]
    for one, other in zip(before, after, strict=True):
        assert one.losses == other.losses
        assert one.norms == other.norms
        assert torch.equal(one.parameters, other.parameters)
