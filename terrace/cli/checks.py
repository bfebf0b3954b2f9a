"""Checks of a run before it starts: all of them for `terrace doctor`, one as a warning in `terrace train`."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from terrace.base.errors import PlanError, TerraceError
from terrace.base.words import counted, quantity, seconds
from terrace.cluster.cluster import Cluster
from terrace.cluster.device import headroom_bytes, room_words
from terrace.launch.launchers import is_launched
from terrace.plan.plan import precision_of
from terrace.planner.bottleneck import Bottleneck, better_plan, bottleneck
from terrace.planner.ranking import Estimate
from terrace.planner.task import Task
from terrace.probe.findings import Finding
from terrace.probe.machine import Machine
from terrace.report.plans import plan_words
from terrace.simulate.bands import band_of
from terrace.simulate.fullest import fullest_stage, worst_words
from terrace.train.config import RunConfig
from terrace.train.planned import torchrun
from terrace.train.prediction import checked_programs, job_of, resolved_run

_LIMIT = 24  # plans that the doctor plays, as many as terrace plan
# The start of a run must not wait for a search. On up to _SMALL_WORLD ranks, _FEW simulations take a few tenths of a
# second; if pricing the plan itself took longer than _SOON_S, the search is skipped.
_SMALL_WORLD, _FEW, _SOON_S = 32, 40, 0.1


def check_run(run: RunConfig, machine: Machine, plan_command: str) -> list[Finding]:
    """Findings about a run whose parts can be read; `plan_command` is the command that searches for a faster plan."""
    try:
        known = resolved_run(run)
        checked_programs(known)
    except TerraceError as error:
        return [Finding(level="blocks", about="plan", words=str(error), fix=_remedy(run, _LIMIT, plan_command))]
    ranks = run.cluster.world_size
    # The programs were built and verified: no rule is broken.
    words = f"plan {run.plan.name} suits cluster {run.cluster.name} with {counted(ranks, 'rank')} and this model"
    return [
        Finding(level="fine", about="plan", words=words),
        _memory(known, plan_command),
        *_place(known, machine),
        *_speed(run, plan_command),
    ]


def _memory(run: RunConfig, plan_command: str) -> Finding:
    job = job_of(run)
    stage, needed = fullest_stage(job, run.blocks(), run.train.sequence)
    device, total = run.cluster.device, sum(needed.values())
    of_stage = f" on stage {stage}" if any(row.get("pipeline") for row in run.plan.mapping.values()) else ""
    words = f"a rank needs {quantity(total, 'B')}{of_stage} of {device.room_words}"
    if total <= device.usable_bytes:
        worst = worst_words(job, run.blocks(), run.train.sequence)
        return Finding(level="fine", about="memory of a rank", words=f"{words}; {worst}" if worst else words)
    return Finding(level="blocks", about="memory of a rank", words=words, fix=_remedy(run, _LIMIT, plan_command))


def _remedy(run: RunConfig, limit: int, plan_command: str = "") -> str:
    if run.teacher.is_online:  # the planner knows no teacher, so its plans might not fit either
        return (
            "shard the teacher further (teacher.plan), name a smaller one, or keep its most probable tokens instead "
            "(teacher.top_k)"
        )
    if run.plan.outer.has_islands:  # a search of islands needs bounds of their loop
        return "terrace plan --outer searches the plans of islands that fit"
    # Of all starts only one that is refused searches for more nodes.
    from terrace.cli.no_plan import fitting_words

    try:
        return fitting_words(task_of(run, run.cluster), limit, plan_command)
    except TerraceError as error:
        return f"the planner knows no other plan: {error}"


def _place(run: RunConfig, machine: Machine) -> Iterator[Finding]:
    # Under a launcher other machines may hold the other ranks: only local runs are checked.
    ranks, launched = run.cluster.world_size, is_launched(machine.variables)
    if launched or len(machine.gpus) >= ranks:
        return
    if run.cluster.device.type == "cuda":
        words = f"one CUDA device each for {counted(ranks, 'rank')}; this machine has {len(machine.gpus)}"
        fix = f"on the cluster's machines: {torchrun(run.cluster, 'train ...')}"
        yield Finding(level="note", about="ranks", words=words, fix=fix)
        return
    together = _local_bytes(run)
    places = f"{counted(ranks, 'local rank')} on {counted(machine.num_cores, 'core')}"
    words = f"{places} need about {quantity(together, 'B')} together"
    if together > machine.free_memory_bytes:
        words += f", and {quantity(machine.free_memory_bytes, 'B')} are free"
        yield Finding(level="note", about="ranks", words=words, fix="take fewer ranks or a smaller model here")
    else:
        yield Finding(level="fine", about="ranks", words=words)


def _local_bytes(run: RunConfig) -> int:
    # Local ranks share this machine's memory.
    job = job_of(run)
    rank_bytes = sum(fullest_stage(job, run.blocks(), run.train.sequence, "cpu")[1].values())
    return run.cluster.world_size * rank_bytes


def check_devices_here(run: RunConfig, num_devices: int) -> None:
    """Raises `PlanError` if a run needs more CUDA devices than this machine has."""
    ranks = run.cluster.world_size
    if run.cluster.device.type == "cuda" and num_devices < ranks:
        raise PlanError(
            f"cluster {run.cluster.name!r} has {counted(ranks, 'rank')} with a CUDA device each, and this machine has "
            f"{counted(num_devices, 'CUDA device')}: start it on the cluster, as {torchrun(run.cluster, 'train ...')} "
            "(or srun terrace train ...); to try it on this machine's CPU, add --cluster.device.backend cpu"
        )


def check_memory_here(run: RunConfig, device_bytes: Sequence[int], memory_bytes: int) -> None:
    """Raises `PlanError` if this machine's memory cannot hold the local ranks.

    `device_bytes` is the memory of each CUDA device; if there are fewer devices than ranks, the ranks share
    `memory_bytes`. The headroom of the cluster's device stays free in both cases.
    """
    run, ranks = resolved_run(run), run.cluster.world_size
    if len(device_bytes) >= ranks:
        job = job_of(run)
        needed = sum(fullest_stage(job, run.blocks(), run.train.sequence, "cuda")[1].values())
        have, words = min(device_bytes), "a rank needs about"
    else:
        needed, have, words = _local_bytes(run), memory_bytes, f"{counted(ranks, 'local rank')} need about"
    headroom = run.cluster.device.headroom
    if needed > have - headroom_bytes(headroom, have):
        place = "a CUDA device here" if len(device_bytes) >= ranks else "this machine"
        remedy = _local_remedy(run, have, len(device_bytes) >= ranks)
        raise PlanError(
            f"{words} {quantity(needed, 'B')}, and {place} has {room_words(have, headroom)}: take a plan that needs "
            f"less ({remedy}), a smaller model, batch or --headroom, or start it on the machines of a cluster, as "
            f"{torchrun(run.cluster, 'train ...')} (or srun terrace train ...); terrace doctor with the same options "
            "says more"
        )


def _local_remedy(run: RunConfig, have_bytes: int, is_of_one: bool) -> str:
    rank_bytes = have_bytes if is_of_one else have_bytes // run.cluster.world_size
    device = replace(run.cluster.device, memory_bytes=rank_bytes)
    # A start that is refused may take a moment longer, not minutes.
    return _remedy(replace(run, cluster=replace(run.cluster, device=device)), _FEW)


def _speed(run: RunConfig, plan_command: str) -> Iterator[Finding]:
    try:
        task = task_of(run, run.cluster)
        slow = bottleneck(task, run.plan)
        # Searched even without a bottleneck: the doctor has the time that a training start has not.
        better = better_plan(task, slow.step_s, _LIMIT)
    except PlanError as error:
        yield Finding(level="fine", about="speed", words=f"the planner cannot price this plan ({error})")
        return
    # The planner prices the student alone.
    alone = " without the teacher" if run.teacher.is_online else ""
    step, waits = f"{seconds(slow.step_s)} {band_of(run.cluster, run.plan)}", f"{100 * slow.share:.0f} %"
    mean = " in the mean of a cycle" if run.plan.outer.has_islands else ""
    words = f"predicted step {step}{alone}{mean}, of which {waits} wait for messages on tier {slow.tier}"
    fix = "" if better is None else f"{_better_words(task, better, slow)}; to have it written: {plan_command}"
    yield Finding(level="note" if slow.is_most else "fine", about="speed", words=words, fix=fix)


def slow_warning(run: RunConfig, cluster: Cluster, limit_s: float = _SOON_S) -> str:
    """Warning for a run whose step mostly waits on one tier, with a faster plan; "" otherwise.

    `cluster` has the constants measured at the start of the run. Takes well under a second: if a search would take
    longer, the warning refers to `terrace doctor` instead of naming a plan.
    """
    begin_s = time.perf_counter()
    try:
        task = task_of(run, cluster)
        slow = bottleneck(task, run.plan)
        if not slow.is_most:
            return ""
        # Large worlds and slow machines get a pointer to the doctor instead of a search.
        if cluster.world_size > _SMALL_WORLD or time.perf_counter() - begin_s > limit_s:
            return f"{_slow_words(slow)}; terrace doctor with the same options says whether another plan is faster"
        better = better_plan(task, slow.step_s, _FEW)
    except PlanError:
        # The planner cannot price this plan, so there is no warning to give.
        return ""
    if better is None:
        return f"{_slow_words(slow)}, and of the plans that were tried none is a tenth faster"
    words = _better_words(task, better, slow)
    return f"{_slow_words(slow)}; {words} (terrace doctor with the same options searches further)"


def task_of(run: RunConfig, cluster: Cluster) -> Task:
    """The run as a task of the planner. Raises `PlanError` if the planner does not support it."""
    plan = run.plan
    return Task(
        model=run.model,
        cluster=cluster,
        batch=run.rows,
        sequence=run.train.sequence,
        **precision_of(plan),
        wire=plan.wire,
    )


def _slow_words(slow: Bottleneck) -> str:
    return f"{100 * slow.share:.0f} % of the predicted step wait for messages on tier {slow.tier}"


def _better_words(task: Task, better: Estimate, than: Bottleneck) -> str:
    gain = than.step_s / better.step_s
    words = plan_words(task, better.candidate)
    return f"predicted to be {gain:.2g} times as fast ({seconds(better.step_s)} a step): {words}"
