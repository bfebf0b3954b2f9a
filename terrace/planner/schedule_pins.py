"""Schedules within the pins of a space, and early errors for pins that exclude all of them."""

from terrace.base.errors import PlanError
from terrace.base.words import counted
from terrace.planner.pins import MOST
from terrace.planner.space import Space
from terrace.planner.stages import ONLY_PINNED, SERIAL, traits


def check_schedule(space: Space) -> None:
    """Raise `PlanError` if no plan of the space has the pinned schedule or the pinned chunks."""
    pins, name, known = space.pins, space.pins.schedule, traits()
    low, high = pins.ranges.get("chunks", (-MOST, MOST))
    if name is None and low <= 1:
        return  # a plan without a pipeline satisfies these
    words = f"pin schedule={name}" if name is not None else f"pin chunks{'=' if low == high else '>='}{low}"
    if name is not None and name not in known:
        raise PlanError(
            f"{words}: its order is built from the seconds of a plan's stages, so no plan of the search has it; pin "
            f"one of {', '.join(known)}, and price the found plan with terrace simulate FILE --plan.schedule {name}"
        )
    software = space.task.cluster.device.software
    if name is not None and not software.runs_all and name not in software.plans.schedules:
        known_words = ", ".join(sorted(software.plans.schedules)) or "none"
        raise PlanError(
            f"{words}: software {software.name!r} is not described with it (its schedules: {known_words}); drop the "
            "pin, or name another software"
        )
    if "pipeline" not in space.axes:
        raise PlanError(f"{words} needs a pipeline: add --axes {','.join((*space.axes, 'pipeline'))}")
    fewest, most = pins.ranges.get("pipeline", (2, MOST))
    if max(fewest, 2) > min(most, space.task.cluster.world_size):
        raise PlanError(f"{words} needs a pipeline, and the other pins or the ranks leave one stage: drop a pin")
    allowed = sorted({number for each in known if name in (None, each) for number in known[each].chunks})
    if not any(pins.allows("chunks", number) for number in allowed):
        owner = "schedules have" if name is None else f"schedule {name} has"
        span = f"chunks={low}" if low == high else f"chunks<={high}" if low == -MOST else f"chunks>={low}"
        raise PlanError(f"pin {span}: {owner} {', '.join(map(str, allowed))} chunks a stage; pin one of these numbers")
    _check_virtual(space, words, max(fewest, 2), [each for each in allowed if pins.allows("chunks", each)])


def _check_virtual(space: Space, words: str, num_stages: int, allowed: list[int]) -> None:
    """Raise `PlanError` if even the fewest stages and chunks exceed the number of blocks of the model.

    `words` name the pin of the schedule or its chunks; `allowed` are the remaining numbers of chunks.
    """
    task, most = space.task, space.task.most_stages
    virtual = num_stages * allowed[0]
    # If the stages alone are too many, the error names their own pin.
    if virtual <= most or num_stages > most:
        return
    low, high = space.pins.ranges.get("pipeline", (2, MOST))
    beside = f" and pipeline{'=' if low == high else '>='}{num_stages}" if "pipeline" in space.pins.ranges else ""
    ends = ", embedding and head" if most > len(task.inner) else ""
    fixes = [f"chunks to at most {most // num_stages}"] if "chunks" in space.pins.ranges else []
    fixes += [f"pipeline to at most {most // allowed[0]}"] if beside and most >= 2 * allowed[0] else []
    raise PlanError(
        f"{words}{beside}: {num_stages} stages x {counted(allowed[0], 'chunk')} are {virtual} virtual stages, and each "
        f"needs one of the {len(task.inner)} layers{ends}; {'pin ' + ', or '.join(fixes) if fixes else 'drop the pin'}"
    )


def schedules(space: Space, num_stages: int) -> list[tuple[str, int]]:
    """(Name, chunks) of the schedules for a number of stages."""
    if num_stages == 1:
        known = [(SERIAL, 1)]
    else:
        software = space.task.cluster.device.software
        there = [name for name in traits() if space.task.runs_all or name in software.plans.schedules]
        searched = [name for name in there if name not in ONLY_PINNED or space.pins.schedule == name]
        known = [(name, chunks) for name in searched for chunks in traits()[name].chunks]
    pins = space.pins
    return [each for each in known if pins.schedule in (None, each[0]) and pins.allows("chunks", each[1])]
