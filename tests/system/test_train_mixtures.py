"""Mixtures of experts under every plan whose ranks hold all experts: the numbers of one process.

Here are placements, pipelines, the context axis and checkpoints; Lion and Muon are in tests/runtime/test_optimizers.py,
adapters in tests/system/test_lora.py.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from terrace.checkpoint.reading import Checkpoint, restore, resume
from terrace.checkpoint.writing import save
from terrace.launch.start import LocalPool, World
from terrace.model.balance import BalanceConfig
from terrace.plan.plan import Plan
from terrace.plan.presets import PRESETS, preset
from tests.support.checkpoints import contents, differing, make, train
from tests.support.nightly import nightly
from tests.support.parity import Case, check, data_rows, deviation, exact, run, serial_bf16
from tests.support.pipelines import OUTER, case_of, covering_rows, pipelined
from tests.support.token_layouts import dealt_out
from tests.support.toys import Rows, cluster_of

Sizes = tuple[int, ...]

MIXTURES = ("mixture tied", "mixture, grouped", "mixture, shared expert", "mixture, frozen experts")
OPTIONS: tuple[dict[str, Any], ...] = (
    {"recompute": ("*",)},
    {"unit": 2, "prefetch": 0},
    {},
    {"unit": 2, "prefetch": 3, "recompute": ("block.2",)},
)
DOCUMENTS = ((5, 1, 17), (23,), (4, 4, 4, 11))

pytestmark = pytest.mark.timeout(360)


def placed(sizes: Sizes, chosen: tuple[str, ...]) -> list[Case]:
    """Every preset that is another plan on this cluster; models and options come up in turns."""
    cluster, seen, cases = cluster_of(*sizes), list[Plan](), list[Case]()
    for name in chosen:
        plan = replace(preset(name, cluster), name="")
        if plan in seen:
            continue
        seen.append(plan)
        turn = len(cases) + cluster.world_size
        lane, model = ("thread", "lazy", "eager")[turn % 3], MIXTURES[turn % 4]
        cases.append(Case(exact(name, cluster, **OPTIONS[turn // 2 % 4]), 1 + turn % 3, model, lane=lane))
    return cases


def text(sizes: Sizes) -> str:
    return "x".join(map(str, sizes))


def test_placements(pool: LocalPool) -> None:
    check(pool, cluster_of(2, 2), placed((2, 2), ("zero3", "three-level")))


@pytest.mark.nightly
@pytest.mark.parametrize("sizes", [(1,), (3,), (2, 2), (2, 3), (2, 2, 2)], ids=text)
def test_every_placement(pool: LocalPool, sizes: Sizes) -> None:
    check(pool, cluster_of(*sizes), placed(sizes, tuple(PRESETS)))


ROWS = [row | {"model": ("mixture tied", "mixture, grouped")[index % 2]} for index, row in enumerate(covering_rows())]
WORLD_SIZES = sorted({case_of(row | {"model": "llama tied"})[0] for row in ROWS})


def test_pipelines(pool: LocalPool) -> None:
    """Weight gradients of stacks held back, and of chunks whose parameters are gone by then."""
    cases = []
    for name, schedule, model in (("zero3", "zbv", 0), ("zero2", "zb-h1", 1)):
        plan = pipelined(name, OUTER, schedule, unit=1 + model % 2, recompute=("block.1",) if model else ())
        cases.append(Case(plan, num_micros=4, model=MIXTURES[model]))
    check(pool, cluster_of(*OUTER.sizes), cases)


@pytest.mark.nightly
@pytest.mark.parametrize("sizes", WORLD_SIZES, ids=text)
def test_every_schedule(pool: LocalPool, sizes: Sizes) -> None:
    cases = []
    for row in ROWS:
        where, case = case_of(row)
        if where == sizes:
            model = "deep mixture tied" if case.model.startswith("deep") else case.model
            cases.append(replace(case, model=model))
    check(pool, cluster_of(*sizes), cases)


def forms(ulysses: int, ring: int) -> dict[str, Any]:
    return {"context": {"ulysses": ulysses, "ring": ring}}


def attending(sizes: Sizes, mapping: dict[str, Any], name: str = "zero3", num_micros: int = 1, **changes: Any) -> Case:
    plan = exact(name, cluster_of(*sizes), mapping=mapping, **changes)
    costly, turn = plan.balance == "cost", len(changes) + num_micros
    return Case(
        plan,
        model=("wide mixture", "wide mixture, window")[turn % 2],
        rows=Rows(23, DOCUMENTS) if costly or turn % 3 else Rows(7),
        num_micros=num_micros,
        batches=dealt_out if costly else data_rows,
    )


CONTEXT: dict[Sizes, list[Case]] = {
    (2, 2): [
        attending((2, 2), {"package": forms(2, 1), "node": forms(1, 2)}),
        attending((2, 2), {"node": forms(1, 2)}, "zero2", 2, recompute=("block.1",)),
        attending((2, 2), {"package": forms(1, 2), "node": {"pipeline": 2}}, "zero1", 3, schedule="zb-h1"),
        attending((2, 2), {}, balance="cost"),
    ],
    (4,): [attending((4,), {"package": forms(ulysses, 4 // ulysses)}, num_micros=ulysses) for ulysses in (1, 2, 4)],
    (2, 2, 2): [
        attending((2, 2, 2), {"package": forms(1, 2), "node": forms(1, 2), "system": forms(2, 1)}, "zero2"),
        attending((2, 2, 2), {"node": forms(1, 2), "system": forms(1, 2)}, "three-level", 2, recompute=("*",)),
        attending((2, 2, 2), {"package": forms(2, 1), "node": {"pipeline": 2}}, "zero++", 3, schedule="1f1b", unit=2),
        attending((2, 2, 2), {"package": forms(2, 1)}, "zero2", 2, balance="cost"),
    ],
}


@pytest.mark.parametrize("sizes", [*nightly(((2, 2),), ((4,),), ((2, 2, 2),))], ids=text)
def test_contexts(pool: LocalPool, sizes: Sizes) -> None:
    """Documents packed in a row, rings and Ulysses, beside data and pipeline ranks."""
    check(pool, cluster_of(*sizes), CONTEXT[sizes])


@pytest.mark.parametrize("name", ["zero3", *nightly("ddp", "three-level")])
def test_bf16_stays_close_to_one_process_in_bf16(pool: LocalPool, name: str) -> None:
    plan = replace(preset(name, cluster_of(2, 2)), compute="bf16")
    (outcomes,) = run(pool, cluster_of(2, 2), [Case(plan, num_micros=2, model="mixture, shared expert")])
    found = deviation(outcomes, serial_bf16("mixture, shared expert"))
    assert 0 < found["loss"] < 0.01, found
    assert not outcomes[0].complaint


# The bias moves far enough that other experts are chosen; the loss goes by the choices of the step before.
MOVED = {"mixture, grouped": BalanceConfig(bias=0.05, step=0.5), "mixture, shared expert": BalanceConfig(step=0.5)}


def saved_and_going_on(
    world: World, folder: Path, sizes: Sizes, plan: str, compute: str, model: str
) -> tuple[list[float], list[float], list[str]]:
    """Losses of six steps; those of the last three, from a checkpoint of the middle; and the differences after that."""
    balance = MOVED.get(model)
    straight = make(world, sizes, plan, compute, model=model, balance=balance)
    losses = train(straight, 0, 3)
    saved = save(straight, folder, 3, {}, keep=2)
    losses += train(straight, 3, 6)
    other = make(world, sizes, plan, compute, scale=2.0, model=model, balance=balance)
    assert resume(other, Checkpoint(saved)) == ""
    again, ends = train(other, 3, 6), [save(straight, folder / "ends", 6, {}, keep=9)]
    ends.append(save(other, folder / "again", 6, {}, keep=9))
    return losses, again, differing(*map(contents, ends))


def going_on_elsewhere(world: World, source: Path, sizes: Sizes, plan: str, model: str) -> list[float]:
    """Losses of three more steps from a checkpoint of another plan."""
    engine = make(world, sizes, plan, scale=2.0, model=model, balance=MOVED.get(model))
    restore(engine.state, Checkpoint(source))
    engine.refresh()
    return train(engine, 3, 6)


@pytest.mark.parametrize(
    ("sizes", "plan", "compute", "model"),
    [
        ((3,), "zero3", "fp64", "mixture, grouped"),
        *nightly(((2, 2), "zero++", "bf16", "mixture, shared expert"), ((2, 2), "ddp", "fp64", "mixture tied")),
    ],
)
def test_going_on(pool: LocalPool, tmp_path: Path, sizes: Sizes, plan: str, compute: str, model: str) -> None:
    """The same bits under the same plan, the same numbers under another; a bias and a loss by the last step go on."""
    ranks = cluster_of(*sizes).world_size
    for losses, again, unequal in pool.run(ranks, saved_and_going_on, tmp_path, sizes, plan, compute, model):
        assert again == losses[3:]
        assert unequal == []
    biases = [name for name in contents(tmp_path / "checkpoints" / "step-00000003") if "router.bias" in name]
    assert len(biases) == (model == "mixture, grouped")
    loads = [name for name in contents(tmp_path / "checkpoints" / "step-00000003") if name.endswith("/counts")]
    assert len(loads) == (1 if model == "mixture, grouped" else 2)  # layers with experts
    source = tmp_path / "checkpoints" / "step-00000003"
    for other, name in (((1,), "ddp"), ((1, 2), "three-level")) if compute == "fp64" else ():
        for again in pool.run(cluster_of(*other).world_size, going_on_elsewhere, source, other, name, model):
            assert again == pytest.approx(losses[3:], abs=1e-10, rel=0)
