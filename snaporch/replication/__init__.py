"""Copies elsewhere: snapshots by zfs send, bundles by rsync."""
