"""The probe: measures this machine or job on all its ranks at once and writes the result as a cluster.

`fit`, `grid` (shapes and sizes) and `assemble` are pure; the other modules measure with torch.
"""
