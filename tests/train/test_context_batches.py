"""Every rank's part of a step: all labels once, each with its token and its position, under every plan."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.ragged import write_tokens
from terrace.cluster.cluster import Cluster
from terrace.data.batches import Batches, Source
from terrace.data.block_sums import write_sums
from terrace.data.samples import IGNORED
from terrace.plan.context import ContextGroup, local_tokens
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.sequence.cost import WorkCost
from terrace.train.context_batches import ContextBatches, LocalMicro, evenness, ring_seconds
from tests.support.toys import cluster_of

SEQUENCE, BATCH, STEPS = 24, 8, 2
LENGTHS = [25, 3, 9, 2, 14, 40, 1, 7, 25, 18, 5, 2, 30, 11, 6, 25] * 6
COST = WorkCost(links=(), pair_s=1.0, key_bytes=4.0, query_bytes=4.0, token_s=2.0)

Seen = tuple[int, int, int, int]  # token, label, position, place in the run


def batches(folder: Path, documents: str) -> Batches:
    """Rows of one way to make them; no two tokens are alike."""
    tokens = write_tokens(folder, LENGTHS, 2)
    np.arange(sum(LENGTHS)).astype("<u2").tofile(tokens.path)
    tokens = replace(tokens, sums_digest=write_sums(tokens))
    source = Source(tokens=tokens, documents=documents, too_long="split")  # type: ignore[arg-type]
    return Batches([source], SEQUENCE, BATCH, seed=1)


def plan_of(cluster: Cluster, **changes: object) -> Plan:
    return replace(preset("ddp", cluster), **changes)  # type: ignore[arg-type]


def parts_of(made: Batches, cluster: Cluster, plan: Plan) -> dict[int, list[LocalMicro]]:
    """The parts of all ranks of two steps, one after the other."""
    cost = replace(COST, links=WorkCost.of(cluster, heads=1, kv_heads=1, head_dim=1, compute="fp32").links)
    num_micros = BATCH // (plan.micro_batch * Mesh.of(cluster, plan).total("data"))
    of_ranks = {}
    for rank in range(cluster.world_size):
        spreading = ContextBatches(made, cluster, plan, num_micros, rank, cost)
        steps = [spreading.step(step, with_places=True) for step in range(STEPS)]
        assert all(step.balance >= 1 - 1e-12 for step in steps)
        of_ranks[rank] = [micro for step in steps for micro in step.micros]
    return of_ranks


def seen(micros: Sequence[LocalMicro]) -> list[Seen]:
    """The tokens with a label."""
    found = []
    for micro in micros:
        assert micro.places is not None
        arrays = (micro.inputs, micro.labels, micro.positions, micro.places)
        rows = zip(*(each[0].tolist() for each in arrays), strict=True)
        found += [row for row in rows if row[1] != IGNORED]
    return sorted(found)


def expected(made: Batches) -> list[Seen]:
    found = []
    for step in range(STEPS):
        inputs, labels, *rest = made.rows(step, np.arange(made.batch))
        positions = rest[0] if rest else np.broadcast_to(np.arange(SEQUENCE), inputs.shape)
        found += [
            (int(x), int(y), int(at), step * inputs.size + place)
            for place, (x, y, at) in enumerate(zip(inputs.flat, labels.flat, positions.flat, strict=True))
            if y != IGNORED
        ]
    return sorted(found)


def taking_part(made: Batches) -> list[int]:
    """Places of the tokens of all documents with a label."""
    parts = [(step * BATCH + row, each) for step in range(STEPS) for row, each in enumerate(made.parts(step))]
    return [row * SEQUENCE + place for row, documents in parts for span in documents for place in range(*span)]


@pytest.mark.parametrize("documents", ["whole", "separate", "join"])
@pytest.mark.parametrize(
    ("sizes", "plan"),
    [
        ((2, 2), {"mapping": {"package": {"context": {"ulysses": 2}}, "node": {"context": {"ring": 2}}}}),
        ((4, 2), {"mapping": {"package": {"context": {"ulysses": 2, "ring": 2}}}, "micro_batch": 2}),
        ((2, 2), {"balance": "cost"}),
        ((2, 2, 2), {"balance": "cost", "mapping": {"package": {"context": {"ulysses": 2}}}, "micro_batch": 2}),
        ((3, 2), {"balance": "cost", "mapping": {"package": {"context": {"ring": 3}}}}),
    ],
)
def test_all_ranks_together_have_every_label_once(
    tmp_path: Path, documents: str, sizes: Sequence[int], plan: dict[str, object]
) -> None:
    cluster, made = cluster_of(*sizes), batches(tmp_path, documents)
    chosen = plan_of(cluster, **plan)
    of_ranks = parts_of(made, cluster, chosen)
    held = local_tokens(chosen, Mesh.of(cluster, chosen), SEQUENCE)
    for rank, micros in of_ranks.items():
        for micro in micros:
            assert micro.inputs.shape == micro.labels.shape == micro.positions.shape == (1, held)
            assert micro.token_layout.num_local_tokens == held
            assert ContextGroup.of(cluster, chosen, rank).members[micro.token_layout.member] == rank
    of_all = [micro for micros in of_ranks.values() for micro in micros]
    assert seen(of_all) == expected(made)
    places = np.concatenate([micro.places for micro in of_all if micro.places is not None], axis=1)[0]
    assert sorted(places[places >= 0].tolist()) == taking_part(made)


def test_the_cost_of_a_ring_is_that_of_its_chunks() -> None:
    parts = ((0, 5), (5, 6), (8, 20))  # a gap is a document, too
    pairs = np.zeros((20, 20))
    for start, stop in (*parts, (6, 8)):
        for query in range(start, stop):
            pairs[query, start : query + 1] = 1
            pairs[query, query] = 0.5  # of which areas, L L / 2, count a half
    for ring, places in ((1, [range(20)]), (2, [[*range(5), *range(15, 20)], [*range(5, 15)]])):
        wanted = [COST.whole_pair_s * pairs[list(rows)].sum() for rows in places]
        assert ring_seconds(parts, 20, ring, COST) == pytest.approx(wanted)


def test_evenness_is_of_the_busiest_place() -> None:
    assert evenness([[1.0, 1.0], [2.0, 2.0]], 0.0) == 1.0
    assert evenness([[3.0, 1.0], [0.0, 2.0]], 0.0) == pytest.approx((3 + 2) / (2 + 1))
    assert evenness([[3.0, 1.0]], 2.0) == pytest.approx(5 / 4)
    assert evenness([[0.0, 0.0]], 0.0) == 1.0
