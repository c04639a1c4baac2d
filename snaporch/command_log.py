"""One log line for each external command and each libvirt call that changes something.

The lines go to the systemd journal below a systemd unit, with the fields of :func:`fields`, and to
standard error with ``--verbose``. They come from Python's ``logging``, which is imported when the
first command is logged: ``--version`` and a hook with nothing to do do not need it. Logging never
waits for the journal or the terminal, and never raises. Without a handler a command costs nothing.

A line has a command's arguments, its result and its duration. Environments, standard input and the
XML of domains, which can hold passwords, are never logged.
"""

from __future__ import annotations

import atexit
import os
import re
import shlex
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import logging
    from types import TracebackType

LOGGER = "snaporch"
MAX_ARGUMENT = 500
"""Characters of one argument that are logged."""
MAX_OF_QUESTION = 80
"""Characters of one argument of a command that only asks ZFS: it may be a list of properties."""
MAX_ARGUMENTS = 2000
"""Characters of all arguments that are logged."""
FIELD_NAMES = ("DOMAIN", "SNAPSHOT", "RUN", "STEP")
_QUESTIONS = (("zfs", "get"), ("zfs", "list"), ("zpool", "get"), ("zpool", "list"))
_MAX_RESULT = 300
_FIELDS: ContextVar[Mapping[str, str]] = ContextVar("fields", default=MappingProxyType({}))
_SECRET = re.compile(
    r"(?P<name>[\w:.-]*(?:pass|secret|token|key|credential)[\w.-]*=)\S+", re.IGNORECASE
)
_SECRET_OPTION = re.compile(r"--?[\w-]*(?:pass|secret|token|key|credential)[\w-]*", re.IGNORECASE)
_USER_IN_URL = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.-]*://)[^/\s@]+@", re.IGNORECASE)


# -- fields ---------------------------------------------------------------------------------------


@contextmanager
def fields(**more: str) -> Iterator[None]:
    """Add fields to the lines that are logged within: DOMAIN, SNAPSHOT, RUN, STEP.

    Fields that :func:`set_fields` sets within end here too. A thread that works for a domain has to
    be started with ``contextvars.copy_context()``, or it logs without fields.
    """
    token = _FIELDS.set(_FIELDS.get())
    try:
        set_fields(**more)
        yield
    finally:
        with suppress(ValueError):  # a lock of a group's member is released in another thread
            _FIELDS.reset(token)


def set_fields(**more: str) -> None:
    """Set fields until the end of the enclosing :func:`fields`; an empty value removes one."""
    merged = {**_FIELDS.get(), **more}
    _FIELDS.set(MappingProxyType({name: value for name, value in merged.items() if value}))


def current_fields() -> Mapping[str, str]:
    """The fields that a line would have now."""
    return _FIELDS.get()


# -- commands -------------------------------------------------------------------------------------


class LoggedCommand:
    """One command, from its start to its line: ``with LoggedCommand("zfs", "destroy", name):``.

    A command that raises is logged as failed, with the error.

    Args:
        words: the command and its arguments, not yet quoted.
        domain: the domain of the line, if no field says so.
    """

    def __init__(self, *words: str, domain: str = "") -> None:
        self._words = words
        self._domain = domain
        self._result = "ok"
        self._began = time.monotonic()

    def exited(self, status: int) -> None:
        """Set the exit status that the line shows; negative for a signal."""
        if status:
            self._result = f"exit {status}" if status > 0 else f"signal {-status}"

    def end(self) -> None:
        """Log the line; only for a command that is not a ``with`` block."""
        with suppress(Exception):  # a command that worked must not fail because of its line
            self._log(time.monotonic() - self._began)

    def _log(self, seconds: float) -> None:
        logger = _Log.logger()
        if logger is None:
            return
        found = dict(current_fields())
        if self._domain:
            found.setdefault("DOMAIN", self._domain)
        prefix = f"{found['DOMAIN']}  " if "DOMAIN" in found else ""
        text = f"{prefix}{shown(self._words)}: {self._result}, {seconds:.3f} s"
        extra = {name: escaped(value) for name, value in found.items()}
        logger.info("%s", escaped(text), extra=extra)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            reason = _without_secrets(str(error) or type(error).__name__)
            self._result = f"failed ({_cut(reason, _MAX_RESULT)})"
        self.end()


