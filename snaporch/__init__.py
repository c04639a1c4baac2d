"""snaporch: consistent snapshots of libvirt/KVM guests on ZFS."""

__version__ = "0.1.0"
