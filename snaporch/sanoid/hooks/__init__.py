"""sanoid's hooks: they freeze guests before its snapshots, and delete bundles after pruning."""
