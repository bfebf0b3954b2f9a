"""Training across one slow link: methods that exchange seldom or little, side by side.

The job is that of `bench.lab` with a smaller model, on the cluster preset `lab` with its outermost link at 10 Mbit/s.
"""
