"""Copying a disk out of a snapshot."""
