"""Installs and removes systemd units, libvirt's hook and the configuration file.

The first line of each file (in a script the second) has the SHA-256 of the rest. If the sum
differs, the admin has edited the file, and it is kept.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from snaporch import __version__
from snaporch.command_log import LoggedCommand
from snaporch.data_files import shared_file
from snaporch.errors import UnavailableError, UsageError
from snaporch.hypervisor import start_hook_check
from snaporch.private_files import store_errors
from snaporch.systemd.start_detached import SYSTEMD
from snaporch.systemd.unit_settings import AFTER, AFTER_LIBVIRT, LOW_WEIGHT, STOP_TIME

UNITS = (
    "snaporch.service",
    "snaporch-run-due.service",
    "snaporch-run-due.timer",
    "snaporch-replicate.service",
    "snaporch-verify.service",
    "snaporch-pull.service",
    "snaporch-pull.timer",
    "snaporch-recover.service",
    "snaporch.slice",
)
PLACE = Path("/etc/systemd/system")
CONFIG_PLACE = Path("/etc/snaporch/snaporch.toml")
_MARK = "# Made by `snaporch install`"
_MODE = 0o644


class Change(StrEnum):
    """How a file was changed."""

    WRITTEN = "written"
    UNCHANGED = "unchanged"
    REPLACED = "replaced"
    """The old file was from an earlier snaporch."""
    SAVED = "replaced; the edited file is now"
    REMOVED = "removed"
    KEPT = "kept: it was edited"
    PACKAGED = "kept: dpkg installed it; to remove it: apt purge"


@dataclass(frozen=True, slots=True)
class FileChange:
    """The change of one file."""

    path: Path
    change: Change
    detail: str = ""
    """Where the edited file is now, or the package that the file belongs to."""


def render_units(command: Sequence[str]) -> dict[str, str]:
    """The text of each unit, by name.

    Args:
        command: the command line that starts snaporch, with an absolute path.

    Raises:
        UnavailableError: the templates are not installed.
        UsageError: a path cannot be written in a unit.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    folder = shared_file(f"templates/{UNITS[0]}.j2").parent
    environment = Environment(
        loader=FileSystemLoader(folder),
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - unit files know no escapes of HTML
    )
    words = {
        "command": " ".join(_word(each) for each in command),
        "after_libvirt": " ".join(AFTER_LIBVIRT),
        "after": " ".join(AFTER),
        "stop_time": STOP_TIME,
        "low_weight": str(LOW_WEIGHT),
    }
    bodies = {name: environment.get_template(f"{name}.j2").render(words) for name in UNITS}
    return {name: _marked(body) for name, body in bodies.items()}


def _line(text: str) -> str:
    """A path as the value of a setting; only specifiers are escaped (systemd.unit(5))."""
    if not text.isprintable() or text != text.strip() or text.endswith("\\"):
        raise UsageError(repr(text), "cannot be written in a systemd unit", "choose a simpler path")
    return text.replace("%", "%%")


def _word(text: str) -> str:
    """A word of a command line, quoted if necessary (systemd.service(5))."""
    word = _line(text).replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return word if set(word).isdisjoint(" ;'\"\\") else f'"{word}"'


def install_hook(root: Path) -> FileChange:
    """Write libvirt's hook below ``root``, as :func:`install` writes units.

    Raises:
        UnavailableError: the hook cannot be written, or its source is not installed.
    """
    path = root / start_hook_check.PLACE.relative_to("/")
    text = _marked(shared_file(start_hook_check.SOURCE).read_text("utf-8"))
    with store_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(path):
            _mark(root).unlink(missing_ok=True)
        return _write(path, text, _MODE | 0o111)


def _mark(root: Path) -> Path:
    """Created by the hook when libvirt calls it: libvirt must restart to see a new hook."""
    return root / start_hook_check.CALLED.relative_to("/")


def install_config(root: Path, text: str) -> FileChange:
    """Write the configuration file below ``root`` unless the admin has written or edited one.

    Raises:
        UnavailableError: the file cannot be written.
    """
    path = root / CONFIG_PLACE.relative_to("/")
    if os.path.lexists(path) and not _is_ours(path):
        return FileChange(path, Change.KEPT)
    with store_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        return _write(path, _marked(text))


