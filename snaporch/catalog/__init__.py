"""What is known of snapshots, read from ZFS and the bundle store."""
