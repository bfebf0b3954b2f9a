"""The reference of an outer loop against plain training, figures by hand, and itself in other words."""

import ast
import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.support import outer_exchanges, outer_reference
from tests.support.nightly import in_turns
from tests.support.outer_exchanges import Exchange, Summed, Whole, exact_mean
from tests.support.outer_reference import Micro, OuterLoop, OuterReference, OuterStep, copies, norm_of, trained
from tests.support.toys import MODELS, count_tokens, make_batch, run_blocks

CLOSE = 1e-12
MODEL = MODELS["toy"]  # ties, a frozen matrix, five blocks
SGD = {"name": "sgd", "lr": 0.05, "weight_decay": 0.1, "clip": 0.0}
TABLES = {
    "sgd": SGD | {"clip": 1.0},
    "adamw": {"name": "adamw", "lr": 3e-3},
    "lion": {"name": "lion", "lr": 1e-3},
    "muon": {"name": "muon", "lr": 3e-3, "adamw_lr": 1e-3},
}
EVERY_STEP = OuterLoop(every=1, optimizer="average", lr=1.0)


def batches(step: int, num_islands: int, num_micros: int = 2) -> list[list[Micro]]:
    """Micro-batches of islands, (2, 6) tokens each, where sequences have five, two or no valid tokens."""
    tokens, labels = make_batch(step, 2 * num_islands * num_micros)
    labels = labels.clone()
    for row in range(len(labels)):
        labels[row, : row % 4] = -100
    micros: list[Micro] = [(x, y, None) for x, y in zip(torch.split(tokens, 2), torch.split(labels, 2), strict=True)]
    return [micros[island * num_micros : (island + 1) * num_micros] for island in range(num_islands)]


def reference(
    num_islands: int, outer: OuterLoop, inner: str = "adamw", exchange: Exchange = exact_mean
) -> OuterReference:
    return OuterReference(MODEL.blocks(torch.float64), MODEL.objective, num_islands, TABLES[inner], outer, exchange)


def train(run: OuterReference, num_steps: int, lr: float = 3e-3) -> list[OuterStep]:
    """A run of so many steps, the last of which ends it."""
    num_islands = len(run.islands)
    return [run.step(batches(step, num_islands), lr, last=step == num_steps - 1) for step in range(num_steps)]


class InTheBuffer(OuterReference):
    """delay = every, as it is done in memory: the apply leaves s_i - x_i, and the start after it sends that."""

    def __init__(self, *arguments: object, **more: object) -> None:
        super().__init__(*arguments, **more)  # type: ignore[arg-type]
        self.left: dict[int, list[dict[str, Tensor]]] = {}

    def end_of_step(self) -> list[outer_reference.Exchanged]:
        exchanged = []
        for fragment in self.outer.starting(self.num_steps):
            if self.under_way[fragment]:
                (now,) = self.under_way[fragment]
                left = [
                    {name: kept[name] - island.values[name] for name in kept}
                    for island, kept in zip(self.islands, now.kept, strict=True)
                ]
                exchanged.append(self.apply(fragment))
                self.send(fragment, left)
            else:
                self.start(fragment)
        return exchanged


