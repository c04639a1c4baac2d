"""A whole guest in one file: it is exported from a snapshot, and imported on any libvirt host."""
