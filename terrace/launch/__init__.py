"""Processes: ranks are started or joined, watched while they run, stopped in order, explained when they hang."""
