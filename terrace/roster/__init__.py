"""Islands that are jobs of their own and meet in a numbered roster (docs/design/roster.md)."""
