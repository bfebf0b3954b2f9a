"""A run that follows the links between its members: other formats of a pipeline's boundaries where a link has changed.

After `train.slow_steps` steps the two members of every boundary send each other a quarter of an activation, one
boundary of a member at a time. If one takes longer or less than expected by more than `BAND`, rank 0 chooses the
formats of all boundaries by the rule of `terrace plan` (terrace.planner.member_stages): each is as wide as leaves the
step practically as short, and no wider than in the plan. Under `train.follow` they hold from the next step on; else a
line says how long a step would take with them. No state moves: each rank lowers and verifies the program of its stage.
"""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from terrace.base.errors import PlanError
from terrace.base.words import quantity
from terrace.base.words import seconds as in_seconds
from terrace.cluster.cluster import Cluster
from terrace.comm.ledger import Ledger
from terrace.plan.edges import rounds_of
from terrace.plan.members import boundary_formats, boundary_links, check_new_formats, formats_to_follow, with_formats
from terrace.plan.validate import validate
from terrace.plan.wire import BETWEEN, FORMATS, MessageClass, parse_format
from terrace.program.stages import make_stages
from terrace.runtime.clock import wait_for
from terrace.runtime.engine import Engine
from terrace.simulate.links import latency_and_rate
from terrace.train.config import RunConfig
from terrace.train.deals import Dealt
from terrace.train.follow import WORTH_IT, Following, steps_apart
from terrace.train.prediction import step_of

if TYPE_CHECKING:
    from terrace.train.rank import RankOfRun

BAND = 1.5  # ratio of seconds up to which two measurements of one link may differ: a guess
_LEAST_BYTES, _SHORTER, _SMALLER, _REPEATS = 16_384, 4, 16, 3  # of messages; a quarter of an activation is enough
Links = list[tuple[float, float]]  # (bandwidth, latency) of each boundary


def check_formats_follow(run: RunConfig) -> None:
    """Raises a `PlanError` for a pipeline of members whose boundaries cannot take other formats while it goes on."""
    key, plan = "train.follow = true", run.plan
    check_new_formats(run.cluster, plan, key)
    allowed = formats_to_follow(run.cluster, plan)
    plan = with_formats(
        plan, run.cluster, {name: (of[0][-1], *(each[0] for each in of[1:])) for name, of in allowed.items()}
    )
    try:
        validate(run.cluster, plan, run.blocks())
        make_stages(plan, run.blocks(), run.mesh.total("pipeline"), run.num_micros(), run.train.sequence)
    except PlanError as error:
        raise PlanError(f"{key}: {error}; or leave {key} out") from error


