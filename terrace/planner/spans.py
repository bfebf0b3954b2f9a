"""Closed-form lower bounds on the compute of a pipeline (terrace.planner.bound), over all schedules or for each.

They hold for all shapes and forms whose blocks take at least the given seconds.
"""

from collections.abc import Sequence
from typing import NamedTuple

from terrace.planner.parts import BlockWorks, Runs, Split, Work, work_of_runs
from terrace.planner.pipelines import least_span_s
from terrace.planner.shares import shares_of
from terrace.planner.stages import MOST_CHUNKS, MOST_PASSES, SERIAL, Trait, last_layers, traits


class _Priced(NamedTuple):
    works: BlockWorks
    logits: Work
    dearest_layers: float | None
    edge_s: float
    num_stages: int
    num_micros: int
    mean_s: float
    span_s: float


class Span(NamedTuple):
    """Bound in seconds with a schedule, and the blocks of its busiest stage, if known.

    `chained_s` bounds the compute to which `Chains.least_s` may be added.
    """

    schedule: str
    chunks: int
    span_s: float
    chained_s: float
    heavy: Runs | None


class Spans:
    """Bounds on pipelines of one model."""

    def __init__(self, split: Split) -> None:
        self.split, self.num_layers = split, len(split.inner)
        (self.whole,) = split.whole().chunks

    def least_s(self, works: BlockWorks, edge_s: float, num_stages: int, num_micros: int) -> tuple[float, float]:
        """(Mean over stages, bound over all schedules)."""
        alike = self.split.alike
        # No schedule has lighter virtual stages than one with the most chunks.
        # Of the virtual stages before the last, only the first may have no layer, if it has the look-ups.
        chunks, rest = divmod(self.num_layers + 2, num_stages)
        fewest = 0 if self.split.ends == 2 and not rest and chunks <= MOST_CHUNKS else 1
        layers = max(fewest, self.num_layers // (num_stages * MOST_CHUNKS))
        least = 0.0 if alike is None else layers * works.each[alike][0]
        mean_s = num_micros * works.whole_s / num_stages
        # A split backward may fill the end of the pipeline, so only the forward ramp is certain.
        return mean_s, mean_s + (num_stages - 1) / 2 * (least + edge_s)

    def each(
        self,
        works: BlockWorks,
        dearest_layers: float | None,
        edge_s: float,
        num_stages: int,
        num_micros: int,
        schedules: Sequence[tuple[str, int]],
    ) -> list[Span]:
        """Bounds with each schedule; schedules with more virtual stages than layers, or too many passes, are skipped.

        `dearest_layers`: if shapes or forms differ, the smallest cost of the logits in layers.
        """
        mean_s, span_s = self.least_s(works, edge_s, num_stages, num_micros)
        logits = work_of_runs(works.each, self.split.after)
        priced = _Priced(works, logits, dearest_layers, edge_s, num_stages, num_micros, mean_s, span_s)
        num_parts = self.num_layers + self.split.ends
        most_chunks = min(num_parts // num_stages, MOST_PASSES // (num_stages * num_micros))
        known: dict[tuple[bool, bool, bool, int], tuple[float, float, Runs | None]] = {}
        found = []
        for schedule, chunks in schedules:
            if schedule == SERIAL:
                found.append(Span(SERIAL, 1, span_s, span_s, self.whole))
            # The limits of splits and of `pipeline`, without the cost of an exception.
            elif chunks <= most_chunks:
                trait = traits()[schedule]
                # Schedules with equal traits share a bound.
                key = (trait.split, trait.looped, trait.folded, chunks)
                if key not in known:
                    known[key] = self._span(priced, chunks, trait)
                found.append(Span(schedule, chunks, *known[key]))
        return found

    def _span(self, priced: _Priced, chunks: int, trait: Trait) -> tuple[float, float, Runs | None]:
        works, num_virtual = priced.works, priced.num_stages * chunks
        if self.split.alike is None:
            span_s = self._span_of_differing(priced, num_virtual, trait)
            return span_s, span_s, None
        sizes = self.num_layers, num_virtual
        first = last = last_layers(*sizes, works.logits_layers, self.split.ends)
        if priced.dearest_layers is not None:
            # The split is monotone in the logits' cost, so every form has a split between these two.
            last = last_layers(*sizes, priced.dearest_layers, self.split.ends)
        if first == last:
            return self._span_of(priced, chunks, trait, last)
        spans = [self._span_of(priced, chunks, trait, each) for each in range(first, last + 1)]
        return min(span[0] for span in spans), min(span[1] for span in spans), None

    def _span_of(self, priced: _Priced, chunks: int, trait: Trait, last: int) -> tuple[float, float, Runs | None]:
        works, logits, _, edge_s, stages, micros, mean_s, _ = priced
        num_layers = self.num_layers
        shares = shares_of(num_layers, stages, chunks, last, trait.looped, trait.folded)
        forward_s, backward_s, weight_s = works.each[self.split.layer]
        logits_forward_s, logits_s = logits[0], logits[0] + logits[1]
        least = shares.least  # of all but the last, which hops lead to
        # A split schedule may delay the weight gradient beyond the path to the previous stage.
        back_s = backward_s - weight_s if trait.split else backward_s
        hop_s = least * forward_s + edge_s + (0.0 if trait.split else least * backward_s + edge_s)
        # Only the looped placement tells here which virtual stages share a stage; for others, the mean and the last
        # stage's least share.
        busiest_s, on_last, last_s = mean_s, (chunks - 1) * least + min(least, shares.last), 0.0
        if trait.looped:
            on_last, last_s = shares.last_stage, micros * logits_s
            busiest_s = max(busiest_s, micros * shares.most * (forward_s + backward_s))
        last_s += micros * on_last * (forward_s + backward_s)
        # A micro-batch passes all virtual stages and comes back; the last of them does so with each.
        hops = stages * chunks - 1 - (0 if trait.looped else chunks - 1)
        before = num_layers - shares.last
        path_s = before * (forward_s + back_s) + 2 * hops * edge_s
        path_s += micros * (shares.last * (forward_s + back_s) + logits_forward_s)
        chained_s = max(mean_s + (stages - 1) / 2 * hop_s, busiest_s, path_s)
        span_s = max(chained_s, last_s + (stages - 1) * hop_s)
        # Each extra second per layer lengthens the other terms by at least the number of layers that a chain assumes to
        # hide messages.
        if micros * on_last >= -(-num_layers // stages) - 1:
            chained_s = span_s
        # A stage sends one message at a time, and some stage sends at least the mean number.
        span_s = max(span_s, 2 * micros * hops / stages * edge_s)
        return span_s, chained_s, None if shares.heavy is None else self.split.equal(*shares.heavy)

    def _span_of_differing(self, priced: _Priced, num_virtual: int, trait: Trait) -> float:
        # Forms may split the blocks in different ways.
        if priced.dearest_layers is not None:
            return priced.span_s
        works, stages = priced.works.each, priced.num_stages
        contents = self.split.contents(self.split.counts(works, num_virtual))
        virtual = [work_of_runs(works, runs) for runs in contents]
        return max(priced.span_s, least_span_s(virtual, stages, priced.num_micros, priced.edge_s, trait))
