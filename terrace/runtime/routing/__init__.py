"""Experts on several ranks: tokens brought to them tier by tier, and back."""
