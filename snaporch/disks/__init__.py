"""The images of a guest: what lies beneath them, overlays, qemu-img."""
