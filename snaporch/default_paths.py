"""Where things are when nobody says otherwise, for those who cannot wait for the schema."""

from __future__ import annotations

import os
from pathlib import Path

CONFIG = Path("/etc/snaporch/snaporch.toml")
BUNDLES = Path("/var/lib/snaporch/bundles")
OVERLAYS = Path("/var/lib/snaporch/overlays")
RUNTIME = Path("/run/snaporch")
LOCKS = (
    RUNTIME
    if os.geteuid() == 0
    else Path(os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.geteuid()}"), "snaporch")
)
"""Where the locks of domains are, whatever a configuration says: they hold against each other."""
LIBVIRT = "qemu:///system"
WINDOW = ".window"
"""How the name of the socket of a domain's window ends, in the runtime directory."""
BAR = "unfinished-restore/run-snaporch-recover-first"
"""Where a guest's first disk is while a restore of it goes on, below the journals' directory."""
