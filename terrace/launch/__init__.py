"""Processes: start or join ranks, watch them, stop them in order, explain hangs."""
