"""The images of a guest: backing chains, overlay files, qemu-img."""
