"""A stage that dies or stops in the middle of a schedule: every other rank names it, in time."""

import os
import re
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import product

import pytest

from terrace.base.errors import HangError
from terrace.launch.start import LocalPool, World
from terrace.launch.watchdog import watch
from terrace.program.instruction import Instruction, Op
from tests.support.parity import Case, data_rows, engine_of
from tests.support.pipelines import ALONE, Place, pipelined
from tests.support.toys import cluster_of

TIMEOUT_S = 6.0  # longer than a busy machine keeps a rank from the processor
LIMIT_S = 150.0  # a run that does not end by itself
STEP = 2  # in which the victim is struck

PAIRS = Place((2, 2), {"node": {"pipeline": 2}}, 2)

pytestmark = pytest.mark.timeout(200)


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalPool]:
    with LocalPool(4, grace_s=6.0) as pool:
        yield pool


def struck(world: World, case: Case, sizes: tuple[int, ...], victim: int, where: Instruction, how: str) -> None:
    """Step until the victim is struck, which happens when it begins an instruction of step `STEP`."""
    step = 0
    with watch(world, timeout_s=TIMEOUT_S) as dog, dog.guard():

        def progress(counter: int, instruction: object, waiting_on: tuple[int, ...]) -> None:
            dog.at(step, counter, instruction, waiting_on)
            if (world.rank, step, instruction) == (victim, STEP, where) and not waiting_on:
                if how == "computing":
                    time.sleep(1000)
                os.kill(os.getpid(), signal.Signals[how])

        engine = engine_of(world, cluster_of(*sizes), case, progress=progress, timeout=timedelta(seconds=2 * TIMEOUT_S))
        for step in range(1000):
            engine.step(data_rows(engine, case, step), 1e-3)


def fault(pool: LocalPool, case: Case, place: Place, victim: int, where: Instruction, how: str) -> str:
    """The one message of all survivors; raises unless they end by themselves."""
    with pytest.raises(HangError) as caught:
        pool.run(4, struck, case, place.sizes, victim, where, how, timeout_s=LIMIT_S)
    said = str(caught.value)
    assert "\n" not in said
    return said


# 1F1B of 4 stages and 8 micro-batches on stage 1: F0 F1 F2, then F3 B0 F4 B1 ..., then B5 B6 B7.
PHASES = {
    "warm-up": Instruction(Op.FORWARD, 1, 1),
    "steady": Instruction(Op.BACKWARD, 1, 2),
    "drain": Instruction(Op.BACKWARD, 1, 6),
}


@pytest.mark.parametrize(
    ("how", "phase"),
    [("SIGKILL", "steady")]
    + [
        pytest.param(*case, marks=pytest.mark.nightly)
        for case in product(("SIGKILL", "computing"), PHASES)
        if case != ("SIGKILL", "steady")
    ],
)
def test_every_other_stage_names_the_one_that_stopped(pool: LocalPool, phase: str, how: str) -> None:
    case = Case(pipelined("ddp", ALONE, "1f1b", stages=(1, 1, 1, 1)), num_micros=8, model="llama tied")
    said = fault(pool, case, ALONE, 1, PHASES[phase], how)
    check_named(said, 1, str(PHASES[phase]), how)
    assert said.endswith("(reported by ranks 0, 2-3)" if how == "SIGKILL" else "(reported by ranks 0-3)"), said


def check_named(said: str, victim: int, where: str, how: str) -> None:
    """One message, which names the victim, where it stood, and somebody who waits for it."""
    assert len(re.findall(r"rank \d (?:stopped|has not moved|left|is furthest)", said)) == 1, said
    if how == "computing":
        found = rf"rank {victim} has not moved for [\d.]+ s from step {STEP}, instruction \d+ `{where}` \(computing"
        assert re.match(found, said), said
    else:
        # It may have been further than what it last published, and those who wait for it may know better.
        assert re.match(rf"rank {victim} stopped at (or before )?step [{STEP - 1}{STEP}], instruction \d+ `", said), (
            said
        )
        assert "no heartbeat for" in said
    assert "waiting for it: rank" in said or how == "SIGKILL", said


@pytest.mark.nightly
def test_a_frozen_rank_beside_data_ranks_is_named(pool: LocalPool) -> None:
    """Its data rank waits inside a collective, the stage behind for its message, and that one's data rank for it."""
    where = Instruction(Op.BACKWARD, 2, 1)
    plan = pipelined("zero3", PAIRS, "1f1b", stages=(2, 2))
    said = fault(pool, Case(plan, num_micros=4, model="llama tied"), PAIRS, 2, where, "SIGSTOP")
    check_named(said, 2, str(where), "SIGSTOP")
    assert said.endswith("(reported by ranks 0-1, 3)"), said
