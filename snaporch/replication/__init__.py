"""Copies elsewhere: snapshots by syncoid, bundles by rsync."""
