"""Simulation of a period: each program starts from the clocks that the one before left on every stage.

The state of a rank between two programs is what is left of the work in flight (`Left`): busy lanes, refreshes, changes
of islands. A program that starts in a state seen before, to a picosecond, ends as it did then, so a cycle of 500 steps
takes a few plays. While an exchange crosses the outer tier during several equal steps, only its remaining seconds
change, and these steps are not played either. The period is replayed until its end state equals its start state; the
last replay counts.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from terrace.base.collection import no_collection
from terrace.cluster.cluster import Cluster
from terrace.plan.members import boundary_links, stage_clusters
from terrace.plan.outer import NO_EXCHANGE
from terrace.plan.wire import MessageClass
from terrace.program.instruction import Op, Phase
from terrace.program.period import Period, Turn
from terrace.program.program import Program
from terrace.simulate.bus import Stretch, progress_s
from terrace.simulate.cost import Costs, step_costs, update_seconds
from terrace.simulate.noting import WAIT_OUTER, Notes, NotingRank
from terrace.simulate.rank import Rank
from terrace.simulate.stages import Pipeline
from terrace.simulate.work import Work

_MOST = 32  # plays of a period, where it does not come to the same state again
_DIGITS = 12  # of seconds: states less than a picosecond apart are one
_COMPUTING = ("forward", "backward", "update")

Times = Mapping[str, float]  # seconds by category
Priced = Work | Sequence[float]  # `Step.work`
Links = Sequence[tuple[float, float]]  # (bandwidth, latency) of each boundary between members


class Left(NamedTuple):
    """Seconds left of everything in flight on a rank between two programs."""

    lanes_s: tuple[float, ...]
    begins_s: tuple[float, ...]  # until the present stretch of a busy lane begins
    penalties: tuple[float, ...]  # of busy lanes; of others 0
    begun_s: float = 0.0  # of its stage, after the first stage to begin
    refreshes: tuple[tuple[int, float], ...] = ()  # by block
    changes: tuple[tuple[int, float], ...] = ()  # by block
    shared: tuple[Stretch, ...] = ()  # of lanes that share a bus


class Played(NamedTuple):
    """One play of the programs of all stages: seconds by category, end state, and notes."""

    times: tuple[Times, ...]
    clocks_s: tuple[float, ...]  # of the rank's clock
    links_s: tuple[float, ...]  # that exchanges under way went on
    after: tuple[Left, ...]
    notes: tuple[Notes, ...] = ()  # of ranks that take them


class Runs(NamedTuple):
    """A played run of a turn's programs, repeated `times` times in sequence."""

    played: Played
    times: int


def play_period(
    period: Period, work: Priced, known: Sequence[Costs] = (), unplayed: Sequence[Times] = ()
) -> list[list[Times]]:
    """Seconds by category, summed over all runs of each turn, by turn and stage; `work` as in `Step`.

    `known` are the costs of the training programs of all stages. `unplayed` are seconds of each stage's training step
    that its programs leave out: further micro-batches, equal to those played.
    """
    num_stages, found = period.num_stages, list[list[Times]]()
    for runs in play_runs(period, work, known, unplayed):
        total = [defaultdict[str, float](float) for _ in range(num_stages)]
        for played, number in runs:
            for sums, times in zip(total, played.times, strict=True):
                for category, seconds in times.items():
                    sums[category] += number * seconds
        found.append(list(total))
    return found


def play_runs(
    period: Period, work: Priced, known: Sequence[Costs] = (), unplayed: Sequence[Times] = (), rank: type[Rank] = Rank
) -> list[list[Runs]]:
    """Runs of each turn of a steady period, in order; arguments as in `play_period`.

    With `rank=NotingRank`, runs carry notes.
    """
    with no_collection():
        return _Play(period, work, known, unplayed, rank).run()


