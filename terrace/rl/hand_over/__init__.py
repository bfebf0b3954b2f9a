"""Hands weights over from training to generation: which boxes move between which ranks, verified, priced and run."""
