"""Terrace: train large language models on clusters whose links are unequal.

Everything is placed on a tier, and a training step is a program that can be read.
"""

__version__ = "0.1.0"
