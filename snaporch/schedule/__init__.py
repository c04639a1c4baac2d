"""Scheduling: when policies take snapshots of which guests, and which snapshots they keep."""
