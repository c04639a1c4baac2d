"""Bringing a guest back to a snapshot."""
