"""Policies: when a guest is snapshotted by itself, and which of those snapshots stay."""
