"""Stand-ins for ZFS and libvirt, compared with the real ones by tests/contract; test builders."""
