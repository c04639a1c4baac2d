"""``sanoid.conf``: read, resolved, rendered."""
