"""The command ``restic``, with a repository that the configuration names.

Neither the password nor what ``environment_file`` sets is in a command line or in the log. Only
options of restic 0.14 are used, which Debian 12 has.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import stat
import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from snaporch.config import ResticReplica
from snaporch.errors import SnaporchError, UnavailableError
from snaporch.interrupt import Interrupt
from snaporch.progress import Progress
from snaporch.remote_host import CommandError, Host, check_installed
from snaporch.replication.interface import ReplicaError
from snaporch.replication.restic_records import TAG, Contents, parse_listing
from snaporch.replication.transfer import Transfers, reason_of_receiver, text_lines

CACHE = Path("/var/cache/snaporch/restic")
"""Where restic keeps what it would read again, which is encrypted, too."""
SEE = "see docs/how-to/object-storage.md"
_MAX_BYTES = 1 << 16
"""Of a file with secrets."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CHECK_SECONDS = 45
"""restic gives up a connection after 30, prints why, and tries again for minutes."""
_DELETE_SECONDS = 86_400
"""``restic prune`` may move most of a repository."""
_FORGOTTEN_AT_ONCE = 500
"""IDs in a command line."""
_LOCKED = "repository is already locked"
"""In what restic says if another one runs, or was killed."""
_RECORD_FILE = "/record"
_WRONG = "wrong password"
"""In the reason of restic for a password that opens nothing."""
_OF_RESTIC = ("Fatal: ", "cannot dump file")
"""With these begins a line of restic that says why it failed."""

_SHORT = 2
"""A part of a secret that has only so many characters is no secret."""
_HARMLESS = ("subprocess ", "rclone: ", "unable to open cache: ")
"""With these begins what a listing does not suffer from.

Such as a greeting that ssh or rclone passes on. Without a cache restic goes on, more slowly.
"""
_LISTING = f"""\
exec 5>&1
said=$(restic snapshots --no-lock --json --tag {TAG} 2>&1 >&5) || {{
    printf '%s' "$said" >&2
    exit 1
}}
printf '\\0%s' "$said"
"""
"""The listing, and after a NUL what restic says beside it."""


