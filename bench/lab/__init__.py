"""The lab: the same model, data and seed under Terrace and under its rivals, on emulated links.

`python -m bench.lab` runs every contestant, each in processes of its own; `python -m bench.lab.report`
turns the results into a page and a picture.
"""