def test_the_reference_imports_nothing_from_terrace() -> None:
    for module in (outer_reference, outer_exchanges):
        assert module.__file__
        names = list[str]()
        for node in ast.walk(ast.parse(Path(module.__file__).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names.append(node.module or "")
        assert names
        assert not any(name.startswith("terrace") for name in names), names


@pytest.mark.parametrize("num_islands", [2, 4])
def test_every_step_is_plain_sgd(num_islands: int) -> None:
    run = OuterReference(MODEL.blocks(torch.float64), MODEL.objective, num_islands, SGD, EVERY_STEP)
    blocks = MODEL.blocks(torch.float64)
    values = list(trained(blocks).values())
    optimizer = torch.optim.SGD(values, lr=1.0)
    for step in range(5):
        given, lr = batches(step, num_islands), 0.05 * (1 + step)
        micros = [micro for each in given for micro in each]
        counts = [sum(int(count_tokens(labels)) for _, labels, _ in each) for each in given]
        assert len(set(counts)) > 1, "weights that are all equal would hide an error"
        optimizer.zero_grad()
        total = torch.stack([MODEL.objective(run_blocks(blocks, x), y) for x, y, _ in micros]).sum() / sum(counts)
        torch.autograd.backward(total)
        optimizer.param_groups[0]["lr"] = lr
        with torch.no_grad():  # decoupled decay, of matrices
            decayed = {value: lr * 0.1 * value for value in values if value.ndim > 1}
            optimizer.step()
            for value, part in decayed.items():
                value -= part
        found = run.step(given, lr, last=step == 4)
        assert found.loss == pytest.approx(float(total.detach()), rel=CLOSE)
        row = torch.cat([value.detach().reshape(-1) for value in values])
        for island in run.islands:
            own = torch.cat([value.detach().reshape(-1) for value in island.values.values()])
            torch.testing.assert_close(own, row, rtol=0, atol=CLOSE)


@pytest.mark.parametrize(("inner", "turns"), in_turns(2, TABLES, [(0, 1), (1, 3), (3, 1), (3, 3)]))
def test_one_island_that_averages_trains_as_without(inner: str, turns: tuple[int, int]) -> None:
    delay, fragments = turns
    outer = OuterLoop(every=3, fragments=fragments, delay=delay, optimizer="average", lr=1.0)
    found, wanted = reference(1, outer, inner), reference(1, EVERY_STEP, inner)
    steps = zip(train(found, 8), train(wanted, 8), strict=True)
    assert all(abs(one.loss - other.loss) < CLOSE for one, other in steps)
    torch.testing.assert_close(found.parameters(0), wanted.parameters(0), rtol=0, atol=CLOSE)


class Scalar(nn.Module):
    """x, whose loss on a label y is x y: its gradient is the mean label."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.x * torch.ones_like(tokens, dtype=torch.float64)


def scalar_run(outer: OuterLoop, labels: Sequence[Sequence[Sequence[int]]], **more: bool) -> OuterReference:
    """SGD with rate 1 on the labels of each island at each step; the last step ends the run if `last`."""
    table = {"name": "sgd", "lr": 1.0, "clip": 0.0}
    run = OuterReference([Scalar()], lambda out, y: (out * y * (y != -100)).sum(), len(labels[0]), table, outer)
    for number, islands in enumerate(labels):
        given = [[(torch.zeros(1, len(y), dtype=torch.int64), torch.tensor([y]), None)] for y in islands]
        run.step(given, 1.0, last=more.get("last", False) and number == len(labels) - 1)
    return run


def test_a_delayed_exchange_by_hand() -> None:
    outer = OuterLoop(every=2, delay=1, lr=0.5, momentum=0.5, keep=0.5)
    labels = [[[1, 1, 1], [2]], [[1], [1, 1, 1]], [[4], [2, 2]]]
    # Islands at 1: -1 -> 0, -2 -> -1; then -1, -1 more: x = -1, -2, so d = 2, 3 with 4 tokens each.
    run = scalar_run(outer, labels[:2])
    (waiting,) = run.under_way[0]
    assert (waiting.weights, float(waiting.mean["0.x"])) == ([0.5, 0.5], 2.5)
    # -4, -2: x = -5, -4. v = 2.5, u = 2.5 + 1.25, a = 1 - 1.875; x = a + (x - s) / 2, with s = -1, -2.
    run = scalar_run(outer, labels)
    anchor = 1 - 0.5 * 3.75
    assert float(run.anchor["0.x"]) == anchor
    assert [float(island.values["0.x"].detach()) for island in run.islands] == [anchor - 2, anchor - 1]
    # The end of a run instead: the first exchange is applied, then d = 2, 1, from 1 and 2 tokens.
    run = scalar_run(outer, labels, last=True)
    mean = 2 / 3 + 2 / 3
    v = 0.5 * 2.5 + mean
    anchor -= 0.5 * (mean + 0.5 * v)
    assert float(run.anchor["0.x"]) == pytest.approx(anchor, rel=CLOSE)
    assert {float(island.values["0.x"].detach()) for island in run.islands} == {float(run.anchor["0.x"])}


def test_an_exchange_as_long_as_a_cycle_by_hand() -> None:
    outer = OuterLoop(every=1, delay=1, optimizer="momentum", lr=1.0, momentum=0.5, keep=0.0, penalty=True, clip=2.5)
    # d = 1, 3 and mean 2, the first: Lambda = 1, v = 2, a = 1 - 2: x = s = ref = a. Meanwhile x - s = -1, -6.
    run = scalar_run(outer, [[[1], [3]], [[1], [6]]])
    anchor = 1 - 2
    assert float(run.anchor["0.x"]) == pytest.approx(anchor, rel=CLOSE)
    values = [float(island.values["0.x"].detach()) for island in run.islands]
    assert values == pytest.approx([anchor] * 2, rel=CLOSE)
    # The second, of d = 1, 6: Lambda = 1 + (1 + 2) / 2.
    run = scalar_run(outer, [[[1], [3]], [[1], [6]], [[2], [3]]])
    v = 0.5 * 2 + 3.5 / 2.5
    assert float(run.anchor["0.x"]) == pytest.approx(anchor - v, rel=CLOSE)
    # And one of 40 is clipped.
    run = scalar_run(outer, [[[1], [3]], [[1], [79]], [[2], [3]]])
    assert float(run.momentum["0.x"]) == 2.5


@pytest.mark.parametrize(
    ("optimizer", "kept"), in_turns(2, ["nesterov", "momentum", "average"], [(0.0, True), (0.5, False), (1.0, True)])
)
def test_the_change_may_wait_in_the_buffer(optimizer: str, kept: tuple[float, bool]) -> None:
    keep, penalty = kept
    outer = OuterLoop(every=3, fragments=3, delay=3, optimizer=optimizer, keep=keep, penalty=penalty, clip=1e-3)
    as_noted = reference(2, outer)
    blocks = MODEL.blocks(torch.float64)
    in_memory = InTheBuffer(blocks, MODEL.objective, 2, TABLES["adamw"], outer)
    assert train(as_noted, 11) == train(in_memory, 11)
    assert torch.equal(as_noted.parameters(1), in_memory.parameters(1))


@pytest.mark.parametrize(("every", "fragments", "delay"), [(1, 1, 0), (3, 1, 1), (6, 3, 0), (6, 3, 2), (6, 2, 6)])
def test_turns_of_fragments(every: int, fragments: int, delay: int) -> None:
    run = reference(2, OuterLoop(every=every, fragments=fragments, delay=delay))
    spans = []
    for step in range(3 * every):
        before = copies(run.anchor)
        found = run.step(batches(step, 2), 3e-3)
        spans += [(each.fragment, each.started, each.applied) for each in found.exchanged]
        changed = {int(name.partition(".")[0]) for name in before if not torch.equal(before[name], run.anchor[name])}
        held = {int(name.partition(".")[0]) for name in before}
        turn = {each.fragment for each in found.exchanged}
        assert changed == {block for block in held if block % fragments in turn}
        for each in found.exchanged:
            assert each.mean <= sum(w * d for w, d in zip(each.weights, each.changes, strict=True)) + CLOSE
            assert all(gap > 0 for gap in each.gaps) == (delay > 0)
    starts = [
        (fragment, cycle * every + (fragment + 1) * every // fragments - 1)
        for cycle, fragment in itertools.product(range(3), range(fragments))
    ]
    assert spans == [(f, start, start + delay) for f, start in starts if start + delay < 3 * every]


def test_weights_count_tokens_since_the_last_start() -> None:
    outer = OuterLoop(every=4, fragments=2, optimizer="average")
    run = reference(2, outer)
    counts = [[sum(int(count_tokens(y)) for _, y, _ in each) for each in batches(step, 2)] for step in range(8)]
    found = {(each.fragment, each.applied): each.weights for step in train(run, 8) for each in step.exchanged}
    for (fragment, applied), steps in {
        (0, 1): range(2),
        (1, 3): range(4),
        (0, 5): range(2, 6),
        (0, 7): range(6, 8),
        (1, 7): range(4, 8),
    }.items():
        sums = [sum(counts[step][island] for step in steps) for island in range(2)]
        assert found.pop((fragment, applied)) == [each / sum(sums) for each in sums]
    assert not found


@pytest.mark.parametrize("keep", [0.0, 1.0])
def test_a_run_ends_at_the_anchor(keep: float) -> None:
    run = reference(3, OuterLoop(every=4, fragments=2, delay=3, keep=keep), "muon")
    train(run, 6)
    assert not any(run.under_way)
    for island in run.islands:
        assert norm_of({name: value.detach() - run.anchor[name] for name, value in island.values.items()}) < CLOSE


def test_steps_clip_by_the_norm_of_the_island() -> None:
    lr, given = 1e-3, batches(0, 2)
    run = OuterReference(
        MODEL.blocks(torch.float64),
        MODEL.objective,
        2,
        {"name": "sgd", "lr": lr, "clip": 0.5, "weight_decay": 0.0},
        OuterLoop(every=9),
    )
    found = run.step(given, lr)
    assert min(found.norms) > 0.5
    for island in run.islands:
        moved = norm_of({name: value.detach() - run.anchor[name] for name, value in island.values.items()})
        assert moved == pytest.approx(0.5 * lr, rel=1e-5)
    weights = [sum(int(count_tokens(y)) for _, y, _ in each) for each in given]
    mean = sum(w * loss for w, loss in zip(weights, found.island_losses, strict=True)) / sum(weights)
    assert found.loss == pytest.approx(mean, rel=CLOSE)


def coarse(values: Tensor) -> Tensor:
    """Multiples of 1/100."""
    return (100 * values).round() / 100


@pytest.mark.parametrize("kind", [Summed, Whole])
@pytest.mark.parametrize("ranks_inside", [1, 2])
def test_exchanges_add_up(kind: type[Summed | Whole], ranks_inside: int) -> None:
    torch.manual_seed(0)
    plain, coded = kind(lambda row: row, ranks_inside=ranks_inside), kind(coarse, ranks_inside=ranks_inside)
    fed = kind(coarse, ranks_inside=ranks_inside, feedback=True)
    wanted, found, without = torch.zeros(3, 13).double()
    for _ in range(200):
        rows = [0.004 * torch.rand(13).double() for _ in range(3)]
        torch.testing.assert_close(plain(1, rows), exact_mean(1, rows), rtol=0, atol=CLOSE)
        wanted += exact_mean(1, rows)
        found += fed(1, rows)
        without += coded(1, rows)
    # What has not arrived yet are the residuals, half a step a hop; without feedback messages below that are lost.
    assert float((wanted - found).abs().max()) < 4 * 0.0051
    assert float((wanted - without).abs().max()) > 0.3


def largest(row: Tensor) -> Tensor:
    """The largest magnitude with the sign of each."""
    return row.abs().max() * row.sign()


def test_own_parts_are_rounded_where_the_format_is_a_dtype() -> None:
    rows = [torch.tensor([1.0, -3.0, 0.0, 0.0]), torch.tensor([1.0, 3.0, 2.0, 1.0])]
    assert Summed(largest)(0, rows).tolist() == [4.0, 0.0, 2.0, 2.0]
    assert Summed(largest, rounds_own=True)(0, rows).tolist() == [6.0, 0.0, 2.0, 2.0]
    assert Whole(largest)(0, rows).tolist() == [6.0, 0.0, 3.0, 3.0]


def test_runs_with_coded_messages_stay_near() -> None:
    outer = OuterLoop(every=2, optimizer="average", lr=1.0)

    def fine(row: Tensor) -> Tensor:
        return (1e5 * row).round() / 1e5

    exact = reference(2, outer)
    coded = reference(2, outer, exchange=Summed(fine, ranks_inside=2, feedback=True))
    train(exact, 6)
    train(coded, 6)
    apart = float((exact.parameters(0) - coded.parameters(0)).abs().max())
    assert 1e-7 < apart < 1e-4
    assert torch.equal(coded.parameters(0), coded.parameters(1))