class ResticRepository:
    """A repository of restic.

    Args:
        name: the replica's name in the configuration.
        replica: its section.
        interrupt: a signal ends a command.
        progress: gets the bytes.
        cache: restic's cache.
    """

    def __init__(
        self,
        name: str,
        replica: ResticReplica,
        interrupt: Interrupt,
        progress: Progress,
        *,
        cache: Path = CACHE,
    ) -> None:
        self.name = name
        self.replica = replica
        self.interrupt = interrupt
        self.progress = progress
        self.cache = cache
        """A directory for what can be read again."""
        self._contents: Contents | None = None

    @cached_property
    def host(self) -> Host:
        """This machine, where commands have what restic needs to open the repository.

        Raises:
            UnavailableError: restic is not installed, or a file is missing or not root's alone.
        """
        check = self.interrupt.check
        return Host("", lambda: check(self.name), environment=self._environment)

    @cached_property
    def transfers(self) -> Transfers:
        """Run transfers to and from the repository; errors as those of :attr:`host`."""
        return Transfers(
            self.name,
            "this machine",
            self.interrupt,
            self.progress,
            environment=self._environment,
        )

    @cached_property
    def _environment(self) -> dict[str, str]:
        check_installed("restic")
        read_secret(self.replica.password_file)
        variables = {"RESTIC_CACHE_DIR": str(self.cache)}
        if path := self.replica.environment_file:
            variables |= read_variables(Path(path))
        if self.replica.repository:
            variables["RESTIC_REPOSITORY"] = self.replica.repository
        if "RESTIC_REPOSITORY" not in variables:
            step = "set it there, or repository in the configuration"
            raise UnavailableError(path, "does not set RESTIC_REPOSITORY", step)
        variables["RESTIC_PASSWORD_FILE"] = str(self.replica.password_file)
        return variables

    def contents(self, *, again: bool = False) -> Contents:
        """What the repository has; it is listed again after it was written to.

        Args:
            again: list it in any case.

        Raises:
            SnaporchError: the listing failed, or may lack something: restic leaves out what it
                cannot read, says so, and succeeds.
        """
        if self._contents is None or again:
            self._contents = None
            try:
                text, _, said = self.host.script(_LISTING, what="restic snapshots").partition("\0")
                if lines := [e for e in text_lines(said) if not _plain(e).startswith(_HARMLESS)]:
                    step = self.step("")
                    reason = f"its listing may not be whole: {self.reason(lines[-1:])}"
                    raise ReplicaError(f"replica {self.name}", reason, step)
                self._contents = parse_listing(text)
            except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
                raise ReplicaError(self.name, "its listing cannot be read", SEE) from error
            except SnaporchError as error:
                if not isinstance(error, CommandError):
                    raise
                reason = self.reason(error.reason.splitlines())
                raise ReplicaError(
                    f"replica {self.name}", f"cannot be listed: {reason}", self.step(reason)
                ) from error
        return self._contents

    def check_answers(self) -> None:
        """Check that the repository can be opened now.

        Raises:
            ReplicaError: it cannot.
        """
        try:
            self.host.run("restic", "cat", "config", "--no-lock", limit=_CHECK_SECONDS)
        except CommandError as error:
            reason = self.reason(error.reason.splitlines())
            raise ReplicaError(
                f"replica {self.name}", f"does not answer: {reason}", self.step(reason)
            ) from error

    def backup(self, tags: Sequence[str], *what: str) -> list[str]:
        """The command line that stores something.

        Args:
            tags: of the restic snapshot.
            what: the last words: paths, or ``--stdin --stdin-filename NAME``.
        """
        self._contents = None
        rate = self.replica.rate_now()
        limit = ["--limit-upload", str(rate << 10)] if rate else []
        named = [word for tag in tags for word in ("--tag", tag)]
        return ["restic", "backup", "--quiet", "--force", *limit, *named, *what]

    def dump(self, snapshot: str, path: str) -> list[str]:
        """The command line that prints a file of a restic snapshot.

        Args:
            snapshot: its ID.
            path: of the file.
        """
        return ["restic", "dump", "--no-lock", "--quiet", snapshot, path]

    def record(self, tags: Sequence[str]) -> None:
        """Store a restic snapshot for its tags; its file has the same, for a reader.

        Raises:
            ReplicaError: that failed.
        """
        words = self.backup(tags, "--stdin", "--stdin-filename", _RECORD_FILE)
        with self.transfers.local_errors(), tempfile.TemporaryFile() as text:
            text.write("".join(f"{tag}\n" for tag in tags).encode())
            text.seek(0)
            status, lines = self.transfers.run(words, through=0, size=0, source=text)
        self._contents = None
        if status != 0:
            reason = f"a record was not stored: {self.reason(lines)}"
            step = self.step(reason, f"try again; {SEE}")
            raise ReplicaError(f"replica {self.name}", reason, step)

    def forget(self, snapshots: Sequence[str]) -> None:
        """Forget restic snapshots; what only they had stays until :meth:`reclaim`.

        Args:
            snapshots: IDs.

        Raises:
            ReplicaError: that failed, or they are still there: the server deletes nothing, and
                restic before 0.17 only prints that.
        """
        for begin in range(0, len(snapshots), _FORGOTTEN_AT_ONCE):
            some = snapshots[begin : begin + _FORGOTTEN_AT_ONCE]
            self._delete("forget", *some)
        left = {each.id for each in self.contents(again=True).stored}.intersection(snapshots)
        if left:
            reason = f"{len(left)} restic snapshots that were forgotten are still there"
            step = f"may its key delete? see: {self.by_hand('forget', min(left))}"
            raise ReplicaError(f"replica {self.name}", reason, step)

    def reclaim(self) -> None:
        """Delete the data that no restic snapshot has any more.

        Raises:
            ReplicaError: that failed.
        """
        self._delete("prune")

    def _delete(self, *words: str) -> None:
        self._contents = None
        try:
            self.host.run("restic", *words, limit=_DELETE_SECONDS)
        except CommandError as error:
            reason = self.reason(text_lines(error.reason))
            raise ReplicaError(
                f"replica {self.name}", f"restic {words[0]}: {reason}", self.step(reason)
            ) from error

    def reason(self, lines: Sequence[str], *, reads: bool = False) -> str:
        """As :func:`restic_reason`, without what the environment file contains."""
        found = restic_reason(lines, reads=reads)
        for secret in self._secrets:
            found = found.replace(secret, "…")
        return found

    def step(self, reason: str, otherwise: str = "") -> str:
        """The next step after a failure with this reason.

        Args:
            reason: as :meth:`reason` gives it.
            otherwise: the step for a reason that has none of its own; the default is a listing.
        """
        if _WRONG in reason:
            return f"put the password of the repository into {self.replica.password_file}"
        if _LOCKED in reason:
            return f"if no other restic uses it, remove the lock: {self.by_hand('unlock')}"
        return otherwise or f"try again, or see: {self.by_hand('snapshots')}; {SEE}"

    @cached_property
    def _secrets(self) -> list[str]:
        """What no message may have, longest first: values, and what addresses have before ``@``."""
        path = self.replica.environment_file
        values = read_variables(Path(path)) if path else {}
        address = values.pop("RESTIC_REPOSITORY", self.replica.repository)
        before, at, _ = address.rpartition("@")
        user = before.partition("://")[2] if at else ""
        # An address that cannot be parsed is quoted in parts.
        found = [*values.values(), user, *re.split(r"[^\w.+-]", user.partition(":")[2])]
        return sorted({each for each in found if len(each) > _SHORT}, key=len, reverse=True)

    def by_hand(self, *words: str) -> str:
        """A restic command as an admin types it; it contains no secret, and leaves none behind."""
        path = self.replica.environment_file
        repository = ["-r", self.replica.repository] if self.replica.repository else []
        secret = ["--password-file", str(self.replica.password_file)]
        command = shlex.join(["restic", *repository, *secret, *words])
        return f"(set -a; . {shlex.quote(path)}; {command})" if path else command


