"""Whether the package may be removed: not while a run is unfinished, or a guest fenced.

The Debian package asks ``python3 -m snaporch.recovery.package_removal``, which answers by its exit
code. An unfinished run may have left its guest on overlays, and without snaporch nothing brings it
back. A fenced guest would start again, for nothing else asks for fences. The other flavour of the
package goes on asking for them: so ``in-favour`` is an argument.

Overlays are removed by :mod:`snaporch.recovery.overlay_removal`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from snaporch.config import Config, load_config
from snaporch.errors import ConfigError, RefusedError, SnaporchError
from snaporch.fence import HOST, Fences
from snaporch.journal import UnreadableJournal, list_journals
from snaporch.systemd.configurations_in_units import DIRECTORIES, unit_configurations


def check_no_run(journals: Path) -> None:
    """Check that no run is under way or was interrupted; needs neither libvirt nor ZFS.

    Args:
        journals: the directory of journals.

    Raises:
        RefusedError: a run is unfinished.
        UnavailableError: the journals cannot be read.
    """
    open_runs = list_journals(journals, sweep=False)
    if open_runs:
        unreadable = [each for each in open_runs if isinstance(each, UnreadableJournal)]
        names = {each.domain for each in open_runs if not isinstance(each, UnreadableJournal)}
        raise RefusedError(
            ", ".join([*sorted(names), *(str(each.path) for each in unreadable)]),
            "a run has not ended, and its guest may be on overlays",
            "wait until it has ended, or run: snaporch recover",
        )


def check_no_fence(fences: Fences) -> None:
    """Check that no guest of this host is fenced; needs neither libvirt nor ZFS.

    Raises:
        RefusedError: a guest is fenced.
        UnavailableError: the fences cannot be read.
    """
    if found := fences.all():
        remove = "; ".join(f"snaporch fence --remove {each.uuid}" for each in found)
        raise RefusedError(
            ", ".join(sorted(each.domain for each in found)),
            "is fenced, and libvirt starts it again without snaporch's hook",
            f"undefine it here if a copy of it runs elsewhere; then run: {remove}",
        )


def read_configuration(
    path: Path | None, load: Callable[[Path | None], Config] = load_config
) -> Config:
    """Load the configuration; where unfinished runs are is known from a valid one only.

    Raises:
        ConfigError: with the way to remove snaporch all the same.
    """
    try:
        return load(path)
    except ConfigError as error:
        step = "correct it, or move it away if it never had paths.journal"
        raise ConfigError(error.thing, error.reason, step) from error


def main(
    config: Path | None,
    output: Callable[[str], object],
    unit_directories: Iterable[Path] = DIRECTORIES,
    fences: Fences | None = None,
) -> int:
    """Print what stays, or why snaporch must not be removed; the process's exit code.

    Args:
        config: the configuration file; ``None`` for the default. Those that units name count, too,
            if they exist.
        unit_directories: where units are.
        fences: those of this host; None if its hook stays.
    """
    named = unit_configurations(unit_directories)
    try:
        files = (config, *sorted(file for file in named if file.exists()))
        used = [read_configuration(each).paths for each in files]
        for paths in used:
            check_no_run(paths.journal)
        if fences is not None:
            check_no_fence(fences)
    except SnaporchError as error:
        output(f"snaporch: {error.line()}\n")
        return error.exit_code
    for paths in used:
        left = f"the bundles below {paths.bundles} and {paths.journal.parent}"
        output(f"snaporch: the ZFS snapshots, {left} stay\n")
    for file, units in sorted(named.items()):
        disable = f"systemctl disable --now {' '.join(sorted(units))}"
        output(f"snaporch: units with --config {file} stay, and cannot start: {disable}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(None, sys.stderr.write, fences=None if "in-favour" in sys.argv else HOST))
