"""Data: tokenised once, then batched for any step on any number of ranks."""