def install(root: Path, units: Mapping[str, str]) -> Iterator[FileChange]:
    """Write the units below ``root``; an edited unit is kept beside the new one.

    Raises:
        UnavailableError: a file cannot be written.
    """
    place = _below(root)
    with store_errors(place):
        place.mkdir(parents=True, exist_ok=True)
        for name, text in units.items():
            yield _write(place / name, text)


def stop_units() -> None:
    """Have systemd stop the units, and wait until their runs have released their guests.

    Raises:
        UnavailableError: systemd does not stop them.
    """
    names = [name for name in UNITS if (PLACE / name).exists()]
    if not names or not SYSTEMD.is_dir():
        return
    command = ["systemctl", "stop", *names]
    with LoggedCommand(*command) as log:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        log.exited(done.returncode)
    if done.returncode != 0:
        raise UnavailableError("systemctl stop", done.stderr.strip() or "failed")


def package_of(path: Path) -> str:
    """Return the Debian package that a file belongs to; empty if there is none.

    dpkg itself has to remove what it installed: it does not install a deleted conffile again.
    """
    command = ["dpkg-query", "--search", str(path)]
    with LoggedCommand(*command) as log:
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
            )
        except FileNotFoundError:  # another distribution
            return ""
        log.exited(done.returncode)
    owners = [line for line in done.stdout.splitlines() if line.endswith(f": {path}")]
    return owners[-1].partition(":")[0] if owners else ""


def uninstall(
    root: Path, package_of: Callable[[Path], str] = lambda _path: ""
) -> Iterator[FileChange]:
    """Remove the units, the hook and the configuration below ``root``, but no edited file.

    The links by which systemd starts a removed unit at boot are removed, too.

    Args:
        package_of: returns the package that a file belongs to, or nothing. Such a file stays.

    Raises:
        UnavailableError: a file cannot be removed.
    """
    place = _below(root)
    others = (start_hook_check.PLACE, CONFIG_PLACE)
    paths = [*(place / name for name in UNITS), *(root / path.relative_to("/") for path in others)]
    with store_errors(place):
        for path in paths:
            if not os.path.lexists(path):
                continue
            if package := package_of(path):
                yield FileChange(path, Change.PACKAGED, package)
            elif _is_ours(path):
                path.unlink()
                _mark(root).unlink(missing_ok=True)
                for wants in path.parent.glob("*.wants"):
                    (wants / path.name).unlink(missing_ok=True)
                yield FileChange(path, Change.REMOVED)
            else:
                yield FileChange(path, Change.KEPT)


def _write(path: Path, text: str, mode: int = _MODE) -> FileChange:
    change, saved = Change.WRITTEN, None
    if os.path.lexists(path):
        if _is_ours(path):
            if path.read_text("utf-8") == text:
                return FileChange(path, Change.UNCHANGED)
            change = Change.REPLACED
        else:
            change, saved = Change.SAVED, _free(path)
            path.rename(saved)
            if not saved.is_symlink():  # libvirt calls every executable file beside its hooks
                saved.chmod(saved.stat().st_mode & ~0o111)
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    fresh.write_text(text, "utf-8")
    fresh.chmod(mode)
    os.replace(fresh, path)
    return FileChange(path, change, str(saved or ""))


def _below(root: Path) -> Path:
    return root / PLACE.relative_to("/")


def _marked(text: str) -> str:
    shell, body = _split(text)
    digest = hashlib.sha256(body.encode()).hexdigest()
    return f"{shell}{_MARK} {__version__}; SHA-256 of the rest {digest}\n{body}"


def _split(text: str) -> tuple[str, str]:
    """The ``#!`` line of a script, or nothing, and the rest."""
    if not text.startswith("#!"):
        return "", text
    shell, _, body = text.partition("\n")
    return f"{shell}\n", body


def _is_ours(path: Path) -> bool:
    """Whether a regular file is as some version of snaporch wrote it."""
    if path.is_symlink() or not path.is_file():
        return False
    _, marked = _split(path.read_bytes().decode("utf-8", "surrogateescape"))
    head, _, body = marked.partition("\n")
    digest = hashlib.sha256(body.encode("utf-8", "surrogateescape")).hexdigest()
    return head.startswith(_MARK) and head.endswith(f" {digest}")


def _free(path: Path) -> Path:
    """A free name that systemd does not read."""
    candidates = (path.with_name(f"{path.name}.edited{more}") for more in _numbers())
    return next(candidate for candidate in candidates if not os.path.lexists(candidate))


def _numbers() -> Iterator[str]:
    yield ""
    number = 2
    while True:
        yield f".{number}"
        number += 1
