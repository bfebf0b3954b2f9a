"""Lower bounds on the seconds by which data-parallel messages make a step longer than its compute.

Steps repeat, so a stage's step is at least as long as a chain from one CLIP to the next: everything before block j's
first forward (the updates, or the refreshes of the blocks up to j, and a gather), all compute except the forwards of
the blocks before j and the last backwards of the blocks before k, then the reductions or synchronisations of the blocks
from k down to the first, and CLIP's own message. A step is also at least as long as the sum of the messages on any one
lane.

Slower compute hides more of a chain, but at most one pass of a unit per block, and the step computes at least that many
passes. So the sum of both never decreases: with the least seconds of many shapes it bounds all of them.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from terrace.planner.candidate import PartialCandidate
from terrace.planner.delays import Delay, Delays, LanePrices
from terrace.planner.messages import MessagePrices, Messages
from terrace.planner.parts import Runs, Work, work_of_runs
from terrace.planner.space import OpenMesh
from terrace.planner.spans import Span
from terrace.planner.stages import has_halves, traits
from terrace.planner.task import Placement
from terrace.planner.works import Works
from terrace.program.schedules.registry import takes_unit

if TYPE_CHECKING:
    from terrace.planner.estimate import Estimator

Choices = tuple[tuple[Placement, int], ...]  # placements, and the longest unit with each
_Ends = tuple[float, float, float, float]


class _Offers(NamedTuple):
    """Of the placements worth trying: ends (`Chains._ends_of`) and, where routed messages wait behind state
    messages, prices
    and least delays by schedule.
    """

    ends: list[_Ends]
    prices: list[LanePrices]
    delays: dict[tuple[bool, bool, int, bool], list[Delay]]


class _Terms(NamedTuple):
    """Seconds of a chain without compute: the ends of each run, of CLIP, and of the busiest lane in a step."""

    runs: list[_Ends]
    control_s: float
    busiest_s: float


class Chains:
    """Chains of the candidates of one task."""

    def __init__(self, estimator: "Estimator", works: Works) -> None:
        self.estimator, self.works, self.split = estimator, works, estimator.split
        self.num_inner = len(estimator.task.inner)
        self.message_prices = MessagePrices(estimator)
        self.delays = Delays(estimator, self.message_prices)
        self._ends: dict[tuple[object, ...], _Ends] = {}
        self._terms: dict[tuple[object, ...], _Terms] = {}
        self._offers: dict[tuple[object, ...], _Offers] = {}

    def excess_s(self, core: PartialCandidate, placement: Placement, unit: int) -> float:
        """Lower bound on the seconds by which a step exceeds its compute; reads only `heavy` of the core."""
        if core.unit:
            return 0.0 if core.shape.is_open else self._chunks_excess_s(core, placement)
        # Until the division of stacks is chosen, the holders of their states are unknown.
        if core.heavy is None or core.shape.divides:
            return 0.0
        # To be a bound for every form, the excess uses the form with the most compute, all of which hides messages.
        numbers, halves = (
            (core.micro_batch, core.recompute, core.num_micros > 1),
            has_halves(core.schedule, core.shape.mesh),
        )
        works = self.works.most(core.shape, *numbers, halves=halves)
        return self._chain_s(core.shape, core.heavy, works, core.num_micros, placement, unit)

    def scheduled_s(
        self,
        shape: OpenMesh,
        works: Sequence[Work],
        recompute: int,
        num_micros: int,
        spans: Sequence[Span],
        choices: Choices,
    ) -> list[float]:
        """Lower bound in seconds with the schedule of each span and the best of `choices`, for any split.

        `works` may be the minimum over several shapes and forms. Where a shape may divide its stacks, they count no
        messages.
        """
        stages = shape.mesh.total("pipeline")
        if not choices or (stages > 1 and self.split.alike is None):
            return [_scheduled_s(span, 0.0, 0.0) for span in spans]
        if stages == 1:
            whole = self.works.whole
            least_s = max(0.0, min([self._chain_s(shape, whole, works, num_micros, *choice) for choice in choices]))
            return [_scheduled_s(span, 0.0, least_s) for span in spans]
        # Some stage has at least the mean number of layers. Its chain is at least that of this many layers, except for
        # the passes of look-ups before them.
        most = -(-self.num_inner // stages)
        alike = self.split.layer
        forwards_s, backwards_s = (most - 1) * works[alike][0], (most - 1) * works[alike][1]
        hidden_s = sum(work_of_runs(works, self.split.before)[:2])
        offers = self._offers_of(shape, most, choices)
        excesses_s = []
        for ready_s, last_ready_s, done_s, last_done_s in offers.ends:
            chain_s = max(ready_s, last_ready_s - forwards_s) + max(done_s, last_done_s - backwards_s)
            excesses_s.append(max(0.0, chain_s - hidden_s))
        if not offers.prices:
            least_s = min(excesses_s)
            return [_scheduled_s(span, 0.0, least_s) for span in spans]
        # One placement may have shorter messages, another shorter waits of routed messages.
        found, known = list[float](), dict[tuple[bool, bool, int], list[tuple[float, float]]]()
        for span in spans:
            trait = traits()[span.schedule]
            key = trait.split, trait.folded, span.chunks
            if key not in known:
                delays = self._least_delays(shape, recompute, span, offers)
                known[key] = [
                    (delay.added_s(0.0, num_micros), delay.added_s(excess_s, num_micros))
                    for excess_s, delay in zip(excesses_s, delays, strict=True)
                ]
            found.append(min([_scheduled_s(span, more_s, excess_s) for more_s, excess_s in known[key]]))
        return found

    def _offers_of(self, shape: OpenMesh, most: int, choices: Choices) -> "_Offers":
        # Drop placements that are dominated by another.
        mesh = shape.mesh
        numels = mesh.total("tensor"), self._numels(shape)
        key = (mesh.state, mesh.stack_state, numels, mesh.apart, shape.divides, most, choices)
        found = self._offers.get(key)
        if found is None:
            waits = mesh.divides_stacks and not shape.divides and self.delays.tells
            every = {
                (self._ends_of(shape, most, place), self.delays.prices(mesh, place) if waits else ())
                for place, _ in choices
            }
            seconds = {each: (*each[0], *chain.from_iterable(each[1])) for each in every}
            best = [
                one
                for one, own in seconds.items()
                if not any(
                    all(less <= more for less, more in zip(other, own, strict=True))
                    for each, other in seconds.items()
                    if each is not one
                )
            ]
            prices = [prices for _, prices in best if isinstance(prices, LanePrices)]
            found = self._offers[key] = _Offers([ends for ends, _ in best], prices, {})
        return found

    def _least_delays(self, shape: OpenMesh, recompute: int, span: Span, offers: "_Offers") -> list[Delay]:
        mesh, schedule, chunks = shape.mesh, span.schedule, span.chunks
        key = traits()[schedule].split, traits()[schedule].folded, chunks, recompute > 0
        found = offers.delays.get(key)
        if found is None:
            at_least = self.delays.at_least
            found = offers.delays[key] = [
                at_least(mesh, schedule, chunks, prices, of_stages=not recompute) for prices in offers.prices
            ]
        return found

    def _ends_of(self, shape: OpenMesh, most: int, placement: Placement) -> _Ends:
        """Four delays of a stage of `most` layers that compute does not hide.

        Until its first and until its last layer has its parameters, and from the last backward of the first and of
        the last
        layer until CLIP, in seconds.
        """
        mesh, alike = shape.mesh, self.split.layer
        key = (mesh.state, mesh.stack_state, self._numels(shape), mesh.stack_degrees, shape.divides, most, placement)
        found = self._ends.get(key)
        if found is None:
            messages = self._messages(shape, placement)
            refresh_s, gather_s, reduce_s, sync_s = (each[alike] for each in messages[:4])
            update_s = self.estimator.update_s(mesh.state, placement, most * self._numels(shape)[alike])
            last_s = most * sync_s + reduce_s
            if reduce_s:
                first_s = min([sync_s, *(messages.sync[kind] for kind, _ in self.split.before[:1])])
                last_s = max(last_s, first_s + most * reduce_s)
            ready_s, last_ready_s = (max(update_s, times * refresh_s) + gather_s for times in (1, most))
            found = self._ends[key] = ready_s, last_ready_s, sync_s + reduce_s, last_s
        return found

    def _numels(self, shape: OpenMesh) -> tuple[int, ...]:
        return self.estimator.numels.least(shape.mesh) if shape.divides else self.estimator.numels.own(shape.mesh)

    def _messages(self, shape: OpenMesh, placement: Placement) -> Messages:
        if shape.divides:
            return self.message_prices.messages(shape.mesh.state, self._numels(shape), placement)
        return self.message_prices.of_shape(shape.mesh, placement)

    def _chain_s(
        self,
        shape: OpenMesh,
        runs: Runs,
        works: Sequence[Work],
        num_micros: int,
        placement: Placement,
        unit: int,
    ) -> float:
        terms = self._terms_of(shape, runs, placement, num_micros // unit)
        starts_s = ends_s = forward_s = backward_s = 0.0  # of the blocks before
        for (kind, count), (ready_s, last_ready_s, done_s, last_done_s) in zip(runs, terms.runs, strict=True):
            forwards_s, backwards_s = unit * works[kind][0], unit * works[kind][1]
            # Start of the chain: the first block of this kind, then the last, less the forwards that overlap.
            starts_s = max(starts_s, ready_s - forward_s, last_ready_s - forward_s - (count - 1) * forwards_s)
            # End of the chain: from the last backward of this kind down to CLIP, less the backwards that overlap.
            ends_s = max(ends_s, done_s - backward_s, last_done_s - backward_s - (count - 1) * backwards_s)
            forward_s, backward_s = forward_s + count * forwards_s, backward_s + count * backwards_s
        compute_s = num_micros // unit * (forward_s + backward_s)
        return max(starts_s + ends_s + terms.control_s, terms.busiest_s - compute_s)

    def _terms_of(self, shape: OpenMesh, runs: Runs, placement: Placement, num_units: int) -> "_Terms":
        # The chain is longest at the first or the last block of some run of equal blocks, so only these are tried.
        mesh, numels = shape.mesh, self._numels(shape)
        key = (mesh.state, mesh.stack_state, numels, mesh.stack_degrees, shape.divides, runs, placement, num_units)
        found = self._terms.get(key)
        if found is None:
            messages = self._messages(shape, placement)
            held = sum(numels[kind] * count for kind, count in runs)
            update_s = self.estimator.update_s(mesh.state, placement, held)
            # The first block's backward is the last of the step; its synchronisation ends the chain.
            first_s = messages.sync[runs[0][0]]
            refreshed_s = reduced_s = synced_s = 0.0  # of the blocks before
            each = []
            for kind, count in runs:
                refresh_s, gather_s, reduce_s, sync_s = [message[kind] for message in messages[:4]]
                synced, reduced = reduce_s + synced_s, reduced_s + first_s
                each.append(
                    (
                        max(update_s, refreshed_s + refresh_s) + gather_s,
                        max(update_s, refreshed_s + count * refresh_s) + gather_s,
                        max(synced + sync_s, reduced + reduce_s),
                        max(synced + count * sync_s, reduced + count * reduce_s),
                    )
                )
                refreshed_s += count * refresh_s
                reduced_s, synced_s = reduced_s + count * reduce_s, synced_s + count * sync_s
            busiest_s = max(_lanes_s(runs, messages, num_units).values())
            found = self._terms[key] = _Terms(each, messages.control[0], busiest_s)
        return found

    def _chunks_excess_s(self, core: PartialCandidate, placement: Placement) -> float:
        """`excess_s` where units pass whole chunks, with every chunk as small as the smallest.

        Nothing hides the first chunk's messages around the update. In the sums of lanes, the chunk where the passes
        turn around and the chunk between two units are not gathered again.
        """
        shape, estimator, chunks, alike = core.shape, self.estimator, core.chunks, self.split.alike
        if alike is None or shape.mesh.divides_stacks:
            return 0.0
        works = self.works.of(shape, core.micro_batch, core.recompute, core.num_micros > 1).each
        num_stages = shape.mesh.total("pipeline")
        counts = self.split.counts(works, num_stages * chunks)
        if not min(counts):  # a chunk of look-ups or logits alone
            return 0.0
        # Latencies and rates make a message monotone in its size, so the smallest chunk is a valid bound for all.
        least = min(counts) * estimator.numels.own(shape.mesh)[alike]
        messages = self.message_prices.messages(shape.mesh.state, (least,), placement)
        update_s = estimator.update_s(shape.mesh.state, placement, chunks * least)
        ends = (messages.gather, messages.reduce, messages.sync)
        once_s = update_s + sum(lane[0] for lane in ends) + messages.control[0]
        lanes: defaultdict[int, float] = defaultdict(float)
        units = core.num_micros // core.unit
        for seconds, times in (
            (messages.refresh, chunks),
            (messages.sync, chunks),
            (messages.reduce, chunks * units),
            (messages.gather, chunks),
            (messages.further, (chunks - 1) * (units - 1)),
            (messages.backward, (chunks - 1) * units),
        ):
            lanes[seconds.lane] += times * seconds[0]
        before_s, after_s = (sum(work_of_runs(works, runs)[:2]) for runs in (self.split.before, self.split.after))
        layer_s = works[alike][0] + works[alike][1]
        # The lane's stage is unknown, so the one with the least compute is assumed.
        own = [sum(counts[stage::num_stages]) * layer_s for stage in range(num_stages)]
        own[0] += before_s
        own[-1] += after_s
        return max(once_s, max(lanes.values()) - core.num_micros * min(own))


def _scheduled_s(span: Span, more_s: float, excess_s: float) -> float:
    # Schedules that pass units have other chains.
    if takes_unit(span.schedule):
        return span.span_s + more_s
    return max(span.span_s + more_s, span.chained_s + excess_s)


def _lanes_s(runs: Runs, messages: Messages, units: int) -> dict[int, float]:
    lanes: defaultdict[int, float] = defaultdict(float)
    for index, (kind, count) in enumerate(runs):
        # The first and the last block of a stage keep their gathered parameters between two consecutive visits.
        apart = max(0, count - (index == 0) - (index == len(runs) - 1))
        for seconds, times in (
            (messages.refresh, count),
            (messages.sync, count),
            (messages.reduce, count * units),
            (messages.gather, count),
            (messages.further, apart * (units - 1)),
            (messages.backward, apart * units + (count - apart) * (units - 1)),
        ):
            lanes[seconds.lane] += times * seconds[kind]
    return lanes
