"""Files that are not Python: beside the package in a checkout, below ``share`` when installed."""

from __future__ import annotations

from pathlib import Path

from snaporch.errors import UnavailableError

_PACKAGE = Path(__file__).resolve().parent


def shared_file(name: str) -> Path:
    """Find a file that belongs to snaporch, such as ``templates/sanoid.conf.j2``.

    ``setup.cfg`` installs these files into ``PREFIX/share/snaporch``. A directory above the package
    has that ``share``, whatever the name of Python's own directory is.

    Raises:
        UnavailableError: the installation is incomplete.
    """
    places = [_PACKAGE.parent / name]
    places += [parent / "share" / "snaporch" / name for parent in _PACKAGE.parents]
    for place in places:
        if place.is_file():
            return place
    raise UnavailableError(name, "is not where snaporch was installed", "install it again")


def pages_directory() -> Path | None:
    """The directory of README.md and of the pages that messages name, such as docs/recovery.md.

    ``setup.cfg`` installs them into ``PREFIX/share/doc/snaporch``.

    Returns: ``None`` if they were not installed.
    """
    places = [_PACKAGE.parent]
    places += [parent / "share/doc/snaporch" for parent in _PACKAGE.parents]
    return next((place for place in places if (place / "docs/recovery.md").is_file()), None)
