"""Default paths, without the import of the configuration's schema, which takes long."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

CONFIG = Path("/etc/snaporch/snaporch.toml")
BUNDLES = Path("/var/lib/snaporch/bundles")
OVERLAYS = Path("/var/lib/snaporch/overlays")
FENCES = Path("/var/lib/snaporch/fences")
"""The fences of guests. No configuration changes it: libvirt's hook reads it, too."""
RUNTIME = Path("/run/snaporch")
LOCKS = (
    RUNTIME
    if os.geteuid() == 0
    else Path(os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.geteuid()}"), "snaporch")
)
"""The locks of domains. No configuration changes it, so that all configurations share the locks."""
LIBVIRT_URI = "qemu:///system"
HOLD_SOCKET_SUFFIX = ".window"
"""Suffix of the socket, in the runtime directory, of the process that holds a domain for sanoid."""
BARRED_DISK = "unfinished-restore/run-snaporch-recover-first"
"""Path of a guest's first disk while the guest is restored, below the journals' directory.

No file exists there, so that libvirt cannot start the guest.
"""


class HostPaths(NamedTuple):
    """Where the kernel and system services show the state of the host."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    dev: Path = Path("/dev")
    run: Path = Path("/run")


HOST = HostPaths()
