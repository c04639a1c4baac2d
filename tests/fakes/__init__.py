"""Stand-ins for ZFS and libvirt, held to the real ones by tests/contract; builders for tests."""
