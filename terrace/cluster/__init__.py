"""The cluster: a device and its tiers, innermost first."""
