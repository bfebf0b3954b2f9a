"""What a run leaves that has chosen shares or formats anew: its deals repeat its numbers."""

import shutil
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from terrace.cli.main import main
from terrace.train.deals import read_deals
from tests.support.checkpoints import contents, differing
from tests.support.tiny_runs import losses, terrace


def check_resumed_and_repeated(whole: Path, killed: int) -> None:
    """A copy of a run of 12 steps, resumed after `killed` steps, has its bits; step 11 alone has its figures.

    The run has saved after every second step.
    """
    begun = whole.parent / "begun"
    shutil.copytree(whole, begun)
    for step in range(killed + 2, 13, 2):
        shutil.rmtree(begun / "checkpoints" / f"step-{step:08d}")
    done = terrace("train", "--resume", begun, cwd=whole.parent)
    assert done.returncode == 0, done.stderr
    kept, again = (contents(each / "checkpoints" / "step-00000012") for each in (whole, begun))
    assert differing(kept, again) == []
    assert losses(begun) == losses(whole)
    assert read_deals(begun) == read_deals(whole)
    said = StringIO()
    with redirect_stdout(said):
        assert main(["replay", str(whole), "--step", "11"]) == 0
    figures = next(line for line in said.getvalue().splitlines() if line.startswith("step 11: "))
    here, there = figures.removeprefix("step 11: ").split("; in the run ")
    assert here == there
