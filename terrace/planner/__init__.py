"""Planner: searches for the plan with the shortest predicted step for a model, a cluster and a batch, with reasons."""
