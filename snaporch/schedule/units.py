"""systemd units: rendered from templates, written beside the host's own, removed again.

The first line of each tells the SHA-256 of the rest. A file whose sum is another was edited, and is
somebody's work.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from snaporch import __version__
from snaporch.bundle.store import explained_store
from snaporch.config import Config
from snaporch.installed import shared_file

UNITS = (
    "snaporch.service",
    "snaporch-run-due.service",
    "snaporch-run-due.timer",
    "snaporch-verify.service",
    "snaporch-recover.service",
    "snaporch.slice",
)
PLACE = Path("/etc/systemd/system")
_MARK = "# Made by `snaporch install`"
_MODE = 0o644


class Change(StrEnum):
    """What became of a file."""

    WRITTEN = "written"
    UNCHANGED = "unchanged"
    REPLACED = "replaced"
    """It was of an earlier snaporch."""
    SAVED = "replaced; the edited one is now"
    REMOVED = "removed"
    KEPT = "kept: it was edited"


@dataclass(frozen=True, slots=True)
class Done:
    """What was done with one file."""

    path: Path
    change: Change
    saved: Path | None = None
    """Where the edited one is now."""


def render_units(config: Config, command: str) -> dict[str, str]:
    """The text of every unit.

    Args:
        command: the words that start snaporch.

    Raises:
        UnavailableError: the templates are not installed.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    folder = shared_file(f"templates/{UNITS[0]}.j2").parent
    environment = Environment(
        loader=FileSystemLoader(folder),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - unit files know no escapes of HTML
    )
    words = {"command": command.replace("%", "%%"), "journal": config.paths.journal}
    bodies = {name: environment.get_template(f"{name}.j2").render(words) for name in UNITS}
    return {name: f"{_head(body)}\n{body}" for name, body in bodies.items()}


def install(root: Path, units: Mapping[str, str]) -> Iterator[Done]:
    """Write units below ``root``; one that was edited is kept beside the new one.

    Raises:
        UnavailableError: a file cannot be written.
    """
    place = _below(root)
    with explained_store(place):
        place.mkdir(parents=True, exist_ok=True)
        for name, text in units.items():
            yield _write(place / name, text)


def uninstall(root: Path) -> Iterator[Done]:
    """Remove the units below ``root``; one that was edited stays.

    Raises:
        UnavailableError: a file cannot be removed.
    """
    place = _below(root)
    with explained_store(place):
        for name in UNITS:
            path = place / name
            if not os.path.lexists(path):
                continue
            if _is_ours(path):
                path.unlink()
                yield Done(path, Change.REMOVED)
            else:
                yield Done(path, Change.KEPT)


def _write(path: Path, text: str) -> Done:
    change, saved = Change.WRITTEN, None
    if os.path.lexists(path):
        if _is_ours(path):
            if path.read_text("utf-8") == text:
                return Done(path, Change.UNCHANGED)
            change = Change.REPLACED
        else:
            change, saved = Change.SAVED, _free(path)
            path.rename(saved)
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    fresh.write_text(text, "utf-8")
    fresh.chmod(_MODE)
    os.replace(fresh, path)
    return Done(path, change, saved)


def _below(root: Path) -> Path:
    return root / PLACE.relative_to("/")


def _head(body: str) -> str:
    return f"{_MARK} {__version__}; SHA-256 of the rest {hashlib.sha256(body.encode()).hexdigest()}"


def _is_ours(path: Path) -> bool:
    """A plain file that is as some snaporch wrote it."""
    if path.is_symlink() or not path.is_file():
        return False
    head, _, body = path.read_bytes().partition(b"\n")
    digest = hashlib.sha256(body).hexdigest().encode()
    return head.startswith(_MARK.encode()) and head.endswith(b" " + digest)


def _free(path: Path) -> Path:
    """A name systemd does not read, that is nobody's."""
    candidates = (path.with_name(f"{path.name}.edited{more}") for more in _numbers())
    return next(candidate for candidate in candidates if not os.path.lexists(candidate))


def _numbers() -> Iterator[str]:
    yield ""
    number = 2
    while True:
        yield f".{number}"
        number += 1
