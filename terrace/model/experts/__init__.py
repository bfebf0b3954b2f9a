"""Mixtures of experts on one device: their configuration, the gates, and the layer."""
