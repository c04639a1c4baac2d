"""The one exception tree, with the exit code of each branch.

Every error a user can meet is a :class:`SnaporchError`: it names the thing, the reason and the
next step, on one line. Anything else that reaches the command line is a bug.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What the process answers; documented in ``docs/exit-codes.md``."""

    OK = 0
    BUG = 1
    USAGE = 2
    CONFIG = 3
    NOT_FOUND = 4
    REFUSED = 5
    BUSY = 6
    UNAVAILABLE = 7
    FAILED = 8
    ATTENTION = 9
    WARNINGS = 10


class SnaporchError(Exception):
    """An error a user can act upon.

    Args:
        thing: what it is about: a domain, a file, a dataset, an option.
        reason: why it cannot be, in plain words.
        step: what to do next; empty when the reason says it all.
    """

    exit_code: ExitCode = ExitCode.FAILED

    def __init__(self, thing: str, reason: str, step: str = "") -> None:
        self.thing = thing
        self.reason = reason
        self.step = step
        super().__init__(self.line())

    def line(self) -> str:
        """The whole error on one line, control characters made visible."""
        return one_line(f"{self.thing}: {self.explanation}")

    @property
    def explanation(self) -> str:
        """The reason and the next step."""
        return f"{self.reason}; {self.step}" if self.step else self.reason


def one_line(text: str) -> str:
    """``text`` with line breaks folded and other control characters escaped."""
    folded = " ".join(part.strip() for part in text.splitlines() if part.strip())
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in folded)


class UsageError(SnaporchError):
    """The command line is wrong in a way its parser cannot see."""

    exit_code = ExitCode.USAGE


class ConfigError(SnaporchError):
    """The configuration file cannot be read or says something impossible."""

    exit_code = ExitCode.CONFIG


class NotFoundError(SnaporchError):
    """A domain, snapshot, dataset or bundle that was named does not exist."""

    exit_code = ExitCode.NOT_FOUND


class RefusedError(SnaporchError):
    """Asked for something unsafe or impossible; nothing was touched."""

    exit_code = ExitCode.REFUSED


class ChangedError(RefusedError):
    """Others changed the guest, and the plan does not fit it any more."""


class BusyError(SnaporchError):
    """Another run holds the domain."""

    exit_code = ExitCode.BUSY


class UnavailableError(SnaporchError):
    """libvirt, ZFS or a permission is missing on this host."""

    exit_code = ExitCode.UNAVAILABLE


class RunFailedError(SnaporchError):
    """A run failed and was undone or finished: the guest is on its base images."""

    exit_code = ExitCode.FAILED


class AttentionError(SnaporchError):
    """Safety could not be proven: everything was kept and a human must look."""

    exit_code = ExitCode.ATTENTION


class InterruptedRunError(SnaporchError):
    """A signal asked the run to stop; it undid or finished itself first."""

    def __init__(self, thing: str, reason: str, signum: int) -> None:
        super().__init__(thing, reason)
        self.signum = signum
