"""Reads, resolves and renders ``sanoid.conf``."""
