"""`Trainer.evaluate`: the loss of plain PyTorch on batches of any size, under every plan, and steps as without it."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from terrace.base.errors import ConfigError
from terrace.launch.start import LocalPool, World
from tests.support.nightly import nightly
from tests.support.toys import cluster_of
from tests.support.trainer_cases import TOLERANCE, Case, make, simple, steps, train
from tests.support.user_models import HIDDEN, MODELS, NUM_STEPS, Trained, batch_of

STAGES = {"mapping": {"node": {"pipeline": 2}}, "micro_batch": 2}
CASES = [
    Case("convolution", "zero3", (1,), num_micros=2),
    Case("convolution", "three-level", (2, 2)),
    Case("tied", {"preset": "zero1", **STAGES}, (1, 2), num_micros=4),
    Case("tied", {"preset": "zero3", **STAGES}, (2, 2), num_micros=2),
    Case("tied", "zero++", (2,)),
    Case("tied", "zero3", (2,), local=True),
]
SIZES = (8, 3, 13)  # samples, of which the ranks and micro-batches share not all evenly


def some(model: str, step: int, size: int) -> tuple[Tensor, Tensor]:
    """The first `size` samples of a batch."""
    inputs, labels = batch_of(model, step, max(SIZES))
    return inputs[:size], labels[:size]


def own_part(case: Case, rank: int, batch: Sequence[Tensor]) -> list[Tensor]:
    """This rank's argument: a whole batch, or its own part, which is larger on one data rank than on the other."""
    if not case.local:
        return list(batch)
    data_rank = rank % 2
    return [each[:1] if data_rank else each[1:] for each in batch]


def evaluated(world: World, case: Case) -> tuple[Trained, list[tuple[float, int, float, int]]]:
    """The steps of a case with evaluations between them: the result of each, and that of the whole parameters."""
    found, results = Trained(), list[tuple[float, int, float, int]]()
    if world.rank:
        torch.manual_seed(world.rank)
    with make(case) as trainer:
        for step in range(NUM_STEPS):
            for size in SIZES:
                batch = some(case.model, 100 + step, size)
                result = trainer.evaluate(*own_part(case, world.rank, batch))
                results.append((result.loss, result.num_tokens, *plain_loss(case, trainer.state_dict(), batch)))
            steps(trainer, case, step, step + 1, found)
        found.parameters = trainer.state_dict()
    return found, results


def plain_loss(case: Case, values: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> tuple[float, int]:
    model = MODELS[case.model]
    blocks, (x, labels) = nn.ModuleList(block.double() for block in model.build()), batch
    named = {name: value for name, value in values.items() if name.startswith("block.")}
    blocks.load_state_dict({name.removeprefix("block."): value for name, value in named.items()}, strict=False)
    with torch.no_grad():
        for block in blocks:
            x = block(x)
        num = int((labels != -100).sum())
        return float(model.loss(x, labels)) / num, num


@pytest.mark.parametrize(
    "case", [CASES[0], *nightly(*CASES[1:])], ids=lambda case: f"{case.model}-{case.plan}-{case.sizes}-{case.local}"
)
def test_an_evaluation_is_that_of_plain_pytorch_and_changes_no_bit(pool: LocalPool, case: Case) -> None:
    world_size = cluster_of(*case.sizes).world_size
    without = pool.run(world_size, train, case)
    for (found, results), plain in zip(pool.run(world_size, evaluated, case), without, strict=True):
        assert (found.losses, found.norms) == (plain.losses, plain.norms)
        assert all(torch.equal(found.parameters[name], value) for name, value in plain.parameters.items())
        if case.plan == "zero++":  # working copies are rounded
            continue
        for loss, num_tokens, wanted, num_wanted in results:
            assert loss == pytest.approx(wanted, abs=TOLERANCE)
            assert num_tokens == num_wanted


def evaluated_only(world: World, case: Case) -> list[float]:
    """Differences of the evaluations from plain PyTorch."""
    with make(case) as trainer:
        found = []
        for size in SIZES:
            batch = some(case.model, 0, size)
            result = trainer.evaluate(*own_part(case, world.rank, batch))
            found.append(result.loss - plain_loss(case, trainer.state_dict(), batch)[0])
    return found


def test_ranks_of_stages_with_more_and_with_fewer_samples_of_their_own(pool: LocalPool) -> None:
    case = Case("tied", {"preset": "ddp", **STAGES, "micro_batch": 1}, (2, 2), local=True)
    for found in pool.run(4, evaluated_only, case):
        assert max(map(abs, found)) < TOLERANCE


def test_dropout_is_off_and_draws_the_same_in_the_next_step() -> None:
    def losses(evaluates: bool) -> list[float]:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(3, HIDDEN), nn.Dropout(0.5)), nn.Linear(HIDDEN, 2)]
        trainer, found = simple(blocks=blocks), list[float]()
        inputs = torch.ones(6, 3), torch.zeros(6, 2)
        for _ in range(3):
            found.append(trainer.step(*inputs).loss)
            if evaluates:
                assert trainer.evaluate(*inputs) == trainer.evaluate(*inputs)
        trainer.close()
        return found

    assert losses(evaluates=True) == losses(evaluates=False)


@pytest.mark.parametrize(
    ("sizes", "more", "words"),
    [
        ((0, 0), {}, "a batch of 0 samples cannot be evaluated"),
        ((3, 2), {}, "the first dim of a batch is its samples, and these differ"),
        ((3, 3), {"num_micros": 2}, "labels of floats all count: give a multiple of 2 samples"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(sizes: tuple[int, int], more: dict[str, Any], words: str) -> None:
    trainer = simple(**more)
    with pytest.raises(ConfigError, match=words):
        trainer.evaluate(torch.ones(sizes[0], 3), torch.zeros(sizes[1], 2))
    trainer.close()
