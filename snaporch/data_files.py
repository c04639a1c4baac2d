"""Files that are not Python: beside the package in a checkout, below ``share`` when installed."""

from __future__ import annotations

from pathlib import Path

from snaporch.errors import UnavailableError

_PACKAGE = Path(__file__).resolve().parent


def shared_file(name: str, package: Path = _PACKAGE) -> Path:
    """Find a file that belongs to snaporch, such as ``templates/sanoid.conf.j2``.

    ``setup.cfg`` installs these files into ``PREFIX/share/snaporch``. A directory above the package
    has that ``share``, whatever the name of Python's own directory is.

    Args:
        package: the directory of the package.

    Raises:
        UnavailableError: the installation is incomplete.
    """
    places = [package.parent / name]
    places += [parent / "share" / "snaporch" / name for parent in package.parents]
    for place in places:
        if place.is_file():
            return place
    raise UnavailableError(name, "is not where snaporch was installed", "install it again")


def pages_directory(package: Path = _PACKAGE) -> Path | None:
    """The directory of README.md and of pages that messages name, as docs/how-to/recovery.md.

    ``setup.cfg`` installs them into ``PREFIX/share/doc/snaporch``.

    Returns: ``None`` if they were not installed.
    """
    places = [package.parent]
    places += [parent / "share/doc/snaporch" for parent in package.parents]
    return next((place for place in places if (place / "docs/how-to/recovery.md").is_file()), None)
