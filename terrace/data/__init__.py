"""Data: text tokenised once, then the batch of any step on any number of ranks."""
