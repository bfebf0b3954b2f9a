"""Contract 1: the same numbers under every plan as in one plain PyTorch process.

A preset added to terrace.plan.presets is tested here; another world is one entry in `FACTORINGS`. A preset
that is the same plan as an earlier one on some cluster (ZeRO++ on one tier is ZeRO-3) is not run twice.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from terrace.launch.start import LocalPool
from terrace.plan.plan import Plan
from terrace.plan.presets import PRESETS, preset
from tests.support.nightly import nightly
from tests.support.parity import NUM_STEPS, TOLERANCE, Case, Outcome, check, deviation, exact, run, serial, serial_bf16
from tests.support.toys import cluster_of, with_wires

Sizes = tuple[int, ...]

FACTORINGS: list[Sizes] = [(1,), (2, 3)]
THREE_TIERS: Sizes = (2, 2, 2)
NIGHTLY_FACTORINGS: list[Sizes] = [(2,), (3,), (1, 4), (3, 2), (8,)]
# bf16 keeps 8 bits, and the order of sums differs: after a few steps losses near 2.5 agree to this.
BF16_LOSS_BOUND = 0.01
# AdamW divides by the gradient's own size, so a wrong scale shows through eps alone: a fault is seen at this.
FAULT_FLOOR = 100 * TOLERANCE

pytestmark = pytest.mark.timeout(360)


def rows(factorings: list[Sizes]) -> Iterator[tuple[str, Sizes]]:
    """Every preset on every world, without repetitions of the same plan."""
    for sizes in factorings:
        seen: list[Plan] = []
        for name in PRESETS:
            plan = replace(preset(name, cluster_of(*sizes)), name="")
            if plan not in seen:
                seen.append(plan)
                yield name, sizes


# Those that a third tier changes: the others do on it what they do on two.
OF_THREE_TIERS = ("hsdp", "three-level", "three-level-compressed")
EVERY_DAY = [*rows(FACTORINGS[:1]), ("zero3", (2, 3)), *((name, THREE_TIERS) for name in OF_THREE_TIERS)]
EVERY_NIGHT = [row for row in rows([*FACTORINGS, THREE_TIERS, *NIGHTLY_FACTORINGS]) if row not in EVERY_DAY]


def text(value: object) -> str | None:
    return "x".join(map(str, value)) if isinstance(value, tuple) else None


@pytest.mark.parametrize(
    ("name", "sizes"),
    [*EVERY_DAY, *nightly(*EVERY_NIGHT)],
    ids=text,
)
def test_every_preset_equals_one_process(pool: LocalPool, name: str, sizes: Sizes) -> None:
    """Of three micro-batches one is neither the first nor the last; of three steps, the third starts from moments of a
    step that itself started from some. Eight ranks, which take long, recompute in both of two micro-batches.
    """
    cluster = cluster_of(*sizes)
    again = exact(name, cluster, recompute=("*",))
    if cluster.world_size == 8:
        check(pool, cluster, [Case(again, num_micros=2, num_steps=3)])
    else:
        check(pool, cluster, [Case(exact(name, cluster), num_steps=3), Case(again, num_micros=3)])


def test_every_preset_is_run_somewhere() -> None:
    assert {name for name, _ in EVERY_DAY} == PRESETS.keys() - {"mics"}
    cluster = cluster_of(2, 2, 2)
    assert replace(preset("mics", cluster), name="hsdp") == preset("hsdp", cluster)


OPTIONED = [
    ("zero++", (1, 2, 2)),
    *nightly(
        ("zero3", (2, 2)),
        ("zero++", (1, 1, 2)),  # its secondary copy is whole
        ("three-level", (2, 2, 2)),
    ),
]


@pytest.mark.parametrize("half", [0, *nightly(1)])
@pytest.mark.parametrize(("name", "sizes"), OPTIONED, ids=text)
def test_schedule_options_change_no_number(pool: LocalPool, name: str, sizes: Sizes, half: int) -> None:
    cluster = cluster_of(*sizes)
    some = ("block.1", "*.4")
    cases = [
        Case(exact(name, cluster, prefetch=3, recompute=some), num_micros=2),
        Case(exact(name, cluster, prefetch=0), num_micros=2),
        Case(exact(name, cluster, unit=2, recompute=some, prefetch=0), num_micros=3),
        Case(exact(name, cluster, prefetch=3)),
        Case(exact(name, cluster, prefetch=1, recompute=some), num_micros=2),
        Case(exact(name, cluster, unit=4), num_micros=2),
    ]
    check(pool, cluster, cases[half::2])


@pytest.mark.parametrize("name", ["zero2", *nightly("three-level", "ddp", "zero1", "zero3", "zero++")])
def test_no_number_depends_on_when_the_lane_runs(pool: LocalPool, name: str) -> None:
    plan = exact(name, cluster_of(1, 2, 2))
    check(pool, cluster_of(1, 2, 2), [Case(plan, num_micros=2, lane=lane) for lane in ("eager", "lazy")])


@pytest.mark.parametrize("model", ["llama tied", *nightly("gpt2", "gpt_neox")])
def test_decoder_equals_one_process(pool: LocalPool, model: str) -> None:
    plan = exact("three-level", cluster_of(2, 2, 2), recompute=("block.1",))
    check(pool, cluster_of(2, 2, 2), [Case(plan, num_micros=2, model=model)])


@pytest.mark.parametrize("name", ["three-level", *nightly("ddp", "zero3")])
def test_bf16_stays_close_to_one_process_in_bf16(pool: LocalPool, name: str) -> None:
    plan = replace(preset(name, cluster_of(2, 2)), compute="bf16")
    cases = [Case(one, num_micros=2, model="llama tied") for one in (plan, replace(plan, unit=2))]
    for outcomes in run(pool, cluster_of(2, 2), cases):
        found = deviation(outcomes, serial_bf16("llama tied"))
        assert 0 < found["loss"] < BF16_LOSS_BOUND, found
        assert not outcomes[0].complaint


def rounded(name: str, sizes: Sizes) -> Plan:
    """A preset in fp32 whose every message travels in bf16."""
    cluster = cluster_of(*sizes)
    plan = preset(name, cluster)
    return with_wires(cluster, plan, "bf16")


def num_distinct(outcomes: list[Outcome]) -> int:
    """Number of ranks whose parameters differ in some bit from those of all ranks before."""
    seen: list[torch.Tensor] = []
    for outcome in outcomes:
        if not any(torch.equal(outcome.parameters, other) for other in seen):
            seen.append(outcome.parameters)
    return len(seen)


@pytest.mark.parametrize("name", ["three-level", *nightly("zero++", "ddp", "zero1", "zero3", "hsdp")])
def test_replicas_stay_identical_when_messages_round(pool: LocalPool, name: str) -> None:
    sizes = (2, 1, 2)  # where every kind of message of three levels is sent
    plan = rounded(name, sizes)
    whole, again = run(pool, cluster_of(*sizes), [Case(plan), Case(plan, sabotage="unrounded_own_part")])
    assert num_distinct(whole) == 1
    assert num_distinct(again) > 1, "the comparison must see a rank that keeps its own part unrounded"
    assert deviation(whole, serial("toy", 4))["loss"] < 0.01
    assert not whole[0].complaint


FAULTS = [
    ("wrong_divisor", "zero2", ("loss", "norm")),
    ("stale_refresh", "three-level", ("loss", "parameters")),
    *nightly(
        ("wrong_divisor", "ddp", ("loss", "norm")),
        ("wrong_scale", "zero3", ("parameters",)),
        ("skipped_reduce", "zero3", ("norm", "parameters")),
        ("stale_refresh", "zero1", ("loss", "parameters")),
    ),
]


@pytest.mark.parametrize(("fault", "name", "quantities"), FAULTS)
def test_comparison_sees_a_fault(pool: LocalPool, fault: str, name: str, quantities: tuple[str, ...]) -> None:
    plan = exact(name, cluster_of(2, 2))
    (outcomes,) = run(pool, cluster_of(2, 2), [Case(plan, num_micros=2, sabotage=fault)])
    found = deviation(outcomes, serial("toy", 8))
    assert all(found[quantity] > FAULT_FLOOR for quantity in quantities), found


def test_ledger_sees_what_the_formula_does_not_declare(pool: LocalPool) -> None:
    plan = exact("zero3", cluster_of(2, 2))
    cases = [Case(plan, num_micros=2, sabotage=fault) for fault in ("uncounted_byte", "skipped_reduce")]
    one_byte, one_message = run(pool, cluster_of(2, 2), cases)
    assert deviation(one_byte, serial("toy", 8))["parameters"] < TOLERANCE
    for rank, outcome in enumerate(one_byte):
        assert f"rank {rank} sent" in outcome.complaint
        assert f"bytes of reduce on tier 'node' in {NUM_STEPS} steps, but the programs declare" in outcome.complaint
        sent, declared = (int(word) for word in outcome.complaint.split() if word.isdigit() and len(word) > 1)
        assert sent == declared + 1
    assert all("of reduce on tier" in outcome.complaint for outcome in one_message)
