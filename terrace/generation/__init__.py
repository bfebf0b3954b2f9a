"""Generating text: blocks of replicas with tensor ranks."""
