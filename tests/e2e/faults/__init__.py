"""Faults at every step of a run: what is struck, when, and what must be true afterwards."""