class _Play:
    def __init__(
        self, period: Period, work: Priced, known: Sequence[Costs], unplayed: Sequence[Times], rank: type[Rank]
    ) -> None:
        self.period, self.work, self.unplayed, self.rank = period, work, unplayed, rank
        self._costs = {Phase.TRAIN: list(known)} if known else {}
        self._pipelines: dict[tuple[int, ...], Pipeline] = {}
        self._known: dict[tuple[object, ...], Played] = {}
        first = period.turns[0].programs[0]
        # Only exchanges are sent between islands.
        self.outside = first.model.world_layout.outside

    def run(self) -> list[list[Runs]]:
        first = self.period.turns[0].programs[0]
        idle = (0.0,) * (len(first.layout.tiers) + (first.stage.num_stages > 1))
        state = tuple(Left(lanes_s=idle, begins_s=idle, penalties=idle) for _ in range(self.period.num_stages))
        for _ in range(_MOST):
            begun, found = state, list[list[Runs]]()
            for turn in self.period.turns:
                runs, state = self._turn(turn, state)
                found.append(runs)
            if _rounded(begun) == _rounded(state):
                break
        return found

    def _turn(self, turn: Turn, state: tuple[Left, ...]) -> tuple[list[Runs], tuple[Left, ...]]:
        left, found = turn.times, list[Runs]()
        while left:
            played = self._once(turn, state)
            more = min(left - 1, self._equal(turn, state, played))
            found.append(Runs(played, 1 + more))
            left -= 1 + more
            links = zip(played.after, played.links_s, strict=True)
            state = tuple(self._later(each, more * link_s) for each, link_s in links)
        return found, state

    def _once(self, turn: Turn, state: tuple[Left, ...]) -> Played:
        key = (turn.key, *_rounded(state))
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._played(turn, state)
        return found

    def _played(self, turn: Turn, state: tuple[Left, ...]) -> Played:
        pipeline = self._pipelines.get(turn.key)
        if pipeline is None:
            pipeline = self._pipelines[turn.key] = Pipeline(turn.programs, self._costs_of(turn), self.rank)
        for rank, program, left in zip(pipeline.ranks, turn.programs, state, strict=True):
            _enter(rank, program, left)
        pipeline.begun_s = [left.begun_s for left in state]
        pipeline.step()
        ends_s = [left.begun_s + sum(rank.time_s.values()) for rank, left in zip(pipeline.ranks, state, strict=True)]
        after = [_leave(rank, end_s - min(ends_s)) for rank, end_s in zip(pipeline.ranks, ends_s, strict=True)]
        notes = tuple(rank.notes() for rank in pipeline.ranks if isinstance(rank, NotingRank))
        times: list[Times] = [dict(rank.time_s) for rank in pipeline.ranks]
        clocks_s = [rank.now_s for rank in pipeline.ranks]
        links_s = [rank.now_s + rank.ahead_s for rank in pipeline.ranks]
        if self.unplayed and turn.phase is Phase.TRAIN:
            for stage, (rank, left_out) in enumerate(zip(pipeline.ranks, self.unplayed, strict=True)):
                slowed_s, clock_s, link_s = self._slowed_s(rank, left_out, after[stage])
                computing = {name: left_out[name] for name in _COMPUTING if left_out.get(name, 0.0) > 0.0}
                whole_s = sum(computing.values())
                slower = {name: slowed_s * each_s / whole_s for name, each_s in computing.items()}
                times[stage] = _sum(times[stage], left_out, slower)
                clocks_s[stage] += clock_s
                links_s[stage] += link_s
                after[stage] = self._later(after[stage], link_s)
        return Played(tuple(times), tuple(clocks_s), tuple(links_s), tuple(after), notes)

    def _costs_of(self, turn: Turn) -> list[Costs]:
        known = self._costs.get(turn.phase)
        if known is None:
            known = self._costs[turn.phase] = stage_costs(turn.programs, self.work)
        return [costs.of_stage(program, costs.update_s) for costs, program in zip(known, turn.programs, strict=True)]

    def _equal(self, turn: Turn, before: tuple[Left, ...], played: Played) -> int:
        """Number of following runs that are known to equal this one."""
        if turn.programs[0].exchange != NO_EXCHANGE or self._inside(before) != self._inside(played.after):
            return 0
        most = turn.times
        for one, other, link_s in zip(before, played.after, played.links_s, strict=True):
            if self._busy_s(one) > 0.0:
                # An exchange overlapped this whole run, and will overlap the next ones.
                through = link_s > 0.0 and not any(one.begins_s[lane] for lane in self.outside)
                most = min(most, int(self._busy_s(other) / link_s) if through else 0)
        return most

    def _inside(self, state: tuple[Left, ...]) -> tuple[Left, ...]:
        return _rounded(tuple(self._later(each, float("inf")) for each in state))

    def _busy_s(self, left: Left) -> float:
        return max((left.lanes_s[lane] for lane in self.outside), default=0.0)

    def _later(self, left: Left, seconds: float) -> Left:
        """The state after messages on the outer tier have progressed by `seconds`."""
        if not seconds:
            return left

        def less(of_lanes: Sequence[float]) -> tuple[float, ...]:
            return tuple(
                max(0.0, each_s - seconds) if lane in self.outside else each_s for lane, each_s in enumerate(of_lanes)
            )

        lanes_s = less(left.lanes_s)
        shared = (
            Stretch(lane, max(0.0, begin_s - seconds), end_s - seconds) if lane in self.outside else each
            for each in left.shared
            for lane, begin_s, end_s in (each,)
        )
        return left._replace(
            lanes_s=lanes_s,
            begins_s=less(left.begins_s),
            penalties=tuple(each if busy_s else 0.0 for each, busy_s in zip(left.penalties, lanes_s, strict=True)),
            changes=tuple((block, max(0.0, each_s - seconds)) for block, each_s in left.changes),
            shared=tuple(each for each in shared if each.end_s > 0.0),
        )

    def _slowed_s(self, rank: Rank, left_out: Times, left: Left) -> tuple[float, float, float]:
        """Extra seconds of the unplayed part beside an exchange, and the clock and link seconds that it takes."""
        whole_s, slowed_s, ahead_s = sum(left_out.values()), 0.0, 0.0
        computing = sum(left_out.get(category, 0.0) for category in _COMPUTING) / whole_s if whole_s else 0.0
        for lane in self.outside:
            busy_s, penalty = left.lanes_s[lane], left.penalties[lane]
            if rank.mutual:  # the clock stands still
                longer_s = penalty * min(busy_s, whole_s)
                on_s = progress_s(penalty, longer_s, max(0.0, busy_s - whole_s))
                slowed_s += longer_s + penalty * on_s
                ahead_s += on_s
            else:
                slowed = penalty * computing
                slowed_s += slowed * min(whole_s, busy_s / (1.0 + slowed))
        clock_s = whole_s if rank.mutual else whole_s + slowed_s
        return slowed_s, clock_s, clock_s + ahead_s


