"""The programs that ranks build and verify when they start."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from terrace.base.errors import ProgramError
from terrace.program.lowering import build_stages
from terrace.program.program import Program
from terrace.program.verify_ranks import verify_stages
from terrace.runtime import setup
from terrace.runtime.setup import Workload
from tests.support.pipelines import OUTER, pipelined
from tests.support.toys import MODELS, SEQUENCE, cluster_of

MICROS = 4


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of stages that were verified against each other, call by call."""
    calls: list[int] = []

    def verify(programs: Sequence[Program]) -> None:
        calls.append(len(programs))
        verify_stages(programs)

    monkeypatch.setattr(setup, "verify_stages", verify)
    return calls


def built(rank: int, *, done: bool) -> Program:
    cluster, plan = cluster_of(*OUTER.sizes), pipelined("zero3", OUTER, "1f1b")
    workload = Workload(cluster=cluster, plan=plan, num_micros=MICROS, sequence=SEQUENCE, is_verified=done)
    return workload.program_of(rank, MODELS["llama tied"].declared)


def test_rank_0_verifies_the_stages_for_all(verified: list[int]) -> None:
    programs = [built(rank, done=False) for rank in range(4)]
    assert verified == [2]
    assert [program.stage.index for program in programs] == [0, 0, 1, 1]
    assert built(0, done=True) == programs[0]
    assert verified == [2], "whoever prepared the run has verified them"


def test_stages_that_do_not_agree_are_refused_by_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(*arguments: object) -> list[Program]:
        first, last = build_stages(*arguments)  # type: ignore[arg-type]
        receives = [each for each in last.instructions if each.op.name == "RECV"]
        return [first, replace(last, instructions=tuple(each for each in last.instructions if each != receives[0]))]

    monkeypatch.setattr(setup, "build_stages", damaged)
    with pytest.raises(ProgramError):
        built(0, done=False)
