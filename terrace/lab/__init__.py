"""The laboratory: tools for those who study clusters and balance policies; no part of a run. Stands on the core."""
