"""Checkpoints of SGD, whose parameters have one state or none besides the master copy."""

from pathlib import Path

import pytest

from terrace.base.errors import CheckpointError
from terrace.checkpoint.reading import Checkpoint, resume
from terrace.checkpoint.writing import save
from terrace.launch.start import LocalPool, World
from terrace.runtime.settings import OptimizerConfig
from tests.support.checkpoints import contents, make, train

ALONE = World(0, 1, 0, 1, None)  # type: ignore[arg-type]  # no store: nobody to meet

pytestmark = pytest.mark.timeout(360)

SGD = {
    number: OptimizerConfig(name="sgd", lr=1e-2, momentum=momentum, weight_decay=0.5)
    for number, momentum in ((1, 0.0), (2, 0.9))
}  # by number of kinds that a checkpoint has of a parameter


def continue_here(world: World, folder: Path, optimizer: OptimizerConfig) -> tuple[list[float], list[float]]:
    """Losses of six steps, with a save after three, and of the last three in an engine that resumed."""
    straight = make(world, (2, 2), "three-level", optimizer=optimizer)
    losses = train(straight, 0, 3)
    saved = save(straight, folder, 3, {}, keep=1)
    losses += train(straight, 3, 6)
    other = make(world, (2, 2), "three-level", scale=2.0, optimizer=optimizer)
    resume(other, Checkpoint(saved))
    return losses, train(other, 3, 6)


@pytest.mark.parametrize("num_kinds", [1, 2])
def test_sgd_goes_on_from_its_momentum_or_from_no_state_at_all(pool: LocalPool, tmp_path: Path, num_kinds: int) -> None:
    optimizer = SGD[num_kinds]
    for losses, again in pool.run(4, continue_here, tmp_path, optimizer):
        assert again == losses[3:]
    checkpoint = Checkpoint(tmp_path / "checkpoints" / "step-00000003")
    kinds = {"master", "momentum"} if num_kinds == 2 else {"master"}
    assert {name.rpartition("/")[2] for name in contents(checkpoint.folder)} == {*kinds, "frozen"}
    # The same numbers alone, under another plan; the other rule has other states and refuses.
    alone = make(ALONE, (1,), "ddp", scale=2.0, optimizer=optimizer)
    resume(alone, checkpoint)
    assert train(alone, 3, 6) == pytest.approx(losses[3:], abs=1e-10, rel=0)
    with pytest.raises(CheckpointError, match="use the model, optimizer and"):
        resume(make(ALONE, (1,), "ddp", optimizer=SGD[3 - num_kinds]), checkpoint)
