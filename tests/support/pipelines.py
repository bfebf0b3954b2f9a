"""Pipelined cases that cover all pairs of options that combine, and the instructions that their ranks execute."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

from terrace.cluster.cluster import Cluster
from terrace.launch.start import World
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.plan.stage import Pass
from terrace.program.instruction import Instruction, Op
from terrace.program.lowering import build_stages
from terrace.program.program import Program
from terrace.program.schedules.orders import StageTask
from tests.support.parity import ADAMW, Case, data_rows, engine_of, exact
from tests.support.toys import MODELS, SEQUENCE, cluster_of

Sizes = tuple[int, ...]

SCHEDULES = (
    "1f1b",
    "gpipe",
    "interleaved:2",
    "zb-h1",
    "zb-h2",
    "zb-1p",
    "zb-2p",
    "zb-auto:3",
    "zbv",
    "breadth-first:2",
    "zeropp:2",
)
PLACEMENTS = ("ddp", "zero2", "zero3", "three-level")
PASSES = {Op.FORWARD: Pass.FORWARD, Op.BACKWARD: Pass.BACKWARD} | {
    Op.BACKWARD_INPUT: Pass.BACKWARD_INPUT,
    Op.BACKWARD_WEIGHT: Pass.BACKWARD_WEIGHT,
}


class Place(NamedTuple):
    """Tier sizes and the mapping of a pipelined plan."""

    sizes: Sizes
    mapping: dict[str, dict[str, Any]]
    num_stages: int


OUTER, INNER = Place((2, 2), {"node": {"pipeline": 2}}, 2), Place((2, 2), {"package": {"pipeline": 2}}, 2)
ALONE = Place((4,), {"package": {"pipeline": 4}}, 4)
WORLDS = {
    "outer of 2": OUTER,
    "inner of 2": INNER,
    "4 alone": ALONE,
    "outer of 3": Place((2, 2, 2), {"system": {"pipeline": 2}}, 2),
    "middle of 3": Place((2, 2, 2), {"node": {"pipeline": 2}}, 2),
    "two tiers": Place((2, 2, 2), {"node": {"pipeline": 2}, "system": {"pipeline": 2}}, 4),
    "4 x 2": Place((2, 4), {"node": {"pipeline": 4}}, 4),
    "8 alone": Place((8,), {"package": {"pipeline": 8}}, 8),
}

DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "world": tuple(WORLDS),
    "micros": (1, 3, 4, 7, 16),
    "unit": (1, 2, 3),
    "model": ("llama tied", "gpt2", "gpt_neox", "llama, frozen layer", "llama, frozen table"),
    "recompute": ((), ("*",), ("block.[0246]",)),
    "prefetch": (1, 0, 2),
}


def num_chunks(schedule: str) -> int:
    """Chunks a stage of a schedule as a plan writes it."""
    name, _, number = schedule.partition(":")
    return 1 if name in ("1f1b", "gpipe") or name.startswith("zb-") else int(number or 2)


def covering_rows() -> list[dict[str, Any]]:
    """Every schedule with every placement; the other dimensions are chosen for the most pairs not seen yet."""
    seen: set[tuple[tuple[str, Any], tuple[str, Any]]] = set()
    rows = []
    for number, (schedule, placement) in enumerate((s, p) for s in SCHEDULES for p in PLACEMENTS):
        row: dict[str, Any] = {"schedule": schedule, "placement": placement}
        for key, values in DIMENSIONS.items():
            turned = [*values[number % len(values) :], *values[: number % len(values)]]
            fitting = [value for value in turned if _fits(row | {key: value})]
            row[key] = max(fitting, key=lambda value: sum((pair, (key, value)) not in seen for pair in row.items()))
        seen |= set(combinations(row.items(), 2))
        rows.append(row)
    return rows


def _fits(row: dict[str, Any]) -> bool:
    stages = WORLDS[row["world"]].num_stages
    whole = not row["schedule"].startswith("interleaved") or row.get("micros", stages) % stages == 0
    return stages * num_chunks(row["schedule"]) <= 8 and whole


def case_of(row: dict[str, Any]) -> tuple[Sizes, Case]:
    """The plan of a row, with blocks enough for its virtual stages."""
    world = WORLDS[row["world"]]
    deep = world.num_stages * num_chunks(row["schedule"]) > 4
    plan = pipelined(
        row["placement"],
        world,
        row["schedule"],
        unit=row["unit"],
        recompute=tuple(row["recompute"]),
        prefetch=row["prefetch"],
    )
    return world.sizes, Case(plan, num_micros=row["micros"], model=("deep " if deep else "") + row["model"])


def pipelined(name: str, world: Place, schedule: str = "1f1b", **changes: object) -> Plan:
    """A preset in fp64 with the pipeline of a world."""
    return exact(name, cluster_of(*world.sizes), mapping=world.mapping, schedule=schedule, **changes)


def programs_of(plan: Plan, sizes: Sizes, model: str = "deep llama tied", num_micros: int = 4) -> dict[int, Program]:
    """The program of every rank."""
    cluster = cluster_of(*sizes)
    stages = build_stages(cluster, plan, MODELS[model].declared, num_micros, SEQUENCE)
    mesh = Mesh.of(cluster, plan)
    return {rank: stages[mesh.stage(rank)] for rank in range(cluster.world_size)}


def executed(world: World, cluster: Cluster, cases: Sequence[Case]) -> list[tuple[Program, list[Instruction]]]:
    """The program of this rank and the instructions that its executor began in the second of two steps, by case."""
    found = []
    for case in cases:
        begun: dict[int, Instruction] = {}

        def note(
            counter: int, instruction: object, waiting_on: tuple[int, ...], begun: dict[int, Instruction] = begun
        ) -> None:
            assert isinstance(instruction, Instruction)
            if not waiting_on:  # else it is what it waits for
                begun.setdefault(counter, instruction)

        engine = engine_of(world, cluster, case, progress=note)
        for step in range(2):
            begun.clear()
            engine.step(data_rows(engine, case, step), ADAMW.lr)
        engine.drain()
        found.append((engine.program, list(begun.values())))
        engine.close()
    return found


def tasks_of(program: Program, instructions: Sequence[Instruction]) -> list[StageTask]:
    """The passes among instructions as tasks of chunks; a micro-batch passes all blocks of a chunk in one go."""
    chunk_of = {block: chunk for chunk, blocks in enumerate(program.stage.chunks) for block in blocks}
    tasks: list[StageTask] = []
    blocks: list[int] = []
    for now in instructions:
        if now.op not in PASSES:
            continue
        task = StageTask(PASSES[now.op], chunk_of[now.block], now.micro)
        if not blocks:
            tasks.append(task)
        assert task == tasks[-1], f"{now} in the middle of {tasks[-1]}"
        blocks.append(now.block)
        chunk = program.stage.chunks[task.chunk]
        if len(blocks) == len(chunk):
            assert blocks == list(chunk if task.pass_ is Pass.FORWARD else chunk[::-1])
            blocks = []
    return tasks
