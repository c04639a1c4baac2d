"""The configuration files that the installed units name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

DIRECTORIES = (Path("/etc/systemd/system"), Path("/usr/lib/systemd/system"))
"""Where an admin, ``snaporch install`` and packages put units."""
_UNITS = ("snaporch*.service", "snaporch*.service.d/*.conf")
_OPTION = re.compile(r'^ExecStart=.* --config[ =]("(?:[^"\\]|\\.)*"|[^\s"]+)', re.MULTILINE)
_ESCAPES = re.compile(r'\\([\\"])|(%)%|(\$)\$')
"""What ``snaporch install`` escapes in a word of a command line (systemd.service(5))."""


def unit_configurations(directories: Iterable[Path] = DIRECTORIES) -> dict[Path, set[str]]:
    """The units with ``--config FILE``, by that file; units without it use the default file.

    A unit whose text cannot be read is left out.
    """
    found: dict[Path, set[str]] = {}
    for path in (p for place in directories for glob in _UNITS for p in sorted(place.glob(glob))):
        try:
            text = path.read_text("utf-8", "replace")
        except OSError:
            continue
        unit = path.name if path.suffix == ".service" else path.parent.name.removesuffix(".d")
        for word in _OPTION.findall(text):
            plain = _ESCAPES.sub(lambda escape: "".join(filter(None, escape.groups())), word)
            file = Path(plain[1:-1] if word.startswith('"') else plain)
            found.setdefault(file, set()).add(unit)
    return found
