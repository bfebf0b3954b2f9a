"""Checkpoints: written by all ranks of any plan, read by the ranks of any other."""
