"""``snaporch delete``: destroy the ZFS snapshots of snapshots by name, and prune their bundles."""
