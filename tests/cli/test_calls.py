"""Work at a start in Python calls, which no load can change: of `terrace --help`, and before a rank's first step."""

import json
from pathlib import Path
from unittest import mock

import pytest

from bench.planner import GPT3
from terrace.launch.start import LocalPool, World
from terrace.launch.stop import Stop
from terrace.train import loop
from terrace.train.job import RunJob
from terrace.train.metrics import Silent
from terrace.train.prepare import prepare
from terrace.train.resolve import resolve
from tests.support.calls import calls_in_a_child, check_calls, counted
from tests.support.tiny_runs import write_run

HELP = """
try:
    import terrace.__main__
    terrace.__main__.main()
except SystemExit:
    pass
"""


def test_help_calls_few_functions() -> None:
    check_calls(calls_in_a_child(f"sys.argv = ['terrace', '--help']{HELP}"), 217)


PLAN = """
try:
    from terrace.cli.main import main
    main()
except SystemExit:
    pass
"""


def test_a_plan_of_gpt3_on_16384_devices_calls_few_functions(tmp_path: Path) -> None:
    """The whole command, whose seconds depend on the machine and its load."""
    model = tmp_path / "config.json"
    model.write_text(json.dumps(GPT3))
    words = ["terrace", "plan", "--model", str(model), "--cluster", "dgx-a100", "--nodes", "2048", "--batch", "1536"]
    words += ["--sequence", "2048", "--out", str(tmp_path / "plan.toml")]
    check_calls(calls_in_a_child(f"sys.argv = {words}{PLAN}"), 4_496_010)


def calls_up_to_the_first_step(world: World, job: RunJob) -> int:
    """Calls of a rank, from the joined world to where the steps begin."""
    stop = Stop(step=0, why="signal", text="SIGTERM")
    with counted() as calls, mock.patch.object(loop, "run_steps", return_value=stop):
        assert loop.train(world, job, Silent()) is stop
    return calls.num


@pytest.mark.timeout(120)
def test_a_rank_calls_few_functions_before_its_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path, 2)
    # A cluster with measured constants: a machine is measured for some time, not for a number of calls.
    cluster = {"device": {"marks": {"kernels.gemm": "measured"}}}
    run = resolve("run.toml", {}, {"cluster": cluster})
    job = prepare(run, tmp_path / "run", None)
    with LocalPool(2) as pool:
        found = pool.run(2, calls_up_to_the_first_step, job)
    check_calls(max(found), 17_351)
