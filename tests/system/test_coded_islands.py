"""Coded messages of islands on one tier, each of which adds up a share or all of them, and a second implementation."""

from dataclasses import replace

import pytest

from terrace.launch.start import LocalPool
from terrace.plan.outer import Outer
from tests.support.nightly import nightly
from tests.support.outer_cases import as_it_arrives, check
from tests.support.outer_exchanges import Summed, Whole
from tests.support.parity import Case, exact
from tests.support.toys import cluster_of

IN_TURNS = Outer(tier="package", every=4, fragments=2, delay=1, keep=0.5)
WAITED_FOR = Outer(tier="package", every=2)
ISLANDS_OF_TWO = replace(IN_TURNS, tier="node")


@pytest.mark.parametrize(
    ("sizes", "outer", "wire"),
    [
        ((3,), IN_TURNS, "int4+feedback"),
        ((2,), IN_TURNS, "int4+feedback"),
        *nightly(
            ((3,), WAITED_FOR, "int8"),
            ((3,), IN_TURNS, "topk+feedback"),
            ((4,), IN_TURNS, "int4+feedback"),
            ((4,), WAITED_FOR, "fp8+feedback"),
            ((2, 3), ISLANDS_OF_TWO, "int4+feedback"),
            ((2, 4), ISLANDS_OF_TWO, "int4+feedback"),
            ((2, 3), ISLANDS_OF_TWO, "topk+feedback"),
        ),
    ],
    ids=str,
)
def test_rings_of_coded_changes_equal_a_simulation_that_codes_them(
    pool: LocalPool, sizes: tuple[int, ...], outer: Outer, wire: str
) -> None:
    cluster, code = cluster_of(*sizes), as_it_arrives(wire.partition("+")[0])
    name = "ddp" if len(sizes) == 1 else "zero1"
    inside = {"optimizer": "package" if len(sizes) > 1 else "device"}
    made = replace(exact(name, cluster, outer=outer, **inside), wire={"outer": {outer.tier: wire}})
    case = Case(made, num_steps=3 * outer.every + 1)
    # Two islands have no need of a share each.
    form = Whole if wire.startswith("topk") or sizes[-1] == 2 else Summed
    inner = cluster.world_size // sizes[-1]
    check(pool, cluster, [case], exchange=form(code, ranks_inside=inner, feedback=wire.endswith("feedback")))
    # An exact mean, or what rounding left over, is told from it.
    wrong = [form(lambda row: row, ranks_inside=inner)]
    wrong += [form(code, ranks_inside=inner)] if wire.endswith("feedback") else []
    for other in wrong:
        with pytest.raises(AssertionError):
            check(pool, cluster, [case], exchange=other)
