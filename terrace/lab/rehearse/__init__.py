"""A described cluster emulated with network namespaces on one Linux machine, and programs run in it."""

from terrace.lab.rehearse.wiring import Wiring, wire

__all__ = ["Wiring", "wire"]
