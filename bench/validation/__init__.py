"""The cost model against published figures: `python -m bench.validation` writes `docs/validation.md`.

No constant of a preset is fitted to these rows; `tests/bench/test_validation.py` fails when an error passes its limit.
"""
