"""Calls of roles with their begin and end, a line a step: the page of a run draws them.

A line has the calls that ended since the line before, without those of evaluations and checkpoints between two steps.
A call that reached out of the step before, on a pool that works on meanwhile, has a begin below 0.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from terrace.rl.calls.spans import Span
    from terrace.rl.placing import Place

_MOST = 64  # calls of a line before neighbours that are alike are joined; those beyond it are counted


@dataclass(frozen=True, kw_only=True)
class RoleCall:
    """`num` calls of `method` on the ranks `pool`, one after the other; times are from the begin of their step."""

    role: str
    pool: str
    method: str
    begin_s: float
    end_s: float
    num: int = 1


class CallLines:
    """Lines of the steps of a run whose roles have `places`."""

    def __init__(self, places: Iterable["Place"]) -> None:
        self._pools = {place.pool: _ranks(place.first, place.cluster.world_size) for place in places}
        self._first_s = self._ended_s = 0.0  # the begin of the first step, the end of the newest

    def of_step(self, spans: Sequence["Span"], begin_s: float, end_s: float) -> dict[str, Any]:
        """The line of a step from `begin_s` to `end_s`, seconds of the epoch; `spans` ended since the step before.

        Its `begin_s` is counted from the first step's. `left_out` are calls that a line has no room for.
        """
        self._first_s, before_s = self._first_s or begin_s, self._ended_s or begin_s
        self._ended_s = end_s
        calls = [
            RoleCall(
                role=span.role,
                pool=self._pools.get(span.pool, f"pool {span.pool}"),
                method=span.method,
                begin_s=round(span.begin_s - begin_s, 6),
                end_s=round(span.end_s - begin_s, 6),
            )
            for span in sorted(spans, key=lambda span: span.begin_s)
            if span.end_s > begin_s or span.begin_s < before_s < begin_s
        ]
        joined = list(_joined(calls)) if len(calls) > _MOST else calls
        return {
            "begin_s": round(begin_s - self._first_s, 6),
            "step_s": round(end_s - begin_s, 6),
            "calls": [asdict(call) for call in joined[:_MOST]],
            "left_out": sum(call.num for call in joined[_MOST:]),
        }


def _ranks(first: int, num: int) -> str:
    return f"rank {first}" if num == 1 else f"ranks {first}-{first + num - 1}"


def _joined(calls: Iterable[RoleCall]) -> Iterable[RoleCall]:
    """Neighbours of one role, pool and method as one call, such as the updates of a step."""
    for _, group in groupby(calls, key=lambda call: (call.role, call.pool, call.method)):
        alike = list(group)
        yield replace(alike[0], end_s=max(call.end_s for call in alike), num=len(alike))