def _sum(*parts: Times) -> Times:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0.0) for part in parts) for name in names}


def stage_costs(
    programs: Sequence[Program], work: Priced, known: Costs | None = None, links: Links = ()
) -> list[Costs]:
    """Costs of the programs of all stages; `work` and `links` as in `Step`, `known` prices of shared blocks."""
    cluster, plan = programs[0].cluster, programs[0].plan
    clusters = stage_clusters(cluster, plan)
    if clusters or links:
        return _costs_apart(programs, clusters or [cluster] * len(programs), work, links)
    first = known or step_costs(programs[0], work)
    # Blocks cost the same on every stage; the optimizer's constant is charged to a stage's last block.
    is_work = isinstance(work, Work)
    return [first.of_stage(each, update_seconds(each) if is_work else first.update_s) for each in programs]


def _costs_apart(programs: Sequence[Program], clusters: Sequence[Cluster], work: Priced, links: Links) -> list[Costs]:
    """Costs of stages that run on unequal members, or whose members have links of their own."""
    priced: dict[Cluster, Costs] = {}
    found, links = list[Costs](), links or boundary_links(programs[0].cluster, programs[0].plan)
    for program, cluster in zip(programs, clusters, strict=True):
        if cluster not in priced:
            model = replace(program.model, cluster=cluster)
            priced[cluster] = step_costs(replace(programs[0], model=model), work)
        costs = priced[cluster]
        own = replace(program, model=costs.program.model)
        update_s = update_seconds(own) if isinstance(work, Work) else costs.update_s
        found.append(costs.of_stage(own, update_s, _linked(program, cluster, links)))
    return found


