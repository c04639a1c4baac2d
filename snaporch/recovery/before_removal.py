"""The question of the Debian package before its removal: may snaporch be missing from now on?

``python3 -m snaporch.recovery.before_removal`` answers by its exit code. An unfinished run may have
left its guest on overlays, and without snaporch nothing brings it back.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from snaporch.config import load_config
from snaporch.errors import AttentionError, SnaporchError
from snaporch.journal import UnreadableJournal, list_journals


def check_removal(config: Path | None) -> str:
    """Refuse the removal of snaporch while a run is unfinished; needs neither libvirt nor ZFS.

    Args:
        config: the configuration file; ``None`` for the default.

    Returns: a line about the files that stay.

    Raises:
        AttentionError: a run is unfinished.
        SnaporchError: the configuration or the journals cannot be read.
    """
    paths = load_config(config).paths
    open_runs = list_journals(paths.journal, sweep=False)
    if open_runs:
        unreadable = [each for each in open_runs if isinstance(each, UnreadableJournal)]
        names = {each.domain for each in open_runs if not isinstance(each, UnreadableJournal)}
        raise AttentionError(
            ", ".join([*sorted(names), *(str(each.path) for each in unreadable)]),
            "a run has not ended, and the guest may be on overlays",
            "run: snaporch recover",
        )
    return f"the ZFS snapshots, the bundles below {paths.bundles} and {paths.journal.parent} stay"


def main(config: Path | None, output: Callable[[str], object]) -> int:
    """Print the line, or the error; the process's exit code."""
    try:
        output(f"snaporch: {check_removal(config)}\n")
    except SnaporchError as error:
        output(f"snaporch: {error.line()}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(None, sys.stderr.write))
