"""Checkpoints: written by all ranks of any plan, read by any ranks of any other."""