def new_upload() -> str:
    """A new value for the tag ``upload``."""
    return secrets.token_hex(16)


def restic_reason(lines: Sequence[str], *, reads: bool = False) -> str:
    """The reason of a failure, from the output of restic and of the command at its other side.

    Args:
        lines: not empty ones.
        reads: restic is the first command, and the others fail because it does; otherwise the last.
    """
    lines = [_plain(line) for line in lines]
    said = [line.removeprefix("Fatal: ") for line in lines if line.startswith(_OF_RESTIC)]
    own = [reason_of_receiver([line]) for line in lines if line.startswith("snaporch: ")]
    found = [*said, *own] if reads else [*own, *said]
    locked = [line[line.index(_LOCKED) :].partition("\n")[0] for line in lines if _LOCKED in line]
    return [*locked, *found, *[*lines][-1:], "no output"][0]


def _plain(line: str) -> str:
    """A line of restic, which prints its errors as JSON, too, beside a listing."""
    if not line.startswith("{"):
        return line
    try:
        return str(json.loads(line)["message"])
    except (LookupError, RecursionError, TypeError, ValueError):
        return line


def read_secret(path: Path) -> str:
    """The text of a file that only root may read.

    Raises:
        UnavailableError: it is missing, is a link, another user could have changed or read it, or
            it is too long.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as stream:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise UnavailableError(str(path), "is no plain file")
            if found.st_uid != os.geteuid() or found.st_mode & 0o077:
                owner = f"chown root: {shlex.quote(str(path))}"
                step = f"{owner} && chmod 600 {shlex.quote(str(path))}"
                raise UnavailableError(str(path), "may be read or written by others", step)
            data = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        raise UnavailableError(str(path), error.strerror or str(error), SEE) from error
    if len(data) > _MAX_BYTES or not data.strip():
        raise UnavailableError(str(path), "is empty, or too long", SEE)
    return data.decode("utf-8", "surrogateescape")


def read_variables(path: Path) -> dict[str, str]:
    """The variables that a file sets in lines such as ``NAME=VALUE``; quotes are removed.

    Raises:
        UnavailableError: as :func:`read_secret`; or a line has another form.
    """
    found = {}
    for number, line in enumerate(read_secret(path).splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, equals, value = text.partition("=")
        try:
            words = shlex.split(value)
        except ValueError:
            words = ["", ""]
        if not equals or not _VARIABLE.fullmatch(name) or len(words) > 1 or "\0" in value:
            raise UnavailableError(str(path), f"line {number} is not NAME=VALUE", SEE)
        found[name] = "".join(words)
    return found


class _Silent:
    """No progress is shown."""

    def step(self, subject: str, text: str) -> None:
        """See the protocol."""

    def note(self, subject: str, text: str) -> None:
        """See the protocol."""

    def amount(self, subject: str, done: int, total: int) -> None:
        """See the protocol."""


def repository_problem(replica: ResticReplica, interrupt: Interrupt) -> str:
    """Why no transfer to a repository can succeed now; empty if no obstacle is found.

    Args:
        replica: its section.
        interrupt: a signal ends the question.

    Raises:
        InterruptedRunError: a signal came.
    """
    repository = ResticRepository("restic", replica, interrupt, _Silent())
    try:
        repository.host.run("restic", "cat", "config", "--no-lock", limit=_CHECK_SECONDS)
    except UnavailableError as error:
        return error.line()
    except CommandError as error:
        reason = repository.reason(error.reason.splitlines())
        made = f"if it was never made: {repository.by_hand('init')}"
        return f"{reason}; {made if _WRONG not in reason else repository.step(reason)}"
    return ""
