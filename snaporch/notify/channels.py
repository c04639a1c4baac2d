"""The channels of notifications. They may block: :mod:`snaporch.notify.notifier` uses threads."""

from __future__ import annotations

import json
import logging
import os
import signal
import smtplib
import socket
import ssl
import stat
import subprocess
from collections.abc import Callable, Sequence
from email.message import EmailMessage
from email.utils import format_datetime, make_msgid
from pathlib import Path

from snaporch.command_log import LoggedCommand
from snaporch.config import EmailOptions, NotifyOptions
from snaporch.config.monitoring import mail_server
from snaporch.errors import SnaporchError, one_line
from snaporch.notify.notification import Notification

Channel = Callable[[Notification], None]
_DAEMON_ONLY = ("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "LISTEN_FDS", "LISTEN_PID")
"""Variables that systemd sets for the daemon only, not for its children."""
_LONGEST = 200


class NotifyError(SnaporchError):
    """A notification could not be sent."""


def open_channels(notify: NotifyOptions) -> dict[str, Channel]:
    """The configured channels, by name."""
    found: dict[str, Channel] = {}
    if notify.command:
        found["notify.command"] = lambda event: by_command(event, notify.command, notify.timeout)
    if notify.email.to:
        found["notify.email"] = lambda event: by_email(event, notify.email, notify.timeout)
    if notify.apprise:
        found["notify.apprise"] = lambda event: by_apprise(event, Path(notify.apprise))
    return found


# -- a program -----------------------------------------------------------------------------------


def by_command(event: Notification, command: str, seconds: int) -> None:
    """Run a program, with JSON on standard input and ``SNAPORCH_…`` in its environment.

    Raises:
        NotifyError: the program cannot be started, fails, or takes longer than ``seconds``.
    """
    document = json.dumps(event.as_json(), ensure_ascii=False) + "\n"
    inherited = {name: value for name, value in os.environ.items() if name not in _DAEMON_ONLY}
    _run([command], document.encode("utf-8", "replace"), seconds, inherited | _variables(event))


def _variables(event: Notification) -> dict[str, str]:
    pairs = {**event.as_json(), "title": event.title}
    pairs.pop("notes")
    texts = {name: "" if value is None else str(value) for name, value in pairs.items()}
    return {f"SNAPORCH_{name.upper()}": text.replace("\0", "") for name, text in texts.items()}


def _run(words: Sequence[str], data: bytes, seconds: int, env: dict[str, str]) -> None:
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=env,
            cwd="/",
            start_new_session=True,  # so that its children are killed with it
        )
    except OSError as error:
        raise NotifyError(words[0], f"cannot be started: {error.strerror}") from error
    with LoggedCommand(words[0]) as log, process:
        try:
            _, err = process.communicate(data, timeout=seconds)
        except subprocess.TimeoutExpired as error:
            os.killpg(process.pid, signal.SIGKILL)  # not waited for yet, so the PID is still valid
            raise NotifyError(words[0], f"did not end within {seconds} s") from error
        log.exited(process.returncode)
    if process.returncode != 0:
        lines = err.decode("utf-8", "replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        cause = f": {one_line(last)[:_LONGEST]}" if last else ""
        raise NotifyError(words[0], f"exited with status {process.returncode}{cause}")


# -- e-mail --------------------------------------------------------------------------------------


def by_email(event: Notification, email: EmailOptions, seconds: int) -> None:
    """Send an e-mail, through a mail server or a program such as sendmail.

    Raises:
        NotifyError: the server or program did not accept it.
    """
    message = mail(event, email)
    if email.smtp.startswith("/"):
        words = [email.smtp, "-i", "-f", str(message["From"]), "--", *email.to]
        _run(words, message.as_bytes(), seconds, dict(os.environ))
        return
    try:
        with _server(email, seconds) as server:
            if email.user:
                server.login(email.user, secret(Path(email.password_file)))
            server.send_message(message, to_addrs=list(email.to))
    except (OSError, smtplib.SMTPException) as error:
        raise NotifyError(email.smtp, _error_text(error)) from error


def mail(event: Notification, email: EmailOptions) -> EmailMessage:
    """The e-mail for an event."""
    message = EmailMessage()
    host = socket.getfqdn() if not email.sender else email.sender.rpartition("@")[2]
    message["From"] = email.sender or f"root@{host}"
    message["To"] = ", ".join(email.to)
    message["Subject"] = event.title
    message["Date"] = format_datetime(event.at)
    message["Message-ID"] = make_msgid(domain=host or "localhost")
    message["Auto-Submitted"] = "auto-generated"  # RFC 3834: no holiday notices in return
    message.set_content(event.body)
    return message


def _server(email: EmailOptions, seconds: int) -> smtplib.SMTP:
    host, port = mail_server(email.smtp)
    if email.encryption == "tls":
        context = ssl.create_default_context()
        return smtplib.SMTP_SSL(host, port, timeout=seconds, context=context)
    server = smtplib.SMTP(host, port, timeout=seconds)
    if email.encryption == "starttls":
        try:
            server.starttls(context=ssl.create_default_context())
        except BaseException:
            server.close()
            raise
    return server


def _error_text(error: Exception) -> str:
    """The text of an error, without anything that was sent, which may be a password."""
    if isinstance(error, smtplib.SMTPRecipientsRefused):
        return f"refused {', '.join(sorted(error.recipients))}"
    if isinstance(error, smtplib.SMTPResponseException):
        raw = error.smtp_error
        text = raw.decode("utf-8", "replace") if isinstance(raw, bytes) else str(raw)
        return f"answered {error.smtp_code} {one_line(text)[:_LONGEST]}"
    return one_line(str(error))[:_LONGEST] or type(error).__name__


def secret(path: Path) -> str:
    """The first line of a file that only its owner can read.

    Raises:
        NotifyError: the file is not readable, or other users can read it.
    """
    private(path)
    try:
        return path.read_text("utf-8").split("\n", 1)[0].rstrip("\r")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8 text"
        raise NotifyError(str(path), reason) from error


def private(path: Path) -> None:
    """Check that only the owner can read a file.

    Raises:
        NotifyError: other users can read it, or it does not exist.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise NotifyError(str(path), error.strerror or "cannot be read") from error
    if stat.S_IMODE(mode) & 0o077:
        raise NotifyError(str(path), "other users can read it", f"run: chmod 600 {path}")


# -- apprise -------------------------------------------------------------------------------------


def by_apprise(event: Notification, path: Path) -> None:
    """Send to every URL in a configuration file of apprise.

    Raises:
        NotifyError: apprise is not installed, or a URL could not be reached.
    """
    private(path)
    try:
        import apprise
    except ImportError as error:
        raise NotifyError("apprise", "is not installed", "apt install apprise") from error
    logging.getLogger("apprise").setLevel(logging.CRITICAL + 1)  # its log contains URLs
    configuration = apprise.AppriseConfig()
    configuration.add(str(path))
    sender = apprise.Apprise()
    sender.add(configuration)
    if not len(sender):
        raise NotifyError(str(path), "has no URL that apprise understands")
    if not sender.notify(title=event.title, body=event.body):
        raise NotifyError(str(path), "apprise could not reach all of its URLs")
