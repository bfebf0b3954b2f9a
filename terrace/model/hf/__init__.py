"""Reads and writes Hugging Face folders: configurations, tensor names, weights."""
