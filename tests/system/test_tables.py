"""Tables whose rows are on several ranks: the numbers of one process, bytes of ids, memory, checkpoints, islands."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from terrace.base.errors import ModelError
from terrace.checkpoint.reading import Checkpoint, resume
from terrace.checkpoint.writing import save
from terrace.launch.start import LocalPool, World
from terrace.plan.outer import Outer
from terrace.runtime.batch import Batch
from terrace.runtime.engine import Engine
from terrace.runtime.routing import look_up
from terrace.runtime.settings import OptimizerConfig
from terrace.runtime.table_param import TableParam
from tests.support import outer_cases
from tests.support.checkpoints import contents, differing, make, train
from tests.support.nightly import nightly
from tests.support.parity import Case, Outcome, data_rows, deviation, engine_of, exact, num_rows, run
from tests.support.parity import train as train_all
from tests.support.table_cases import SGD, DrawnRows, check_tables, row_wise, spread_over
from tests.support.token_layouts import dealt_out
from tests.support.toys import NUM_IDS, Rows, cluster_of

pytestmark = pytest.mark.timeout(300)

DRAWN = DrawnRows()
FOUR = cluster_of(2, 2)
EIGHT = cluster_of(2, 2, 2)
MODEL = "llama, many ids"
LARGER: tuple[tuple[int, ...], ...] = ((2,), (4,), (2, 3), (2, 2, 2))
EVERY_TWO = Outer(tier="node", every=2)
DOCUMENTS = Rows(23, ((5, 1, 17), (23,), (4, 4, 4, 11)))


@pytest.mark.parametrize(
    "sizes",
    [(2, 2), *nightly(*((size,) for size in ((1,), (3,), *LARGER)))],
    ids=lambda sizes: "x".join(map(str, sizes)),
)
def test_every_number_of_ranks_equals_one_process(pool: LocalPool, sizes: tuple[int, ...]) -> None:
    cluster = cluster_of(*sizes)
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("ddp", {"num_steps": 3}),
        ("zero3", {"num_micros": 2, "optimizer": SGD}),
        ("three-level", {"num_micros": 2, "model": "gpt2, many ids"}),
    ]
    cases = [
        Case(exact(name, cluster, vocabulary=spread_over(*sizes)), **{"model": MODEL, "rows": DRAWN, **more})
        for name, more in kinds
    ]
    check_tables(pool, cluster, cases)


def beside(
    name: str, *, rows: Rows = DRAWN, model: str = MODEL, micros: int = 2, batches: Any = data_rows, **keys: Any
) -> Case:
    plan = exact(name, EIGHT, **{"vocabulary": spread_over(2, 2, 2), **keys})
    return Case(plan, num_micros=micros, model=model, rows=rows, batches=batches)


OF_STAGES: dict[str, Any] = {"vocabulary": {"package": 2, "system": 2}, "mapping": {"node": {"pipeline": 2}}}
DEEP = "deep llama, many ids"
BESIDE = {
    "experts": beside(
        "zero3", model="experts, many ids", experts={"package": {"expert": 2}, "system": {"expert": 2}}, micros=1
    ),
    "zbv": beside("zero1", model=DEEP, schedule="zbv", micros=4, **OF_STAGES),
    "ring": beside("zero3", rows=DrawnRows(7), mapping={"node": {"context": {"ring": 2}}}),
    "balance by cost": beside("zero3", rows=DOCUMENTS, balance="cost", batches=dealt_out, micros=1),
    "frozen table": beside("zero3", model="llama, many frozen ids"),
    "1f1b": beside("zero3", model=DEEP, schedule="1f1b", micros=4, unit=2, **OF_STAGES),
    "whole experts": beside("zero3", model="experts, many ids"),
    "ulysses": beside("zero3", rows=DrawnRows(7), mapping={"package": {"context": {"ulysses": 2}}}),
    "documents": beside("hsdp", rows=DOCUMENTS),
    "units, recomputed": beside("zero++", unit=2, recompute=("block.[1-9]",), micros=4),
}
SHOWN = ("experts", "zbv", "ring")


@pytest.mark.parametrize("axis", [*SHOWN, *nightly(*(axis for axis in BESIDE if axis not in SHOWN))])
def test_beside_every_axis(pool: LocalPool, axis: str) -> None:
    check_tables(pool, EIGHT, [BESIDE[axis]])


def losing_sums(world: World, cluster: Any, cases: Sequence[Case]) -> list[Outcome]:
    """As `train`, but of several gradients of a row one is kept."""
    kept = vars(look_up)["summed"]
    vars(look_up)["summed"] = lambda rows, places, number: rows.new_zeros(number, rows.shape[1]).index_copy_(
        0, places, rows
    )
    try:
        return train_all(world, cluster, cases)
    finally:
        vars(look_up)["summed"] = kept


def test_faults_are_noticed(pool: LocalPool) -> None:
    """A gradient that is lost where ids are joined; and updates of all rows, as one process without a plan has them."""
    case = Case(exact("ddp", FOUR, vocabulary=spread_over(2, 2)), model=MODEL, rows=DRAWN, optimizer=SGD)
    wanted = row_wise(case.model, num_rows(FOUR, case), case.num_steps, case.rows, case.optimizer)
    ((*lost,),) = run(pool, FOUR, [case], losing_sums)
    assert deviation(lost, wanted)["parameters"] > 1e-4
    dense = replace(case, plan=replace(case.plan, vocabulary={}))
    (all_rows,) = run(pool, FOUR, [dense])
    assert deviation(all_rows, wanted)["parameters"] > 1e-4  # rows that are not used decay


def measured(world: World, case: Case) -> tuple[dict[str, dict[str, int]], list[list[int]], dict[str, int], bool]:
    """Bytes of one step by class and tier, ids of each micro-batch, peaks by category, whether they are predicted."""
    engine = engine_of(world, FOUR, case)
    batches = case.batches(engine, case, 0)
    engine.step(batches, 1e-3)
    engine.check_bytes()
    found: dict[str, dict[str, int]] = {}
    for (message, tier), size in engine.comm.ledger.total().items():
        found.setdefault(message.value, {})[tier] = size
    peak, predicted = engine.comm.meter.peak(), engine.program.state_bytes
    same = all(peak[name] == predicted[name] for name in ("params", "grads", "optimizer"))
    engine.close()
    return found, [batch.inputs.flatten().tolist() for batch in batches], peak, same


def test_bytes_are_those_of_distinct_ids(pool: LocalPool) -> None:
    """By sets: over the inner tier ids of a rank's own tokens, over the outer one those of its node, each once."""
    case = Case(exact("ddp", FOUR, vocabulary=spread_over(2, 2)), num_micros=2, model=MODEL, rows=DRAWN)
    found = pool.run(4, measured, case, timeout_s=60.0)
    ids = [each[1] for each in found]
    part, width, item = NUM_IDS // 4, 8, 8
    for rank, (sent, _, _, same) in enumerate(found):
        here, node = rank % 2, rank // 2
        wanted: dict[str, dict[str, int]] = {
            name: {"package": 0, "node": 0} for name in ("dispatch", "combine", "route")
        }
        for micro in range(2):
            of_rank = [{*ids[each][micro]} for each in range(4)]
            # The inner tier cuts the table first, then each half between nodes.
            inner = [[{i for i in own if i // (2 * part) == half} for half in range(2)] for own in of_rank]
            of_node = [inner[2 * each][here] | inner[2 * each + 1][here] for each in range(2)]
            out = [[{i for i in of_node[each] if i // part % 2 == other} for other in range(2)] for each in range(2)]
            for tier, leaving, arriving in (
                ("package", len(inner[rank][1 - here]), len(inner[2 * node + 1 - here][here])),
                ("node", len(out[node][1 - node]), len(out[1 - node][node])),
            ):
                wanted["dispatch"][tier] += leaving * (4 + width * item)
                wanted["combine"][tier] += arriving * width * item
                wanted["route"][tier] += 2 * 4
        assert {name: sent[name] for name in wanted} == wanted
        assert same


def test_memory_is_a_share(pool: LocalPool) -> None:
    """Parameters and states of a table by ranks; gradients take memory of used rows alone."""
    found = {}
    for sizes in ((1, 1), (2, 2)):
        plan = exact("ddp", FOUR, vocabulary=spread_over(2, 2))
        if sizes == (1, 1):
            plan = replace(plan, vocabulary={})
        ((_, _, peak, same), *_) = pool.run(4, measured, Case(plan, model=MODEL, rows=DRAWN), timeout_s=60.0)
        assert same
        found[sizes] = peak
    table = NUM_IDS * 8 * 8
    whole, share = found[1, 1], found[2, 2]
    assert whole["params"] - share["params"] == table - table // 4
    assert whole["optimizer"] - share["optimizer"] == 2 * (table - table // 4)
    assert whole["grads"] - share["grads"] == table


def state_of(folder: Path) -> dict[str, Tensor]:
    (step,) = (folder / "checkpoints").glob("step-*")
    return {name.rpartition("/")[2]: value for name, value in contents(step).items() if "block.0.weight" in name}


def unused(world: World, folder: Path) -> None:
    """Checkpoints of the first step, and of two further ones."""
    engine = make(world, (2,), "zero1", "fp32", model=MODEL, stored={"vocabulary": {"package": 2}})
    for first, last in ((0, 1), (1, 3)):
        for step in range(first, last):
            tokens = torch.full((2, 6), step)  # one id a step
            engine.step([Batch(tokens, tokens)], 1e-2)
        engine.drain()
        save(engine, folder / str(last), last, {}, 2)
    engine.close()


def test_rows_that_are_not_used_keep_bits_and_moments(pool: LocalPool, tmp_path: Path) -> None:
    pool.run(2, unused, tmp_path, timeout_s=60.0)
    before, after = state_of(tmp_path / "1"), state_of(tmp_path / "3")
    assert {*before} == {"master", "exp_avg", "exp_avg_sq"}
    for kind, value in before.items():
        changed = (value != after[kind]).any(1).nonzero().flatten().tolist()
        assert changed == [1, 2], kind
        if kind != "master":
            assert value[0].abs().min() > 0
            assert not value[1:].any()
            assert not after[kind][3:].any()


ROWS_CHANGE = (
    "step-00000002 was saved with updates of {} of its table, and goes on with updates of {} (plan.vocabulary)"
)
PLANS: Mapping[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "two": ("zero1", (2,), {"vocabulary": {"package": 2}}),
    "four": ("zero3", (2, 2), {"vocabulary": {"package": 2, "node": 2}}),
    "whole": ("zero3", (2, 2), {}),
}


def went_on(world: World, folder: Path, name: str, source: str | None) -> tuple[list[float], list[str], str]:
    """Train steps 0 to 4, or 2 to 4 from the checkpoint of `source`.

    Returns the losses of steps 2 and 3, the tensors that differ from the checkpoint after reading, and the note.
    """
    plan, tiers, keys = PLANS[name]
    engine = make(world, tiers, plan, "bf16" if keys else "fp32", model=MODEL, stored=keys)
    differ, said = list[str](), ""
    if source is None:
        train(engine, 0, 2)
        engine.drain()
        save(engine, folder / name, 2, {}, 2)
    else:
        (step,) = (folder / source / "checkpoints").glob("step-*")
        said = resume(engine, Checkpoint(step))
        engine.drain()
        copy = folder / f"{source} to {name}"
        save(engine, copy, 2, {}, 2)
        (again,) = (copy / "checkpoints").glob("step-*")
        differ = differing(contents(step), contents(again))
    losses = train(engine, 2, 4)
    engine.close()
    return losses, differ, said


def test_runs_go_on_bitwise_and_under_other_plans(pool: LocalPool, tmp_path: Path) -> None:
    ((losses, *_), *_) = pool.run(2, went_on, tmp_path, "two", None, timeout_s=120.0)
    ((again, differ, said), *_) = pool.run(2, went_on, tmp_path, "two", "two", timeout_s=120.0)
    assert again == losses
    assert not differ
    assert not said
    for name, wanted in (("four", ""), ("whole", ROWS_CHANGE.format("the used rows", "all rows"))):
        ((others, differ, said), *_) = pool.run(4, went_on, tmp_path, name, "two", timeout_s=120.0)
        assert not differ
        assert others == pytest.approx(losses, abs=0.02)  # in bf16, or dense
        assert said == wanted
    ((_, differ, said), *_) = pool.run(2, went_on, tmp_path, "two", "two to whole", timeout_s=120.0)
    assert not differ
    assert said == ROWS_CHANGE.format("all rows", "the used rows")


def rounded(world: World) -> tuple[bool, bool, float]:
    """Whether used rows of the working copy are rounded masters, whether others are not written in a step, and the
    change that an evaluation makes.
    """
    plan = replace(exact("zero1", cluster_of(2), vocabulary={"package": 2}), compute="bf16", master="fp32")
    case = Case(plan, model=MODEL)  # of its ids the first eleven are drawn
    engine = engine_of(world, cluster_of(2), case)
    (table,) = (flat for flat in engine.state if isinstance(flat, TableParam))
    engine.step(case.batches(engine, case, 0), 1e-2)
    engine.drain()
    working = table.shard.view(-1, 8)
    before = working.clone()
    working[-1] = 7.0
    engine.step(case.batches(engine, case, 1), 1e-2)
    engine.drain()
    masters = table.optimizer.master.view(-1, 8).to(working.dtype)
    same = bool(torch.equal(working[:-1], masters[:-1])) and (world.rank == 1 or not torch.equal(working, before))
    kept = bool((working[-1] == 7.0).all())
    working[-1] = before[-1]
    before = working.clone()
    engine.evaluate(case.batches(engine, case, 9))
    change = float((working - before).abs().max())
    engine.close()
    return same, kept, change


def test_working_copies_are_rounded_and_evaluations_change_nothing(pool: LocalPool) -> None:
    assert pool.run(2, rounded, timeout_s=60.0) == [(True, True, 0.0), (True, True, 0.0)]


@pytest.mark.parametrize("outer", [EVERY_TWO, *nightly(replace(EVERY_TWO, delay=1))], ids=("waits", "delay"))
def test_islands_exchange_their_tables(pool: LocalPool, outer: Outer) -> None:
    """Merging every k steps: an island has every row once, and rows that it did not use change by the others'."""
    optimizer = OptimizerConfig(name="sgd", lr=0.1, weight_decay=0.0)
    plan = replace(exact("ddp", FOUR, vocabulary={"package": 2}), outer=outer)
    outer_cases.check(pool, FOUR, [Case(plan, model=MODEL, rows=DRAWN, optimizer=optimizer, num_steps=5)])


def norms_of_blocks(world: World, vocabulary: dict[str, int]) -> list[float]:
    """Norms of a block's gradient from one micro-batch of this rank, as `terrace replay` shows them."""
    plan = exact("ddp", cluster_of(2), vocabulary=vocabulary)
    case = Case(plan, num_micros=2, model=MODEL, rows=DRAWN)
    engine = engine_of(world, cluster_of(2), case)
    visits = engine.examine(case.batches(engine, case, 0)).visits
    engine.close()
    return [visit.gradient_norm for _, visit in sorted(visits.items())]


def test_an_examined_step_has_the_norms_of_a_whole_table(pool: LocalPool) -> None:
    spread, whole = (pool.run(2, norms_of_blocks, each, timeout_s=60.0) for each in ({"package": 2}, {}))
    assert len(spread[0]) == 2 * 4
    for found, wanted in zip(spread, whole, strict=True):
        assert found == pytest.approx(wanted, rel=1e-10)
        assert min(found) > 0


def refused(world: World) -> list[str]:
    """Errors of look-ups that cannot be: an id outside the table, and products with its rows."""
    case = Case(exact("ddp", cluster_of(1), vocabulary={"package": 1}), model=MODEL, rows=DRAWN)
    engine = engine_of(world, cluster_of(1), case)
    (table,) = (flat for flat in engine.state if isinstance(flat, TableParam))
    (weight,) = table.parameters
    calls: tuple[Callable[[], Tensor], ...] = (
        lambda: F.embedding(torch.tensor([3, NUM_IDS]), weight),
        lambda: F.embedding(torch.tensor([-1]), weight),
        lambda: F.linear(torch.zeros(1, 8).double(), weight),
        lambda: weight[torch.tensor([0])],
        lambda: F.embedding(torch.tensor([0]), weight, max_norm=1.0),
        lambda: F.linear(torch.zeros(1, 8).double(), weight=weight),
        lambda: torch.zeros(1, NUM_IDS).double() @ weight,
        lambda: weight.gather(0, torch.tensor([[0] * 8])),
        lambda: torch.cat([weight, weight]),
    )
    found = []
    for call in calls:
        with pytest.raises(ModelError) as error:
            call()
        found.append(str(error.value))
    engine.close()
    return found


def test_what_a_table_cannot_do_is_said(pool: LocalPool) -> None:
    ((above, below, product, index, norm, *others),) = pool.run(1, refused, timeout_s=60.0)
    assert above == "id 40 is looked up in block.0, whose table has rows 0 to 39"
    assert below.startswith("id -1 is looked up")
    assert "torch.nn.functional.embedding, or leave vocabulary out" in product
    assert "embedding, or leave vocabulary out" in index
    assert "max_norm" in norm
    assert [each.partition(" ")[0] for each in others] == ["linear", "matmul", "gather", "cat"]
    assert all(each.endswith("torch.nn.functional.embedding, or leave vocabulary out") for each in others)


def padded(world: World, padding_idx: int) -> bool:
    """Whether a padding id, which is row 1, has no gradient, as in torch."""
    case = Case(exact("ddp", cluster_of(1), vocabulary={"package": 1}), model=MODEL, rows=DRAWN)
    engine: Engine = engine_of(world, cluster_of(1), case)
    (table,) = (flat for flat in engine.state if isinstance(flat, TableParam))
    vectors = F.embedding(torch.tensor([[1, 2, 1]]), table.parameters[0], padding_idx=padding_idx)
    torch.autograd.backward(vectors.sum())
    engine.close()
    return table.gradient.owned.view(-1, 8).tolist() == [[0.0] * 8, [1.0] * 8]


def test_padding_has_no_gradient(pool: LocalPool) -> None:
    for padding_idx in (1, 1 - NUM_IDS):
        assert pool.run(1, padded, padding_idx, timeout_s=60.0) == [True]
