"""What a layer keeps and takes where its experts are on several ranks: what the formula says of an even load."""

from dataclasses import replace

import pytest

from terrace.launch.start import LocalPool
from terrace.model.spec import Computes
from terrace.plan.presets import preset
from terrace.simulate.activations import block_activation_bytes
from terrace.simulate.footprint import work_of
from tests.support.context_memory import layer_memory
from tests.support.mixtures import PLAIN, mixture
from tests.support.toys import cluster_of

MODEL = mixture(replace(PLAIN, route="even"), layers=1)
SEQUENCE, BATCH = 128, 4


@pytest.mark.timeout(120)
def test_what_a_layer_keeps_where_ranks_divide_experts(pool: LocalPool) -> None:
    """Within 2 % of what autograd saves; both peaks at most 12 % above the measured ones and never below.

    With chunks the peaks are lower than the formula, which counts the messages and results of all tokens at once, by as
    much as lanes happen to end early.
    """
    cluster = cluster_of(2)
    plans = [
        replace(preset("ddp", cluster), experts={"package": degrees}, expert_chunks=chunks, micro_batch=BATCH)
        for degrees, chunks in (({"expert": 2}, {}), ({"rows": 2}, {}), ({"expert": 2}, {"forward": 2, "backward": 4}))
    ]
    by_rank = pool.run(2, layer_memory, cluster, plans, MODEL, SEQUENCE, timeout_s=100.0)
    for index, plan in enumerate(plans):
        most = 1.4 if plan.expert_chunks else 1.12
        predicted = block_activation_bytes(work_of(cluster, plan, MODEL, SEQUENCE, "cpu"), Computes.RESIDUAL, "cpu")
        for held in (results[index] for results in by_rank):
            assert sum(predicted.saved.values()) == pytest.approx(held.saved, rel=0.02)
            assert held.forward_peak <= predicted.forward_peak_bytes <= most * held.forward_peak
            assert held.backward_peak <= predicted.backward_peak_bytes <= most * held.backward_peak
