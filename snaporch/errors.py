"""All exceptions of snaporch, with their exit codes.

Each error that a user can cause or meet is a :class:`SnaporchError`: one line with the thing, the
reason and the next step. Any other exception that reaches the command line is a bug.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum


class ExitCode(IntEnum):
    """The exit codes of the process; documented in ``docs/reference/exit-codes.md``."""

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
    """An error that the user can do something about.

    Args:
        thing: the domain, file, dataset or option that the error is about.
        reason: why the operation failed.
        step: what to do next, such as a command to run; empty if the reason implies it.
    """

    exit_code: ExitCode = ExitCode.FAILED

    def __init__(self, thing: str, reason: str, step: str = "") -> None:
        self.thing = thing
        self.reason = reason
        self.step = step
        super().__init__(self.line())

    def line(self) -> str:
        """Return the error as one line, with control characters escaped."""
        return one_line(f"{self.thing}: {self.explanation}")

    @property
    def explanation(self) -> str:
        """The reason, and the next step if there is one."""
        return f"{self.reason}; {self.step}" if self.step else self.reason


def one_line(text: str) -> str:
    """Return ``text`` with line breaks replaced by blanks and control characters escaped."""
    folded = " ".join(part.strip() for part in text.splitlines() if part.strip())
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in folded)


class UsageError(SnaporchError):
    """The command line is wrong in a way that its parser cannot detect."""

    exit_code = ExitCode.USAGE


class ConfigError(SnaporchError):
    """The configuration file cannot be read, or has a value that is not allowed."""

    exit_code = ExitCode.CONFIG


class NotFoundError(SnaporchError):
    """The named domain, snapshot, dataset or bundle does not exist."""

    exit_code = ExitCode.NOT_FOUND


class NoSuchDomainError(NotFoundError):
    """libvirt does not know the named domain; ``thing`` is the name."""


class RefusedError(SnaporchError):
    """The request is unsafe or impossible; nothing was changed."""

    exit_code = ExitCode.REFUSED


class ChangedError(RefusedError):
    """The guest was changed after the plan was made, so that the plan is no longer valid."""


class BusyError(SnaporchError):
    """Another run holds the domain's lock."""

    exit_code = ExitCode.BUSY


class UnavailableError(SnaporchError):
    """libvirt, ZFS or a permission is missing on this host."""

    exit_code = ExitCode.UNAVAILABLE


class RunFailedError(SnaporchError):
    """A run failed and was undone or finished: the guest is on its base images."""

    exit_code = ExitCode.FAILED


class AttentionError(SnaporchError):
    """Safety could not be proven: everything was kept, and the admin must decide."""

    exit_code = ExitCode.ATTENTION


class InterruptedRunError(SnaporchError):
    """A signal stopped the run, after the run was undone or finished."""

    def __init__(self, thing: str, reason: str, signum: int) -> None:
        super().__init__(thing, reason)
        self.signum = signum


class WindowClosedError(InterruptedRunError):
    """The time of day in which a transfer may run has ended; the next one continues."""


class CalledOffError(InterruptedRunError):
    """Another member of the group failed, so this one is undone; no lower level is tried.

    Args:
        thing: this member's domain.
        because: the domain of the member that failed.
    """

    def __init__(self, thing: str, because: str) -> None:
        super().__init__(thing, f"undone, because {because} failed", 0)


def raise_bugs(failures: Sequence[BaseException]) -> list[SnaporchError]:
    """Return the errors of a group's members; raise the first that is a bug.

    Raises:
        BaseException: a member failed with something else than a :class:`SnaporchError`.
    """
    for error in failures:
        if not isinstance(error, SnaporchError):
            raise error
    return [error for error in failures if isinstance(error, SnaporchError)]
