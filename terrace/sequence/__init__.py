"""Token layouts of the context axis: which rank holds and attends to which tokens. Pure: no torch, no numpy."""
