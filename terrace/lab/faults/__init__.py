"""Faults of a rehearsal: islands and ranks that die, freeze, become slow, are cut off, leave and join on purpose."""
