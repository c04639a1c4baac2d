"""Bringing a guest back from a run that was cut short: the guardian, and what decides."""
