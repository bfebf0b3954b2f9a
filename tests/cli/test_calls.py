"""Work in Python calls, which no load can change: of `terrace --help`, of a rank's start and step, of a drawn token."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from bench.planner import GPT3
from terrace.generation.engine import GenerationEngine
from terrace.generation.request import Request, Sampling
from terrace.launch.start import LocalPool, World
from terrace.launch.stop import Stop
from terrace.train import loop
from terrace.train.job import RunJob
from terrace.train.metrics import Silent
from terrace.train.prepare import prepare
from terrace.train.rank import RankOfRun
from terrace.train.resolve import resolve
from terrace.train.stepping import run_steps
from tests.support.calls import calls_in_a_child, check_calls, counted
from tests.support.generation import MODELS, make
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


@pytest.mark.nightly  # by day the work of programs and plays is counted: tests/program, tests/simulate
def test_a_plan_of_gpt3_on_16384_devices_calls_few_functions(tmp_path: Path) -> None:
    """The whole command, whose seconds depend on the machine and its load."""
    model = tmp_path / "config.json"
    model.write_text(json.dumps(GPT3))
    words = ["terrace", "plan", "--model", str(model), "--cluster", "dgx-a100", "--nodes", "2048", "--batch", "1536"]
    words += ["--sequence", "2048", "--out", str(tmp_path / "plan.toml")]
    check_calls(calls_in_a_child(f"sys.argv = {words}{PLAN}"), 1_144_600)


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


def calls_of_steps(world: World, job: RunJob) -> tuple[int, int]:
    """(Calls of all steps of a rank, instructions of one step)."""
    counts = list[int]()

    def steps(rank: RankOfRun, *more: Any) -> Stop | None:
        with counted() as calls:
            stop = run_steps(rank, *more)
        counts.extend((calls.num, len(rank.engine.program.instructions)))
        return stop

    with mock.patch.object(loop, "run_steps", steps):
        loop.train(world, job, Silent())
    num_calls, num_instructions = counts
    return num_calls, num_instructions


@pytest.mark.timeout(120)
def test_an_instruction_of_a_step_calls_few_functions(
    pool: LocalPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step of `make train`, hooks and data included; what only the first steps or the last does is not counted."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path, 2)
    cluster = {"device": {"marks": {"kernels.gemm": "measured"}}}
    found = []
    for steps in (6, 12):
        run = resolve("run.toml", {}, {"cluster": cluster, "train": {"steps": steps}})
        found.append(pool.run(2, calls_of_steps, prepare(run, tmp_path / f"run {steps}", None)))
    (short, num_instructions), (long, _) = (max(ranks) for ranks in found)
    check_calls(round((long - short) / 6 / num_instructions), 37)


def test_a_drawn_token_calls_few_functions() -> None:
    config = MODELS["llama"]
    blocks, counts = make(config), list[int]()
    for num_tokens in (4, 20):
        engine = GenerationEngine(blocks, config, rows=1, context=32, num_pages=64, page_tokens=4)
        request = Request(prompt=(1, 2, 3), num_tokens=num_tokens, sampling=Sampling(seed=1))
        with counted() as calls:
            engine.run([request])
        counts.append(calls.num)
    check_calls((counts[1] - counts[0]) // 16, 166)
