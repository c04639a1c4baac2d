"""Faults at every step of a run: the fault, its time, and what must be true afterwards."""
