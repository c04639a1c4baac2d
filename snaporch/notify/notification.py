"""Makes notifications from the results of runs: pure functions.

Whether one is sent again is decided by :mod:`snaporch.notify.history`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from snaporch.config import Config
from snaporch.config.monitoring import Kind
from snaporch.errors import ExitCode, SnaporchError, one_line
from snaporch.model import Level, iso
from snaporch.schedule.subprocesses import SnapshotJobResult
from snaporch.snapshot.choose_strategy import is_lower

_SIGNAL = 128


@dataclass(frozen=True, slots=True)
class Notification:
    """An event that may be notified."""

    kind: Kind
    host: str
    at: datetime
    domain: str
    uuid: str
    policy: str
    """Empty for an event without a policy."""
    status: int
    """The exit code of the run."""
    level: str
    """The level of the snapshot; empty without one."""
    text: str
    notes: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Identifies the subject: a repeated problem has the same key."""
        return f"{self.uuid or self.domain}/{self.policy}"

    @property
    def title(self) -> str:
        """The subject of the notification, one line."""
        what = f"{self.domain} ({self.policy})" if self.policy else self.domain
        return one_line(f"snaporch on {self.host}: {self.kind}: {what}")

    @property
    def body(self) -> str:
        """The text of the notification."""
        lines = [
            one_line(self.text),
            *(one_line(note) for note in self.notes),
            "",
            f"host    {self.host}",
            f"domain  {one_line(self.domain)}",
            *([f"policy  {self.policy}"] if self.policy else []),
            f"time    {iso(self.at)}",
            f"code    {self.status} (docs/reference/exit-codes.md)",
        ]
        return "\n".join(lines) + "\n"

    def as_json(self) -> dict[str, object]:
        """The documented JSON object (``docs/how-to/notify.md``)."""
        return {
            "event": self.kind,
            "host": self.host,
            "at": iso(self.at),
            "domain": self.domain,
            "uuid": self.uuid,
            "policy": self.policy or None,
            "status": self.status,
            "level": self.level or None,
            "text": self.text,
            "notes": list(self.notes),
        }


def notification_of_run(
    config: Config, outcome: SnapshotJobResult, host: str, at: datetime
) -> Notification | None:
    """The event of a run that ended; ``None`` if a signal ended it."""
    if outcome.status >= _SIGNAL:
        return None
    job, level = outcome.job, outcome.level
    return Notification(
        kind=_kind(config, outcome),
        host=host,
        at=at,
        domain=job.domain,
        uuid=job.uuid,
        policy=job.policy,
        status=outcome.status,
        level=level.value if level else "",
        text=outcome.text,
        notes=outcome.notes,
    )


def notification_of_error(error: SnaporchError, host: str, at: datetime) -> Notification:
    """The event of an error outside of runs."""
    return Notification(
        kind="attention" if error.exit_code is ExitCode.ATTENTION else "failure",
        host=host,
        at=at,
        domain=one_line(error.thing),
        uuid="",
        policy="",
        status=int(error.exit_code),
        level="",
        text=error.line(),
    )


def _kind(config: Config, outcome: SnapshotJobResult) -> Kind:
    if outcome.status == ExitCode.ATTENTION:
        return "attention"
    if not outcome.ok:
        return "failure"
    lower = (
        is_lower(reached, asked_level(config, outcome.job.policy, each["domain"], each["uuid"]))
        for each in outcome.documents
        if (reached := Level(each["level"])) is not Level.OFF
    )
    return "downgrade" if any(lower) else "success"


def asked_level(config: Config, policy_name: str, domain: str, uuid: str) -> Level:
    """The level that is configured for the policy and the domain."""
    policy = config.policy.get(policy_name)
    level: str = policy.level if policy else "auto"
    if level == "auto":
        level = config.settings(domain, uuid).level
    return Level.RAM if level == "auto" else Level(level)
