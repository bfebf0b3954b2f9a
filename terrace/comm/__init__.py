"""Communication: groups by tier, collectives by tier with the byte ledger, and the lane they run on."""

from terrace.comm.among import Among
from terrace.comm.between import Between
from terrace.comm.collectives import Collectives
from terrace.comm.groups import TierGroup, TierGroups
from terrace.comm.lane import Lane, StreamLane, ThreadLane, Ticket, make_lane
from terrace.comm.ledger import Ledger, Meter
from terrace.comm.pace import Pacer
from terrace.comm.rounding import Origin, relative_errors

__all__ = [
    "Among",
    "Between",
    "Collectives",
    "Lane",
    "Ledger",
    "Meter",
    "Origin",
    "Pacer",
    "StreamLane",
    "ThreadLane",
    "Ticket",
    "TierGroup",
    "TierGroups",
    "make_lane",
    "relative_errors",
]
