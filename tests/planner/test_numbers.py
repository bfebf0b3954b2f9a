"""Micro-batch and unit that a run leaves out: the best of all choices within memory; given numbers stay."""

from dataclasses import replace
from typing import Any

import pytest

from terrace.base.errors import PlanError
from terrace.plan.plan import Plan
from terrace.planner.divisions import divisors
from terrace.planner.ranking import TIE
from terrace.simulate.fullest import Job, fullest_stage
from terrace.simulate.step import predict_step
from terrace.train.config import RunConfig
from terrace.train.prediction import step_of
from terrace.train.resolve import resolve
from tests.support.nightly import every
from tests.support.tiny_runs import MODEL

RUNS: list[dict[str, Any]] = [
    {},
    {"plan": {"preset": "ddp"}},
    {"plan": {"preset": "zero3"}, "train": {"batch": 64}},
    {"plan": {"preset": "zero3", "compute": "bf16"}, "train": {"batch": 128, "sequence": 16}},
    {"plan": {"preset": "zero1", "mapping": {"node": {"pipeline": 2}}}, "train": {"batch": 64}},
    {"plan": {"preset": "ddp", "mapping": {"package": {"context": {"ring": 2}}}}},
]


def run_of(table: dict[str, Any], **plan: Any) -> RunConfig:
    return resolve(None, {}, table | {"plan": {"preset": "three-level"} | table.get("plan", {}) | plan})


def needed_bytes(run: RunConfig) -> int:
    job = Job(cluster=run.cluster, plan=run.plan, num_micros=run.num_micros())
    return sum(fullest_stage(job, run.blocks(), run.train.sequence)[1].values())


def every_choice(table: dict[str, Any]) -> dict[tuple[int, int], RunConfig]:
    one = run_of(table, micro_batch=1, unit=1)
    sizes = divisors(one.num_micros())
    found = {(size, unit): (size, unit) for size in sizes for unit in divisors(one.num_micros() // size) if unit <= 8}
    return {each: run_of(table, micro_batch=each[0], unit=each[1]) for each in found}


@pytest.mark.parametrize("table", every(2, RUNS))
def test_the_choice_is_the_fastest_of_all_that_fit(table: dict[str, Any]) -> None:
    every = every_choice(table)
    seconds = {each: predict_step(step_of(run)).step_s for each, run in every.items()}
    bytes_of = {each: needed_bytes(run) for each, run in every.items()}
    chosen = run_of(table)
    assert seconds[chosen.plan.micro_batch, chosen.plan.unit] <= min(seconds.values()) * (1 + TIE) ** 2
    # With half the room between the least and the most, another choice.
    room = (min(bytes_of.values()) + max(bytes_of.values())) // 2
    tight = run_of(table | {"cluster": {"device": {"memory_bytes": float(room), "headroom": "0%"}}})
    assert needed_bytes(tight) <= room < max(bytes_of.values())
    fitting = min(taken for each, taken in seconds.items() if bytes_of[each] <= room)
    assert seconds[tight.plan.micro_batch, tight.plan.unit] <= fitting * (1 + TIE) ** 2


def test_a_number_that_is_given_is_kept() -> None:
    table = {"train": {"batch": 64}}
    assert run_of(table, micro_batch=2).plan.micro_batch == 2
    for unit in (2, 8):
        run = run_of(table, unit=unit)
        assert run.plan.unit == unit <= run.num_micros()
    both = run_of(table, micro_batch=1, unit=4).plan
    assert (both.micro_batch, both.unit) == (1, 4)


@pytest.mark.parametrize("stages", [[2, 2, 2], [0, 6], [4, 4], [-1, 7]])
@pytest.mark.parametrize("numbers", [{}, {"micro_batch": 1}, {"unit": 1}])
def test_wrong_stages_are_refused_in_a_line_whichever_numbers_are_left_out(
    stages: list[int], numbers: dict[str, int]
) -> None:
    mapping = {"node": {"pipeline": 2}}
    with pytest.raises(PlanError, match="of each of the 2 virtual stages, at least 1 each, 6 together") as caught:
        run_of({"plan": {"preset": "ddp", "mapping": mapping}}, stages=stages, **numbers)
    assert str(caught.value).startswith(f"stages = {stages}: ")


def test_where_nothing_fits_the_numbers_stay_one() -> None:
    for table in ({"cluster": {"device": {"memory_bytes": 1e6}}}, {"train": {"batch": 8 * 10**18}}):
        plan = run_of(table).plan
        assert (plan.micro_batch, plan.unit) == (1, 1)


def test_a_cpu_that_is_slower_in_bf16_computes_in_fp32_and_sends_bf16() -> None:
    def dtypes(plan: Plan) -> tuple[str, str | None]:
        return plan.compute, plan.messages

    assert dtypes(run_of({}).plan) == ("fp32", "bf16")
    assert dtypes(run_of({}, compute="fp32").plan) == ("fp32", None)
    assert dtypes(run_of({}, compute="bf16").plan) == ("bf16", None)
    assert dtypes(run_of({}, messages="fp32").plan) == ("fp32", "fp32")
    fast = {"cluster": {"device": {"peak_flops_per_s": {"bf16": 2e10}}}}
    assert dtypes(run_of(fast).plan) == ("fp32", None)
    # Half the bytes of parameters and gradients, and no other.
    narrow = run_of({}, micro_batch=1, unit=1)
    wide = replace(narrow, plan=replace(narrow.plan, messages=None))
    sent, before = (predict_step(step_of(run)).sent_bytes[0] for run in (narrow, wide))
    control = {each: size for each, size in before.items() if each[0].value == "control"}
    assert control
    assert sent == {each: size if each in control else size // 2 for each, size in before.items()}


def tight_run(memory_bytes: float, **plan: Any) -> RunConfig:
    model = {"hidden_size": 512, "num_hidden_layers": 8, "max_position_embeddings": 512}
    return resolve(
        None,
        {"cluster": "local"},
        {
            "cluster": {"device": {"memory_bytes": memory_bytes, "headroom": "0%"}},
            "model": MODEL | model | {"intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 8},
            "plan": plan,
            "data": {"path": "pairs.jsonl", "format": "pairs"},
            "train": {"batch": 24, "sequence": 512, "objective": "dpo"},
        },
    )


def test_the_micro_batch_that_is_chosen_fits_with_whole_pairs() -> None:
    # Of the six sequences of a rank three would fit, too.
    pair, share = (needed_bytes(tight_run(1e12, micro_batch=size, unit=1)) for size in (2, 6))
    run = tight_run((pair + share) / 2)
    assert run.plan.micro_batch == 2
    assert needed_bytes(run) <= run.cluster.device.memory_bytes < share
    # A pair where nothing fits; a unit that is given keeps its micro-batches.
    assert tight_run(1e6).plan.micro_batch == 2
    run = tight_run(1e12, unit=2)
    assert run.plan.unit == 2 <= run.num_micros()
