"""States below the device in a search: allowed, and unasked where nothing else fits."""

from dataclasses import replace

import pytest

from terrace.base.errors import PlanError
from terrace.cluster.below import Medium
from terrace.cluster.presets import load_cluster
from terrace.model.config import parse_model
from terrace.plan.keep import ALL_ON_DEVICE, Keep
from terrace.plan.presets import preset
from terrace.planner.advice import best_changes
from terrace.planner.estimate import Estimator
from terrace.planner.evaluate import step_of
from terrace.planner.kept import KeptSearch, take_keep
from terrace.planner.products import ProductsFound, find_with
from terrace.planner.ranking import Estimate
from terrace.planner.space import Space
from terrace.planner.task import Placement, Task
from terrace.simulate.step import predict_step
from tests.support.planner_cases import CLUSTERS, task_on

HOST = Medium(memory_bytes=1e12, read_bytes_per_s=2e10, write_bytes_per_s=2e10)
DISK = Medium(memory_bytes=1e12, read_bytes_per_s=2e9, write_bytes_per_s=2e9)


DEEP = parse_model(
    {
        "model_type": "llama",
        "vocab_size": 1024,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 3072,
    }
)


def task_with(memory_bytes: float, **below: Medium) -> Task:
    task = task_on(load_cluster("workstation"))
    device = replace(task.cluster.device, memory_bytes=memory_bytes, below=below)
    return replace(task, cluster=replace(task.cluster, device=device))


def search(space: Space) -> ProductsFound:
    return find_with(None, space, {}, [], 1, 400)


def searched(kept: KeptSearch, task: Task) -> tuple[Task, Estimate] | None:
    found = kept(Space(task=task, axes=("data",))).searched
    return (found.space.task, found.found.best[0]) if found.found.best else None


def found(kept: KeptSearch, task: Task) -> Task | None:
    chosen = searched(kept, task)
    return None if chosen is None else chosen[0]


def test_unasked_states_rest_below_only_where_nothing_else_fits() -> None:
    roomy = task_with(80e9, host=HOST, disk=DISK)
    low, high = 1.6e9, 80e9  # of which nothing fits the first, with or without states below
    assert found(KeptSearch((), search), roomy) == roomy
    while high - low > 0.02 * low:
        middle = (low + high) / 2
        fits = found(KeptSearch((), search), task_with(middle)) is not None
        low, high = (low, middle) if fits else (middle, high)
    tight = task_with(low, host=HOST, disk=DISK)
    kept = KeptSearch((), search)
    chosen = searched(kept, tight)
    assert chosen is not None
    assert chosen[0].keep == Keep(optimizer="host"), "the faster medium"
    words = kept.words(*chosen)
    assert "nothing fits on the device alone: optimizer states are kept on the host" in words
    assert "a step reads 161 MB from the host in 8.0 ms, writes 161 MB in 8.0 ms, and computes for" in words
    on_disk = found(KeptSearch((), search), task_with(low, disk=DISK))
    assert on_disk is not None
    assert on_disk.keep.optimizer == "disk"
    assert found(KeptSearch((), search), task_with(low)) is None
    full = replace(HOST, memory_bytes=1e8)
    assert found(KeptSearch((), search), task_with(low, host=full)) is None, "161 MB of states"
    both = found(KeptSearch((), search), task_with(low, host=full, disk=DISK))
    assert both is not None
    assert both.keep.optimizer == "disk"


def test_parameters_and_gradients_rest_below_where_states_alone_do_not_help() -> None:
    kept, used = KeptSearch((), search), list[Keep]()
    deep = replace(task_with(80e9, disk=DISK), model=DEEP, batch=1, sequence=64)
    for memory_bytes in (20e9, 6e9, 3.4e9, 2.4e9):
        device = replace(deep.cluster.device, memory_bytes=memory_bytes)
        task = found(kept, replace(deep, cluster=replace(deep.cluster, device=device)))
        used += [] if task is None else [task.keep]
    assert used == [
        Keep(),
        Keep(optimizer="disk"),
        Keep(optimizer="disk", params="disk"),
        Keep(optimizer="disk", params="disk", grads="disk"),
    ]


LONG = replace(
    task_with(80e9, host=HOST, disk=DISK), model=replace(DEEP, max_positions=1 << 16), batch=1, sequence=1 << 16
)


def with_memory(task: Task, memory_bytes: float) -> Task:
    return replace(task, cluster=replace(task.cluster, device=replace(task.cluster.device, memory_bytes=memory_bytes)))


