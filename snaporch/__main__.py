"""The program ``snaporch``, also as ``python3 -m snaporch``.

Hooks go to :mod:`snaporch.sanoid.hooks.dispatch`, all else to :mod:`snaporch.cli.main`.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from snaporch import __version__

_PHASES = ("pre", "post", "pre-prune", "prune")


def main() -> None:
    """Run the console script; hooks and ``--version`` do not import the command line's parser."""
    _open_missing_streams()
    words = sys.argv[1:]
    if words == ["--version"]:
        with suppress(OSError):  # the parser is imported then: it reports the failure
            sys.stdout.write(f"snaporch {__version__}\n")
            sys.stdout.flush()
            return
    if words[:-1] == ["hook", "sanoid"] and words[-1] in _PHASES:
        from snaporch.sanoid.hooks.dispatch import answer

        sys.exit(answer(words[2], os.environ))
    from snaporch.cli.main import run

    run()


def _open_missing_streams() -> None:
    """Open ``/dev/null`` for each standard stream that was closed (``>&-``).

    Otherwise the next opened file, a journal or an image, would get the stream's number, and with
    it the output of this process and of its children.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # stays open
            if descriptor != number:
                os.dup2(descriptor, number)
            mode = "r" if number == 0 else "w"
            setattr(sys, name, open(number, mode, encoding="utf-8"))  # noqa: SIM115 - stays open


if __name__ == "__main__":
    main()
