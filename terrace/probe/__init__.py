"""The probe: what this machine or job reaches, measured on all its ranks at once, as a cluster.

Fitting (`fit`), the choice of shapes and sizes (`grid`) and the assembly of a cluster (`assemble`) are pure; the rest
measures with torch.
"""
