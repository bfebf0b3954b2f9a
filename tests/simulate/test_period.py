"""Periods of several programs: verified, summed, and their memory the peak over programs that share it."""

from dataclasses import replace

import pytest

from terrace.plan.presets import preset
from terrace.program.instruction import Op
from terrace.program.lowering import build_stages, forward_programs
from terrace.program.period import Period, Turn
from terrace.program.program import Program
from terrace.program.verify_ranks import verify_stages
from terrace.simulate.carried import play_period
from terrace.simulate.step import Step, predict_step
from tests.support.pipelines import ALONE, OUTER, pipelined
from tests.support.toys import MODELS, SEQUENCE, cluster_of

MODEL = MODELS["deep llama tied"]
FLOPS = tuple(1e9 * (1 + block) for block in range(len(MODEL.declared)))


def steps_of(name: str, num_micros: int = 2) -> tuple[Program, ...]:
    if name == "1f1b":
        plan, cluster = pipelined("zero3", OUTER, "1f1b"), cluster_of(*OUTER.sizes)
    else:
        cluster = cluster_of(2, 2)
        plan = preset(name, cluster)
    return tuple(build_stages(cluster, plan, MODEL.declared, num_micros, SEQUENCE))


def evaluating(name: str, times: int = 3) -> Period:
    steps = steps_of(name)
    return Period((Turn(steps, times), Turn(tuple(forward_programs(steps)))))


@pytest.mark.parametrize("name", ["ddp", "zero3", "zero++", "1f1b"])
def test_a_period_is_the_sum_of_its_runs(name: str) -> None:
    period = evaluating(name)
    for turn in period.turns:
        verify_stages(turn.programs)
    train_s, forward_s = play_period(period, FLOPS)
    steps, forwards = (turn.programs for turn in period.turns)
    step = Step(
        cluster=steps[0].cluster,
        plan=replace(steps[0].plan, stages=tuple(len(each.stage.own) for each in steps) if len(steps) > 1 else ()),
        blocks=MODEL.declared,
        num_micros=2,
        sequence=SEQUENCE,
        work=FLOPS,
    )
    alone = predict_step(step).reports
    for stage, report in enumerate(alone):
        # An evaluation is over before the next step, as the step before is.
        three_s = {category: 3 * each_s for category, each_s in report.time_s.items()}
        assert train_s[stage] == pytest.approx(three_s, rel=1e-6, abs=3e-11)
        assert 0 < sum(forward_s[stage].values()) < report.step_s
        # By hand, run by run, from the instructions.
        counted: dict[object, int] = {}
        for program in period.runs(stage):
            for now in program.instructions:
                messages = [] if now.message_class is None else [program.message(now)]
                for message in (*messages, *program.messages_inside(now)):
                    for tier, size in message.sends:
                        key = (message.message_class, program.layout.tiers[tier])
                        counted[key] = counted.get(key, 0) + size
        assert {key: size for key, size in period.sent_bytes(stage).items() if size} == {
            key: size for key, size in counted.items() if size
        }
        # Forwards hold no more than a step does, of anything.
        assert period.state_bytes(stage) == steps[stage].state_bytes
        assert 0 < sum(forwards[stage].state_bytes.values()) <= sum(steps[stage].state_bytes.values())


def test_an_evaluation_takes_its_share_of_seconds() -> None:
    (step_s,), (forward_s,) = play_period(evaluating("ddp", 1), FLOPS)
    assert forward_s["forward"] == pytest.approx(2 * sum(FLOPS) / step_peak(), rel=0.01)
    assert forward_s["forward"] < sum(step_s.values()) / 2


def step_peak() -> float:
    (program,) = steps_of("ddp")
    return max(program.cluster.device.peak_flops_per_s.values())


def test_steps_alone_are_a_period() -> None:
    steps = build_stages(cluster_of(*ALONE.sizes), pipelined("ddp", ALONE, "1f1b"), MODEL.declared, 4, SEQUENCE)
    period = Period((Turn(tuple(steps)),))
    assert (period.num_steps, period.num_stages) == (1, len(steps))
    assert [period.sent_bytes(stage) for stage in range(len(steps))] == [each.sent_bytes for each in steps]


def test_turns_that_share_their_first_program_are_told_apart() -> None:
    first, second = steps_of("1f1b")
    # No program of a run, but one whose figures differ.
    short = replace(second, instructions=tuple(now for now in second.instructions if now.op is not Op.UPDATE))
    found = play_period(Period((Turn((first, second)), Turn((first, short)))), FLOPS)
    assert ["update" in times[1] for times in found] == [True, False]
    (alone,) = play_period(Period((Turn((first, second)),)), FLOPS)
    for times, other in zip(found[0], alone, strict=True):
        assert times["update"] == pytest.approx(other["update"], rel=1e-9)
