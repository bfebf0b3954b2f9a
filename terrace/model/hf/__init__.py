"""Hugging Face folders, read and written: configurations, tensor names, weights."""
