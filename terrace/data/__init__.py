"""Data: text to tokens once, then the batch of any step on any number of ranks."""