def measure_boundaries(engine: Engine) -> Links:
    """The link of each boundary between two members of a pipeline, of its slowest ranks. Every rank calls this.

    Each rank exchanges messages over one boundary at a time, so that a slow one does not hold up another.
    """
    program, own = engine.program, dict[int, tuple[float, float]]()
    mesh, stage = program.mesh, program.stage.index
    pairs = [pair for pair in program.stage.pairs if pair[1] == pair[0] + 1 and mesh.boundary(*pair) is not None]
    between = engine.comm.stage_p2p(Ledger(), engine.comm.pacer)
    large = max(_LEAST_BYTES, _edge_bytes(engine) // _SHORTER)
    for together in rounds_of(pairs):
        engine.comm.exchange(None)  # no rank is late for its partner
        for pair in together:
            if stage in pair:
                sizes = large // _SMALLER, large
                small_s, large_s = (_one_way_s(engine, between, pair, each) for each in sizes)
                boundary = mesh.boundary(*pair)
                assert boundary is not None, "pairs of one member are left out"
                if stage == pair[0]:  # whose clock sees both ways
                    latency_s, bandwidth = latency_and_rate(sizes[0], small_s, large, large_s)
                    own[boundary] = bandwidth, latency_s
    between.close()
    measured = engine.comm.exchange([[number, *link] for number, link in own.items()])
    every = [(int(number), bandwidth, latency_s) for each in measured for number, bandwidth, latency_s in each]
    return [
        (min(each[1] for each in every if each[0] == number), max(each[2] for each in every if each[0] == number))
        for number in range(program.cluster.tiers[-1].size - 1)
    ]


def _one_way_s(engine: Engine, between: Any, pair: tuple[int, int], num_bytes: int) -> float:
    """Half of the shortest of a few ways there and back: what else the machine does only makes them longer."""
    leads = engine.program.stage.index == pair[0]
    other = pair[1] if leads else pair[0]
    sent, received = (torch.zeros(num_bytes, dtype=torch.uint8, device=engine.device) for _ in range(2))
    found = math.inf
    for _ in range(_REPEATS):
        begin_s, arriving = time.perf_counter(), between.receive(received, other)
        if not leads:
            arriving.wait()
        between.send(MessageClass.PIPELINE, sent, other).wait()
        if leads:
            arriving.wait()
        wait_for(engine.device)
        found = min(found, (time.perf_counter() - begin_s) / 2)
    return found


def following_of(rank: "RankOfRun", cluster: Cluster, first_step: int) -> Following:
    """The hook by which a run follows `cluster`, measured at its start: its members, or the links of a pipeline."""
    kind = FollowingLinks if boundary_formats(rank.run.cluster, rank.run.plan) else Following
    return kind(rank, cluster, first_step)


class FollowingLinks(Following):
    """Measures the boundaries of a pipeline of members, and chooses their formats anew or says what others bring."""

    def __init__(self, rank: "RankOfRun", cluster: Cluster, first_step: int) -> None:
        super().__init__(rank, cluster, first_step)
        size = cluster.tiers[-1].size - 1
        self._expected: Links = boundary_links(cluster, rank.run.plan)[:size]

    def _may(self) -> bool:
        try:
            check_formats_follow(self._rank.run)
        except PlanError:
            return False
        return True

    def _compare(self, number: int) -> None:
        rank = self._rank
        rank.dog.idle("measuring the links between members")
        begin_s = time.perf_counter()
        links = measure_boundaries(rank.engine)
        found = self._chosen(links) if rank.engine.rank == 0 else None
        apart = steps_apart(time.perf_counter() - begin_s, statistics.median(self._steps_s))
        found, apart = rank.engine.comm.exchange((found, apart))[0]
        self._known_until = max(self._known_until, number + apart)
        if found is None:
            return
        words, formats = found["words"], {name: tuple(each) for name, each in found["formats"].items()}
        if not rank.run.train.follow:
            rank.observer.note(f"{words}: set train.follow = true, or resume with these")
        elif number < rank.run.train.steps:
            rank.deals.add(Dealt(step=number, formats=formats, predicted_s=found["dealt_s"]))
            self._write()
            rank.observer.note(f"{words}; from step {number + 1} on")

    def _chosen(self, links: Links) -> dict[str, Any] | None:
        """Other formats that the links call for, on rank 0; None if there are none."""
        # Only the rank that chooses needs the planner.
        from terrace.planner.member_stages import formats_anew

        run, plan = self._rank.run, self._rank.engine.program.plan
        most = _edge_bytes(self._rank.engine)
        ratios = [
            _seconds(most, now) / _seconds(most, before) for now, before in zip(links, self._expected, strict=True)
        ]
        if all(1 / BAND <= ratio <= BAND for ratio in ratios):
            return None
        self._expected = links
        *inner, tier = self._at_start.tiers
        tier = replace(tier, efficiency=1.0, half_bytes=0.0, contention=())  # in what was measured
        cluster = replace(self._at_start, tiers=(*inner, tier))
        step = replace(step_of(run, self._at_start), cluster=cluster, plan=plan, links=tuple(links))
        formats, now_s, dealt_s = formats_anew(step, formats_to_follow(run.cluster, run.plan))
        own = boundary_formats(run.cluster, plan)
        # Wider formats need not make a step shorter.
        if formats == own or (dealt_s > (1 - WORTH_IT) * now_s and not _wider(formats, own)):
            return None
        worst = max(range(len(links)), key=lambda each: max(ratios[each], 1 / ratios[each]))
        keys = " and ".join(
            f'wire.{name}.{tier.name} = "{f"{BETWEEN} ".join(each)}"'
            for name, each in formats.items()
            if each != own[name]
        )
        words = (
            f"a message over boundary {worst} of the pipeline takes {ratios[worst]:.2g} times the seconds that its "
            f"format was chosen for, at {quantity(links[worst][0], 'B')}/s; with {keys} a step takes "
            f"{in_seconds(dealt_s)}, and {in_seconds(now_s)} with the formats that it has (predicted)"
        )
        return {"formats": formats, "dealt_s": dealt_s, "words": words}


def _edge_bytes(engine: Engine) -> int:
    program = engine.program
    return program.model.edge.numel * FORMATS[program.plan.compute].element_bytes


def _seconds(num_bytes: int, link: tuple[float, float]) -> float:
    bandwidth, latency_s = link
    return latency_s + num_bytes / bandwidth


def _wider(formats: Mapping[str, Sequence[str]], than: Mapping[str, Sequence[str]]) -> bool:
    """Whether a boundary has more bits an element."""
    pairs = ((one, other) for name in formats for one, other in zip(formats[name], than[name], strict=True))
    return any(parse_format(one).bits > parse_format(other).bits for one, other in pairs)
