"""Where things are when nobody says otherwise, for those who cannot wait for the schema."""

from __future__ import annotations

from pathlib import Path

CONFIG = Path("/etc/snaporch/snaporch.toml")
BUNDLES = Path("/var/lib/snaporch/bundles")
OVERLAYS = Path("/var/lib/snaporch/overlays")
RUNTIME = Path("/run/snaporch")
LIBVIRT = "qemu:///system"
WINDOW = ".window"
"""How the name of the socket of a domain's window ends, in the runtime directory."""
