"""Where the built probes are."""

import os
import subprocess
from functools import cache
from pathlib import Path

_INSIDE = Path("/mnt/guests")


@cache
def folder() -> Path:
    """The folder that ``tests/lab/guests/build`` filled.

    SNAPORCH_GUESTS names it. SNAPORCH_GUESTS_HOST names it on the host of a
    User-Mode Linux lab; it is then mounted on /mnt/guests, if it is not yet.
    Raises FileNotFoundError if there is nothing built.
    """
    chosen = Path(os.environ.get("SNAPORCH_GUESTS", _INSIDE))
    host = os.environ.get("SNAPORCH_GUESTS_HOST")
    if host and "SNAPORCH_GUESTS" not in os.environ and not chosen.is_mount():
        chosen.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            ["mount", "-t", "hostfs", "-o", f"hostfs={host}", "none", str(chosen)],
            check=True,
        )
    if not (chosen / "probe.bin").is_file():
        raise FileNotFoundError(
            f"no probes in {chosen}: run tests/lab/guests/build, and name the "
            "folder it prints in SNAPORCH_GUESTS or SNAPORCH_GUESTS_HOST"
        )
    return chosen


def artefact(name: str) -> Path:
    """The path of one built file."""
    return folder() / name