def shown(words: Sequence[str]) -> str:
    """A command line as it is logged: quoted, without secrets, bounded."""
    parts: list[str] = []
    most = MAX_OF_QUESTION if tuple(words[:2]) in _QUESTIONS else MAX_ARGUMENT
    length = 0
    is_secret = False
    for number, word in enumerate(words):
        text = "***" if is_secret else _cut(_without_secrets(word), most)
        is_secret = number > 0 and _SECRET_OPTION.fullmatch(word) is not None
        length += len(text) + 1
        if length > MAX_ARGUMENTS:
            parts.append(f"… ({len(words) - number} more)")
            break
        parts.append(shlex.quote(text))
    return escaped(" ".join(parts))


def escaped(text: str) -> str:
    """``text`` on one line, control characters made visible."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def _without_secrets(text: str) -> str:
    return _USER_IN_URL.sub(r"\g<scheme>***@", _SECRET.sub(r"\g<name>***", text))


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}…"


# -- where the lines go ---------------------------------------------------------------------------


class _Log:
    """The logger of this process, opened by its first line or by :func:`start`."""

    _lock = threading.Lock()
    _is_open = False
    _logger: logging.Logger | None = None

    @classmethod
    def logger(cls) -> logging.Logger | None:
        """The logger, or ``None`` if no handler wants lines."""
        if not cls._is_open:
            with cls._lock:
                if not cls._is_open:
                    cls.open(handlers_for(os.environ))
        return cls._logger

    @classmethod
    def open(cls, handlers: Sequence[logging.Handler]) -> None:
        """Log to ``handlers`` from now on."""
        cls._is_open = True
        if not handlers:
            cls._logger = None
            return
        import logging

        logging.raiseExceptions = False  # a handler that fails has no one to report it to
        cls._logger = logging.getLogger(LOGGER)
        cls._logger.handlers = list(handlers)
        cls._logger.propagate = False
        cls._logger.setLevel(logging.INFO)


def log_to(handlers: Sequence[logging.Handler]) -> None:
    """Log to these handlers from now on; without one nothing is logged."""
    with _Log._lock:  # noqa: SLF001 - of this module
        _Log.open(handlers)


def start(verbose: logging.Handler) -> None:
    """Log to the handler of ``--verbose`` too; to be called before the first command runs.

    A queue and a thread stand between a command and this handler, because a terminal that does not
    take a line must not keep a guest frozen. Only the end of the process waits for it.
    """
    from logging.handlers import QueueHandler, QueueListener
    from queue import SimpleQueue

    queue: SimpleQueue[logging.LogRecord] = SimpleQueue()
    handlers = handlers_for(os.environ, QueueHandler(queue))
    log_to(handlers)
    if any(isinstance(handler, QueueHandler) for handler in handlers):
        listener = QueueListener(queue, verbose)
        listener.start()
        atexit.register(listener.stop)  # waits until all lines are written


def handlers_for(
    environment: Mapping[str, str], verbose: logging.Handler | None = None, *, stderr: int = 2
) -> list[logging.Handler]:
    """The handlers of a process: the journal's below a systemd unit, and that of ``--verbose``.

    systemd sets ``JOURNAL_STREAM`` for a unit whose output goes to the journal (systemd.exec(5)),
    and the unit's children inherit it.

    Args:
        stderr: the descriptor of standard error. If that is the journal, it gets no second copy.
    """
    stream = environment.get("JOURNAL_STREAM")
    if stream is None:
        return [verbose] if verbose else []
    from snaporch.systemd_log import JournalHandler

    journal = JournalHandler("snaporch", FIELD_NAMES)
    try:
        status = os.fstat(stderr)
    except OSError:  # it is closed
        return [journal]
    is_stderr = stream == f"{status.st_dev}:{status.st_ino}"
    return [journal] if verbose is None or is_stderr else [journal, verbose]
