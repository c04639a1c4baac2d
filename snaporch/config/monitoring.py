"""Options of ``[status]``, ``[metrics]`` and ``[notify]``; part of the schema."""

from __future__ import annotations

import re
from datetime import timedelta
from ipaddress import ip_address
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from snaporch.config.duration import Duration, Seconds

Kind = Literal["failure", "attention", "downgrade", "success"]
"""The kinds of events that can be notified."""
_ADDRESS = re.compile(r"[^\s<>@,;:\"\\]+(@[A-Za-z0-9.-]+)?")
_LISTEN = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([0-9.]+)):([0-9]{1,5})")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(?::([0-9]{1,5}))?")
_MOST_PORT = 65_535
_SMTP_PORT = 25
_LOCAL = ("localhost", "127.0.0.1", "::1")


def _path_or_nothing(text: str) -> str:
    if text and (not text.startswith("/") or ".." in text.split("/") or not text.isprintable()):
        raise ValueError("must be an absolute path without '..', or empty")
    return text


def _address(text: str) -> str:
    if not _ADDRESS.fullmatch(text) or text.startswith("-"):
        raise ValueError("must be a plain address such as 'admin@example.org'")
    return text


def _sender(text: str) -> str:
    return _address(text) if text else text


def listen_at(text: str) -> tuple[str, int]:
    """The address and port in ``127.0.0.1:9751`` or ``[::1]:9751``.

    Raises:
        ValueError: ``text`` is not of this form.
    """
    found = _LISTEN.fullmatch(text)
    if found is None or not 0 < int(found[3]) <= _MOST_PORT:
        raise ValueError("must be an IP address and a port, as in '127.0.0.1:9751'")
    return str(ip_address(found[1] or found[2])), int(found[3])


def _listen(text: str) -> str:
    if text:
        listen_at(text)
    return text


def mail_server(text: str) -> tuple[str, int]:
    """The host and port in ``mail.example.org:587``; without a port it is 25.

    Raises:
        ValueError: ``text`` is not of this form.
    """
    found = _HOST.fullmatch(text)
    port = int(found[2] or _SMTP_PORT) if found else 0
    if found is None or not 0 < port <= _MOST_PORT:
        raise ValueError("must be a host, a host and a port, or the absolute path of a sendmail")
    return found[1].strip("[]"), port


def _smtp(text: str) -> str:
    if text.startswith("/"):
        return _path_or_nothing(text)
    mail_server(text)
    return text


PathOrNothing = Annotated[str, AfterValidator(_path_or_nothing)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class StatusOptions(_Section):
    """When `snaporch status` reports a problem."""

    grace: Annotated[timedelta, Duration()] = Field(
        default=timedelta(minutes=30),
        description="How late a policy's snapshot may be before it counts as missed.",
    )
    replica_late: Annotated[timedelta, Duration()] = Field(
        default=timedelta(days=1),
        description="How long a replica may lack a snapshot, or a replication of a domain run, "
        "before that is a warning.",
    )
    store_warning: int = Field(
        default=85,
        ge=1,
        le=100,
        description="Percentage of the bundle store's file system that may be used before that is "
        "a warning.",
    )
    store_critical: int = Field(
        default=95, ge=1, le=100, description="Percentage from which on it is critical."
    )

    @model_validator(mode="after")
    def _in_order(self) -> StatusOptions:
        if self.store_critical < self.store_warning:
            raise ValueError("must have a store_critical that is not below store_warning")
        return self


class MetricsOptions(_Section):
    """Metrics for Prometheus."""

    textfile: PathOrNothing = Field(
        default="",
        description="File that `run-due` and the daemon write after each check of policies, for "
        "node_exporter's textfile collector: `/var/lib/prometheus/node-exporter/snaporch.prom`. "
        "None when empty.",
    )
    listen: Annotated[str, AfterValidator(_listen)] = Field(
        default="",
        description="Address at which the daemon serves metrics over HTTP: `127.0.0.1:9751`, "
        "`[::1]:9751`. Off when empty. There is no password: every client can read the "
        "names of guests.",
    )


class EmailOptions(_Section):
    """Notifications by e-mail."""

    to: tuple[Annotated[str, AfterValidator(_address)], ...] = Field(
        default=(), strict=False, description="Recipients; no e-mail is sent when empty."
    )
    sender: Annotated[str, AfterValidator(_sender)] = Field(
        default="", description="Sender; `root@` and the host's name when empty."
    )
    smtp: Annotated[str, AfterValidator(_smtp)] = Field(
        default="localhost",
        description="The mail server: a host, or host and port (`mail.example.org:587`). An "
        "absolute path names a program such as `/usr/sbin/sendmail` instead.",
    )
    encryption: Literal["none", "starttls", "tls"] = Field(
        default="none",
        description="How the connection to the mail server is encrypted. The server's certificate "
        "is checked.",
    )
    user: str = Field(default="", description="Name to log in with; no login when empty.")
    password_file: PathOrNothing = Field(
        default="",
        description="File with the password in its first line. Only root may read it.",
    )

    @model_validator(mode="after")
    def _log_in(self) -> EmailOptions:
        if bool(self.user) != bool(self.password_file):
            raise ValueError("must have both user and password_file, or neither")
        if self.user and self.smtp.startswith("/"):
            raise ValueError("must have no user when smtp is a program, which logs in by itself")
        if self.user and self.encryption == "none" and mail_server(self.smtp)[0] not in _LOCAL:
            raise ValueError("must have encryption 'starttls' or 'tls' to send a password")
        return self


class NotifyOptions(_Section):
    """Notifications about the runs of policies."""

    on: tuple[Kind, ...] = Field(
        default=("failure", "attention", "downgrade"),
        strict=False,
        description="Which events are notified. `failure`: a run failed, and the guest is as it "
        "was; `attention`: the admin must act; `downgrade`: a lower level was taken than was "
        "configured; `success`: all others.",
    )
    repeat: Annotated[timedelta, Duration()] = Field(
        default=timedelta(days=1),
        description="How long no other notification is sent if a policy fails again on the "
        "same domain for the same reason; `0s` to send one every time.",
    )
    timeout: Annotated[int, Seconds("1s", "10m")] = Field(
        default=30,
        description="How long each channel (program, e-mail, apprise) may take before "
        "it is aborted.",
    )
    command: PathOrNothing = Field(
        default="",
        description="Program that reads each notification as JSON on standard input, and as "
        "`SNAPORCH_…` in its environment.",
    )
    apprise: PathOrNothing = Field(
        default="",
        description="Configuration file of apprise, with a URL in each line. Needs the `apprise` "
        "package. Only root may read the file, because such URLs hold passwords.",
    )
    email: EmailOptions = Field(default=EmailOptions(), description="Notifications by e-mail.")
