"""Communication: groups by tier, collectives by tier with the byte ledger, and the lane they run on."""

from terrace.comm.collectives import Collectives
from terrace.comm.group_p2p import GroupP2P
from terrace.comm.groups import TierGroup, TierGroups
from terrace.comm.lane import Lane, StreamLane, ThreadLane, Ticket, make_lane
from terrace.comm.ledger import Ledger, Meter
from terrace.comm.pace import Pacer
from terrace.comm.rounding import Origin, relative_errors
from terrace.comm.stage_p2p import StageP2P

__all__ = [
    "Collectives",
    "GroupP2P",
    "Lane",
    "Ledger",
    "Meter",
    "Origin",
    "Pacer",
    "StageP2P",
    "StreamLane",
    "ThreadLane",
    "Ticket",
    "TierGroup",
    "TierGroups",
    "make_lane",
    "relative_errors",
]
