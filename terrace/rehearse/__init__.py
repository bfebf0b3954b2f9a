"""A described cluster built of network namespaces on one Linux machine, and programs run inside it."""

from terrace.rehearse.wiring import Wiring, wire

__all__ = ["Wiring", "wire"]
