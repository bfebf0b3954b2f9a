"""The verifier of repeating programs: proves from a few repetitions that any number of them is valid.

A program with a body (terrace.base.repeated) is walked with `SHORT` bodies. After each of the last two, everything that
later instructions depend on must be equal, relative to the micro-batch with which the body began. Then the next body,
and the end of the program, start from the same state for any number of repetitions:

 1. on a rank, the state that rules read (`_Walker.state` of terrace.program.verify); and a body runs every pass of
    `every` micro-batches, so that none is left out of the whole step;
 2. between two ranks, the messages that one has sent and the other not asked for yet, or asked for and not sent;
 3. among all ranks, the messages under way: the ranks can reach a place in their bodies together (a cut), and from
    there the same place one body later, twice. As many bodies later they cannot wait in a circle either.

If a rule fails, the program may still be valid: it is then verified with all repetitions, and errors name positions in
the full program.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from terrace.base.alike import first_equal, once_each
from terrace.base.repeated import Repeated
from terrace.plan.stage import SHORT, Group, Pass
from terrace.program.gaps import meets
from terrace.program.instruction import Instruction, Op
from terrace.program.program import Program
from terrace.program.rank_play import RankPlay

_WHOLE_BACKWARDS = {Op.BACKWARD: "backward", Op.BACKWARD_WEIGHT: "backward"}
_BEFORE, _AFTER = SHORT - 1, SHORT  # bodies after which states are compared


class Marks(NamedTuple):
    """Positions of the bodies in a short program, and their micro-batches.

    Body n begins at `begin + n * size`; it and everything after it name no micro-batch before `least + n * every`.
    """

    begin: int
    size: int
    repeats: int
    every: int
    least: int

    @property
    def ends(self) -> dict[int, int]:
        """Position after each of the last two bodies -> micro-batches by which the state is shifted there."""
        return {self.begin + number * self.size: number * self.every for number in (_BEFORE, _AFTER)}


def marks(program: Program) -> Marks | None:
    """The marks of `program.short`; None for a program that does not repeat, or whose bodies are not complete."""
    order, groups = program.segments.whole, program.stage.groups
    if not isinstance(order, Repeated) or not isinstance(groups, Repeated):
        return None
    # The short program and the closed formulas take the micro-batches of the step from the groups.
    if (order.repeats, order.every) != (groups.repeats, groups.every) or order.repeats < SHORT:
        return None
    if not _groups_are_complete(groups) or not _is_complete(program):
        return None
    # The end as it would follow the first body's place.
    ahead = [each.micro - order.repeats * order.every for each in order.suffix if each.micro >= 0]
    least = min([each.micro for each in order.body if each.micro >= 0] + ahead, default=0)
    return Marks(len(order.prefix), len(order.body), order.repeats, order.every, least)


def recurs(programs: Mapping[int, Program], play: RankPlay, places: Mapping[int, Marks]) -> bool:
    """Check rules 2 and 3 for programs with equal repetition whose short forms agree on every channel.

    `play` plays the short programs from their beginning; it is left in an intermediate state.
    """
    return not _meet_others(programs) and _channels_recur(play.programs, places) and _play_recurs(play, places)


def marks_alike(programs: Mapping[int, Program]) -> dict[int, Marks] | None:
    """The marks of all programs if they have equal numbers and sizes of bodies; else None."""
    found = once_each(marks, list(programs.values()))
    places = {rank: each for rank, each in zip(programs, found, strict=True) if each is not None}
    kinds = {(each.repeats, each.every) for each in places.values()}
    return places if len(places) == len(programs) and len(kinds) == 1 else None


def _groups_are_complete(groups: Repeated[Group]) -> bool:
    # Gathers are counted for two bodies and for one; the difference is every further body's if it passes all chunks.
    passed = Counter[tuple[Pass, int]]()
    for group in groups.body:
        passed[group.pass_, group.chunk] += len(group.micros)
    return all(
        passed[each.pass_, each.chunk] == groups.every for each in (*groups.prefix, *groups.body, *groups.suffix)
    )


def _is_complete(program: Program) -> bool:
    """Whether a body has every pass, message and reduction of its micro-batches."""
    order = program.segments.whole
    assert isinstance(order, Repeated), "asked of programs that repeat"

    def kind(each: Instruction) -> tuple[object, ...]:
        # A backward is complete after its second half, and a first half without one is an error of the short program.
        return _WHOLE_BACKWARDS.get(each.op, each.op), each.block, each.backward, each.peer

    wanted = {kind(each): each.op for each in program.short.counts if each.micro >= 0}
    runs = Counter(map(kind, order.body))
    return all(
        op is Op.BACKWARD_INPUT or runs[key] * (program.plan.unit if op is Op.REDUCE else 1) == order.every
        for key, op in wanted.items()
    )


def _meet_others(programs: Mapping[int, Program]) -> bool:
    """Whether ranks of different programs meet in a body: their collectives would have to be compared body by body."""
    firsts = first_equal(list(programs.values()))
    holders: dict[tuple[object, ...], int] = {}
    for (rank, program), first in zip(programs.items(), firsts, strict=True):
        order = program.segments.whole
        assert isinstance(order, Repeated), "asked of programs that repeat"
        for each in {each._replace(micro=-1) for each in order.body}:
            if each.op is Op.TIE:
                return True
            for tier, ranks in meets(program, each):
                group = (tier, ranks.joined, ranks.peers(rank, tier))
                if holders.setdefault(group, first) != first:
                    return True
    return False


def _channels_recur(shorts: Mapping[int, Program], places: Mapping[int, Marks]) -> bool:
    """Rule 2. Messages of a channel are numbered; their orders are equal already."""
    sent: dict[tuple[int, int], list[tuple[int, Instruction]]] = defaultdict(list)
    asked: dict[tuple[int, int], list[tuple[int, Instruction]]] = defaultdict(list)
    for rank, program in shorts.items():
        for position, each in enumerate(program.instructions):
            if each.op is Op.SEND:
                sent[rank, program.peer(rank, each)].append((position, each))
            elif each.op is Op.RECV:
                asked[program.peer(rank, each), rank].append((position, each))
    for channel in sent:
        open_messages = []
        ends = zip(places[channel[0]].ends.items(), places[channel[1]].ends, strict=True)
        for (sender_at, by), receiver_at in ends:
            counts = [
                bisect_left(sent[channel], sender_at, key=lambda pair: pair[0]),
                bisect_left(asked[channel], receiver_at, key=lambda pair: pair[0]),
            ]
            between = [each.later(-by) for _, each in sent[channel][min(counts) : max(counts)]]
            open_messages.append((counts[0] > counts[1], between))
        if open_messages[0] != open_messages[1]:
            return False
    return True


def _play_recurs(play: RankPlay, places: Mapping[int, Marks]) -> bool:
    """Rule 3."""
    shorts, least = play.programs, min(each.least for each in places.values())
    latest = dict(zip(shorts, once_each(_latest_cut, [(shorts[rank], places[rank]) for rank in shorts]), strict=True))
    # As far as all ranks come together: a cut through the whole pipeline.
    play.run(latest)
    cuts = {rank: min(latest[rank], play.position(rank)) for rank in shorts}
    if any(cuts[rank] < each.begin for rank, each in places.items()):
        return False
    under_way = []
    for number in (_BEFORE, _AFTER):
        play.run({rank: cut + number * places[rank].size for rank, cut in cuts.items()})
        if any(play.heads[rank] < limit for rank, limit in play.limits.items()) or any(play.there.values()):
            return False
        by = number * next(iter(places.values())).every
        under_way.append({(*rest, micro - by) for *rest, micro in play.sent if micro >= least + by})
    return under_way[0] == under_way[1]


def _latest_cut(of: tuple[Program, Marks]) -> int:
    """Last position at which the shortened program still has `SHORT` equal bodies."""
    program, (begin, size, _, every, _) = of
    order, at = program.instructions, begin + (SHORT - 1) * size
    while at + size < len(order) and order[at].later(every) == order[at + size]:
        at += 1
    return at - (SHORT - 1) * size