def test_unasked_inputs_of_layers_leave_where_states_below_do_not_help() -> None:
    kept, used = KeptSearch((), search), list[tuple[str, ...]]()
    for memory_bytes in (20e9, 14e9, 11e9, 9e9, 7.5e9):
        chosen = searched(kept, with_memory(LONG, memory_bytes))
        assert chosen is not None
        assert chosen[1].needed_bytes <= chosen[0].cluster.device.usable_bytes
        used.append(chosen[0].keep.on("host"))
    every = ("params", "grads", "optimizer", "activations")
    assert used == [(), ("optimizer",), ("params", "optimizer"), ("optimizer", "activations"), every]
    assert chosen is not None
    assert "parameters, gradients, optimizer states and inputs of layers are kept on the host" in kept.words(*chosen)
    least = 24 * (1 << 16) * 1024 * 2  # bytes of all inputs: layers, tokens, hidden size, bf16
    full = replace(HOST, memory_bytes=least + 3.9e9)  # beside the states
    bare = replace(LONG.cluster, device=replace(LONG.cluster.device, below={"host": full}))
    assert found(kept, with_memory(replace(LONG, cluster=bare), 9e9)) is None


def test_inputs_of_layers_are_weighed_against_recomputation() -> None:
    """What they leave room for is layers that keep all."""
    task = with_memory(LONG, 24e9)
    kept = KeptSearch(["host"], search)
    with_inputs, without = searched(kept, task), searched(KeptSearch((), search), task)
    assert with_inputs is not None
    assert without is not None
    assert with_inputs[0].keep.on("host") == ("activations",)
    assert without[0].keep == Keep()
    assert 0 < with_inputs[1].candidate.first < without[1].candidate.first or not without[1].candidate.first
    assert with_inputs[1].step_s < without[1].step_s
    assert "inputs of layers are kept on the host, as allowed: step 10.28 s, 10.46 s without" in kept.words(
        *with_inputs
    )


def test_a_faster_disk_is_a_change_of_a_step_that_waits_for_it() -> None:
    task = replace(task_with(80e9, disk=DISK), keep=Keep(optimizer="disk"))
    plan = replace(preset("ddp", task.cluster), keep=task.keep, micro_batch=task.batch)
    step = step_of(task, plan)
    base = predict_step(step)
    (best,) = (each for each in best_changes(step, base) if each.kind == "cluster")
    assert best.words == "bytes/s of the disk x 2"
    assert best.step_s < base.step_s


def test_allowed_media_that_shorten_nothing_are_not_used() -> None:
    task = task_with(80e9, disk=DISK)
    kept = KeptSearch(["disk"], search)
    chosen = searched(kept, task)
    assert chosen is not None
    assert chosen[0] == task
    assert kept.words(*chosen) == "states and inputs of layers on the disk, as allowed, make no step shorter"
    assert KeptSearch((), search).words(*chosen) == ""


def test_the_price_has_the_bytes_and_the_memory_of_states_below() -> None:
    task = task_with(80e9, disk=DISK)
    asked, rest = take_keep(["sync=int8", "keep=disk"], task)
    assert (asked, rest) == (["disk"], ["sync=int8"])
    kept = replace(task, keep=replace(ALL_ON_DEVICE, optimizer="disk"))
    everywhere = Placement(-1, -1, -1)
    before, after = (Estimator(each).state_bytes((1,), everywhere) for each in (task, kept))
    assert before - after == 12, "two moments and the master copy of bf16 parameters"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("keep=tape", "states can be kept on host or disk; write keep=disk"),
        ("keep=host", "has no host below it"),
    ],
)
def test_media_that_do_not_work_are_refused(text: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        take_keep([text], task_with(80e9, disk=DISK))
    on_cpu = replace(task_on(CLUSTERS["dgx 4x2"]), cluster=load_cluster("local"), compute="fp32")
    with pytest.raises(PlanError, match="the host is the device"):
        take_keep(["keep=host"], on_cpu)


@pytest.mark.parametrize(("cores", "update"), [(2e11, "host"), (2e9, "device")])
def test_states_in_the_hosts_memory_are_updated_where_that_is_faster(cores: float, update: str) -> None:
    """By the simulated step: with a slow link and fast cores on the host, with slow cores through the device."""
    link = Medium(memory_bytes=1e12, read_bytes_per_s=5e9, write_bytes_per_s=5e9, update_bytes_per_s=cores)
    kept = KeptSearch((), search)
    deep = replace(task_with(6e9, host=link), model=DEEP, batch=1, sequence=64)
    chosen = searched(kept, deep)
    assert chosen is not None
    assert chosen[0].keep.update == update
    assert chosen[0].keep.optimizer == "host"
    assert ("updates take the host's cores" in kept.words(*chosen)) == (update == "host")
