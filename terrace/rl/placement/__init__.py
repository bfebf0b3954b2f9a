"""Predicts the cost of a placement of roles on pools of ranks, and searches for the fastest one. Pure: no torch."""
