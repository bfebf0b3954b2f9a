"""Mixtures of experts on one device: configuration, gates and the layer."""
