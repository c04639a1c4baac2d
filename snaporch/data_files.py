"""Where files that are not Python lie: beside the package in a checkout, below ``share`` else."""

from __future__ import annotations

from pathlib import Path

from snaporch.errors import UnavailableError

_PACKAGE = Path(__file__).resolve().parent


def shared_file(name: str) -> Path:
    """A file that belongs to snaporch: ``templates/sanoid.conf.j2``.

    ``setup.cfg`` installs them into ``PREFIX/share/snaporch``, so that somewhere above the package
    there is a ``share/snaporch``, whatever Python calls its directories.

    Raises:
        UnavailableError: the installation is not whole.
    """
    places = [_PACKAGE.parent / name]
    places += [parent / "share" / "snaporch" / name for parent in _PACKAGE.parents]
    for place in places:
        if place.is_file():
            return place
    raise UnavailableError(name, "is not where snaporch was installed", "install it again")
