"""``snaporch``, also as ``python3 -m snaporch``."""

from __future__ import annotations

import os
import sys

from snaporch import __version__

_PHASES = ("pre", "post", "pre-prune", "prune")


def main() -> None:
    """The console script. Hooks and ``--version`` do not wait for the command line's parser."""
    words = sys.argv[1:]
    if words == ["--version"]:
        sys.stdout.write(f"snaporch {__version__}\n")
        return
    if words[:-1] == ["hook", "sanoid"] and words[-1] in _PHASES:
        from snaporch.sanoid.hook import answer

        sys.exit(answer(words[2], os.environ))
    from snaporch.cli.main import run

    run()


if __name__ == "__main__":
    main()
