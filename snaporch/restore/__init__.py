"""Restore a guest to a snapshot, and undo a restore."""
