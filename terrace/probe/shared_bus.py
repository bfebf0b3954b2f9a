"""Two tiers at once: do their messages share a bus?

A message on either tier may take all of a device's PCIe lanes, so two tiers in a description need not be two links.
"""

import statistics
from collections.abc import Callable

from terrace.probe.links import FIRST_BYTES, LARGEST_BYTES, TierLinks, aligned
from terrace.probe.samples import PairSample
from terrace.probe.timing import Stopwatch

_ROUNDS = 5  # each of either tier alone and of both


def measure_pair(watch: Stopwatch, one: TierLinks, other: TierLinks, budget_s: float) -> PairSample:
    """Time gathers on `one` tier alone, on the `other` alone, and on both at once, in about `budget_s`.

    As many gathers on each as take about the same time alone. Every rank calls this at the same point.
    """
    each_s = budget_s / (3 * _ROUNDS + 4)
    both = one, other
    sizes = [_size(watch, links, each_s) for links in both]
    seconds = [
        watch.seconds(links.call("gather", size), each_s, agreed=True) for links, size in zip(both, sizes, strict=True)
    ]
    numbers = [max(1, round(max(seconds) / taken_s)) for taken_s in seconds]
    starts = [links.start("gather", size) for links, size in zip(both, sizes, strict=True)]

    def sending(*which: int) -> Callable[[], None]:
        def send() -> None:
            waits = [starts[index]() for index in which for _ in range(numbers[index])]
            for wait in waits:
                wait()

        return send

    # In turns, so that a lasting disturbance is in all three.
    rounds = [
        [watch.seconds(work, each_s, agreed=True) for work in (sending(0), sending(1), sending(0, 1))]
        for _ in range(_ROUNDS)
    ]
    one_s, other_s, together_s = (statistics.median(column) for column in zip(*rounds, strict=True))
    return PairSample(tiers=(one.name, other.name), seconds=(one_s, other_s), together_s=together_s)


def _size(watch: Stopwatch, links: TierLinks, each_s: float) -> int:
    # As large as a few calls within the budget allow: what a bus shares is bytes, not latencies.
    first = aligned(FIRST_BYTES, links.degree)
    first_s = watch.seconds(links.call("gather", first), each_s, agreed=True)
    times = max(1.0, each_s / 16 / first_s)
    return aligned(int(min(FIRST_BYTES * times, LARGEST_BYTES[watch.device.type])), links.degree)
