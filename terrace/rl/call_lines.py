"""Start and end times of role calls, one record per step, for the timeline on a run's page.

A record holds the calls that ended since the previous record, without those of evaluations and checkpoints between two
steps. A call that started in the previous step, on a pool that works ahead, has a negative `begin_s`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from terrace.rl.calls.spans import Span
    from terrace.rl.placing import Place

_MOST = 64  # calls per record; above it consecutive equal calls are merged, and then the rest is only counted


@dataclass(frozen=True, kw_only=True)
class RoleCall:
    """`num` consecutive calls of `method` on the ranks `pool`; times are relative to the start of the step."""

    role: str
    pool: str
    method: str
    begin_s: float
    end_s: float
    num: int = 1


class CallLines:
    """Builds the records of a run whose roles are at `places`."""

    def __init__(self, places: Iterable["Place"]) -> None:
        self._pools = {place.pool: _ranks(place.first, place.cluster.world_size) for place in places}
        self._first_s = self._ended_s = 0.0  # the begin of the first step, the end of the newest

    def of_step(self, spans: Sequence["Span"], begin_s: float, end_s: float) -> dict[str, Any]:
        """The record of a step from `begin_s` to `end_s` (Unix time); `spans` ended since the previous step.

        The record's `begin_s` is relative to the first step. `left_out` counts the calls beyond the limit.
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
    """Merge consecutive calls of the same role, pool and method, such as the updates of a step."""
    for _, group in groupby(calls, key=lambda call: (call.role, call.pool, call.method)):
        alike = list(group)
        yield replace(alike[0], end_s=max(call.end_s for call in alike), num=len(alike))
