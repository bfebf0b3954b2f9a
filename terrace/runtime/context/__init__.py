"""The context axis at run time: attention of tokens that are spread over ranks."""

from terrace.runtime.context.axis import ContextAxis, check_declared
from terrace.runtime.context.peer_exchange import PeerComm

__all__ = ["ContextAxis", "PeerComm", "check_declared"]