def _linked(program: Program, cluster: Cluster, links: Links) -> dict[int, Cluster]:
    """By stage of another member to which a stage sends: its cluster with the link between the two members."""
    found, (*inner, tier) = {}, cluster.tiers
    for other in {other for pair in program.stage.pairs for other in pair} - {program.stage.index}:
        boundary = program.mesh.boundary(program.stage.index, other)
        # Of a tied block's first and last stage nothing may have been measured: the tier's own link.
        if boundary is not None and boundary < len(links):
            bandwidth, latency_s = links[boundary]
            link = replace(tier, bandwidth_bytes_per_s=bandwidth, latency_s=latency_s)
            found[other] = replace(cluster, tiers=(*inner, link))
    return found


def _enter(rank: Rank, program: Program, left: Left) -> None:
    rank.now_s, rank.ahead_s, rank.time_s = 0.0, 0.0, defaultdict(float)
    rank.lanes_s, rank.begins_s, rank.penalties = list(left.lanes_s), list(left.begins_s), list(left.penalties)
    rank.busy_s = max(rank.lanes_s)
    rank.refreshes = {block: (moment_s, -1) for block, moment_s in left.refreshes}
    # Before the first exchange, the changes that a program applies count as arrived.
    rank.changes = dict.fromkeys(program.stage.held, ((0.0, -1), WAIT_OUTER))
    rank.changes |= {block: ((moment_s, -1), WAIT_OUTER) for block, moment_s in left.changes}
    rank.reduced.clear()
    if rank.bus is not None:
        rank.bus.enter(left.shared)
    if isinstance(rank, NotingRank):
        rank.begin()


def _leave(rank: Rank, begun_s: float) -> Left:
    now_s, lanes_s = rank.now_s, rank.lanes_s

    def of_blocks(moments: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
        return tuple(sorted((block, moment_s - now_s) for block, moment_s in moments.items() if moment_s > now_s))

    return Left(
        begun_s=begun_s,
        lanes_s=tuple(max(0.0, each_s - now_s) for each_s in lanes_s),
        begins_s=tuple(max(0.0, each_s - now_s) for each_s in rank.begins_s),
        penalties=tuple(each if lane_s > now_s else 0.0 for each, lane_s in zip(rank.penalties, lanes_s, strict=True)),
        refreshes=of_blocks({block: moment_s for block, (moment_s, _) in rank.refreshes.items()}),
        changes=of_blocks({block: moment_s for block, ((moment_s, _), _) in rank.changes.items()}),
        shared=() if rank.bus is None else rank.bus.left(now_s),
    )


def _rounded(state: tuple[Left, ...]) -> tuple[Left, ...]:
    def of_blocks(pairs: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
        return tuple((block, round(each_s, _DIGITS)) for block, each_s in pairs)

    return tuple(
        Left(
            begun_s=round(each.begun_s, _DIGITS),
            lanes_s=tuple(round(lane_s, _DIGITS) for lane_s in each.lanes_s),
            begins_s=tuple(round(begin_s, _DIGITS) for begin_s in each.begins_s),
            penalties=each.penalties,
            refreshes=of_blocks(each.refreshes),
            changes=of_blocks(each.changes),
            shared=tuple(Stretch(lane, round(a, _DIGITS), round(b, _DIGITS)) for lane, a, b in each.shared),
        )
        for each in state
    )


def with_dealt(program: Program, work: Priced) -> dict[tuple[MessageClass, str], int]:
    """The expected bytes of a program, with those of documents that are dealt by cost, if their lengths are known."""
    found = program.expected_bytes
    if not isinstance(work, Work) or not work.ragged.dealt.sent_bytes:
        return found
    times = sum(
        count for each, count in program.counts.items() if each.op is Op.FORWARD and program.blocks[each.block].attends
    )
    dealt = zip(program.layout.tiers, work.ragged.dealt.sent_bytes, strict=True)
    return {**found, **{(MessageClass.CONTEXT, tier): round(times * each) for tier, each in dealt if each}}
