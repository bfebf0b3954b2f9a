"""The cluster: a device and its tiers, innermost first."""

from terrace.cluster.cluster import Cluster, Device, Kernels, Tier
from terrace.cluster.presets import load_cluster, preset_names

__all__ = ["Cluster", "Device", "Kernels", "Tier", "load_cluster", "preset_names"]
