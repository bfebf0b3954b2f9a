"""A grid of plans for mixtures: every division of experts over 1 to 8 ranks, and divisions beside every other axis.

Models with their gates and losses, placements and chunks take turns, in cycles of different lengths.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from terrace.model.balance import BalanceConfig
from terrace.plan.presets import PRESETS
from tests.support.parity import NO_BALANCE, Case, data_rows, exact
from tests.support.token_layouts import dealt_out
from tests.support.toys import WHOLE_ROWS, Rows, cluster_of

Sizes = tuple[int, ...]
Table = Mapping[str, Mapping[str, int]]

SIZES: tuple[Sizes, ...] = ((1,), (2,), (4,), (2, 2), (8,), (4, 2), (2, 4), (2, 2, 2))
EIGHT: Sizes = (2, 2, 2)
NUM_STEPS = 5
CHUNKS = ((1, 1), (2, 2), (4, 4), (1, 4), (4, 2))
_TIERS = ("package", "node", "system")
_BOTH, _BOUNDED = BalanceConfig(sequence=0.3, z=0.2), BalanceConfig(sequence=0.3, capacity=0.9)
_MOVED = BalanceConfig(bias=0.05, z=0.2)

# A model and its losses; of every gate, k from one to all, and all tokens for one expert of eight.
ROUTED: tuple[tuple[str, BalanceConfig], ...] = (
    ("experts", _BOTH),
    ("experts in groups", _MOVED),
    ("experts, noisy", NO_BALANCE),
    ("experts, cosine", BalanceConfig(z=0.2)),
    ("experts choose", BalanceConfig(z=0.2)),
    ("one of many experts", _BOUNDED),
    ("all experts", _BOTH),
    ("one expert for all", NO_BALANCE),
)


@dataclass(frozen=True)
class Beside:
    """Another axis, or a choice of its own, beside experts on eight ranks."""

    mapping: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    rows: Rows = WHOLE_ROWS
    models: tuple[str, ...] = ("experts", "one of many experts", "experts, cosine")
    num_micros: int = 2


_DEEP = ("deep experts", "deep experts, noisy", "deep experts choose")
_STAGES = {"node": {"pipeline": 2}}
_DOCUMENTS = Rows(23, ((5, 1, 17), (23,), (4, 4, 4, 11)))
AXES: dict[str, Beside] = {
    "tensor rows": Beside({"package": {"tensor": 2}}, {"sequence_parallel": True}),
    "tensor rows, whole stream": Beside({"package": {"tensor": 2}}, {"sequence_parallel": False}),
    "ring": Beside({"node": {"context": {"ring": 2}}}, rows=Rows(7)),
    "ulysses": Beside({"package": {"context": {"ulysses": 2}}}, rows=Rows(7)),
    "balance by cost": Beside({}, {"balance": "cost"}, _DOCUMENTS, ("wide experts",), 1),
    "documents": Beside({}, rows=_DOCUMENTS, models=("experts", "experts in groups", "experts, noisy")),
    "units, recomputed": Beside({}, {"unit": 2, "recompute": ("block.[12]",)}, models=("experts", "experts, noisy")),
    "1f1b": Beside(_STAGES, {"schedule": "1f1b", "unit": 2}, models=_DEEP, num_micros=4),
    "zb-h1": Beside(_STAGES, {"schedule": "zb-h1", "recompute": ("block.[2-5]",)}, models=_DEEP, num_micros=4),
    "zbv": Beside(_STAGES, {"schedule": "zbv"}, models=_DEEP, num_micros=4),
    "interleaved": Beside(_STAGES, {"schedule": "interleaved:2"}, models=_DEEP, num_micros=4),
}
_DIVISIONS: tuple[Table, ...] = (
    {"package": {"expert": 2}, "system": {"expert": 2}},
    {"package": {"rows": 2}, "system": {"expert": 2}},
    {"package": {"expert": 2}, "system": {"rows": 2}},
    {"system": {"expert": 2}},
)


def tables(sizes: Sizes) -> list[Table]:
    """Every division of experts on a cluster: degrees for each tier whose product divides its ranks."""
    found = list[Table]()
    for degrees in product(*(_factorings(size) for size in sizes)):
        rows = ({"rows": rows, "expert": expert} for rows, expert in degrees)
        table = {tier: {axis: n for axis, n in row.items() if n > 1} for tier, row in zip(_TIERS, rows, strict=False)}
        found.append({tier: row for tier, row in table.items() if row})
    return found


def _factorings(size: int) -> Iterator[tuple[int, int]]:
    for rows, expert in product(range(1, size + 1), repeat=2):
        if size % (rows * expert) == 0:
            yield rows, expert


def divided(sizes: Sizes) -> list[Case]:
    """Every division of experts on a cluster; on one rank, every model."""
    found = []
    every: list[tuple[Table, tuple[str, BalanceConfig] | None]] = [(table, None) for table in tables(sizes)]
    if sizes == (1,):
        every = [({}, routed) for routed in ROUTED]
    for index, (table, routed) in enumerate(every):
        turn = index + len(sizes) + sizes[0]
        model, balance = routed or ROUTED[turn % len(ROUTED)]
        plan = exact(
            list(PRESETS)[turn % len(PRESETS)], cluster_of(*sizes), experts=table, expert_chunks=_chunks(table, turn)
        )
        found.append(Case(plan, num_micros=2, model=model, balance=balance, num_steps=NUM_STEPS))
    return found


def beside(axis: str) -> list[Case]:
    """Divisions of experts on eight ranks beside another axis."""
    other, found = AXES[axis], []
    first = list(AXES).index(axis)
    for index, table in enumerate(_DIVISIONS):
        turn = index + len(_DIVISIONS) * first
        plan = exact(
            list(PRESETS)[turn % len(PRESETS)],
            cluster_of(*EIGHT),
            mapping=other.mapping,
            experts=table,
            expert_chunks=_chunks(table, turn),
            **other.changes,
        )
        found.append(
            Case(
                plan,
                num_micros=other.num_micros,
                model=other.models[index % len(other.models)],
                rows=other.rows,
                num_steps=NUM_STEPS,
                batches=dealt_out if plan.balance == "cost" else data_rows,
            )
        )
    return found


def _chunks(table: Table, turn: int) -> dict[str, int]:
    if not table:
        return {}
    forward, backward = CHUNKS[turn % len(CHUNKS)]
    # Where rows cross several tiers, one chunk ahead and all of them take turns.
    hops = sum(len(axes) for axes in table.values())
    ahead = max(1, max(forward, backward) - 1) if hops > 1 and turn // len(CHUNKS) % 2 else 1
    return {"forward": forward, "backward": backward, "ahead": ahead}
