"""Rules about sanoid as a whole; single sections: :mod:`.sanoid_sections`.

Other programs that snapshot a guest's datasets are found in :mod:`.guests`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from snaporch.check.facts import GuestFacts, HostFacts
from snaporch.check.findings import Finding, Severity, hint, warning
from snaporch.sanoid.hooks.freeze_order import find_conflict


def _conf(facts: HostFacts) -> str:
    return str(facts.sanoid.directory / "sanoid.conf")


def sanoid_missing(facts: HostFacts) -> Iterator[Finding]:
    """sanoid is not installed."""
    if not facts.sanoid.installed:
        yield hint(
            "sanoid",
            "it is not installed",
            "only snaporch takes snapshots, and no sections were checked",
            "if sanoid is to take snapshots, run",
            ("apt install sanoid",),
        )


def sanoid_unused(facts: HostFacts) -> Iterator[Finding]:
    """sanoid is installed without a configuration."""
    if facts.sanoid.unused:
        directory = shlex.quote(str(facts.sanoid.directory))
        yield hint(
            _conf(facts),
            "it does not exist",
            "sanoid takes no snapshots; its syncoid needs no such file",
            "nothing to do; if sanoid is to take snapshots, run",
            (f"mkdir -p {directory} && snaporch render sanoid >>{directory}/sanoid.conf",),
        )


def sanoid_refuses(facts: HostFacts) -> Iterator[Finding]:
    """sanoid exits with an error because of its configuration."""
    sanoid = facts.sanoid
    if sanoid.installed and not sanoid.unused and sanoid.config is None:
        yield Finding(
            Severity.HINT if sanoid.scheduled is False else Severity.ERROR,
            _conf(facts),
            sanoid.refusal,
            "sanoid exits with an error, and takes no snapshots",
            "fix the file; `snaporch render sanoid` prints one that works",
        )


def sanoid_timer(facts: HostFacts) -> Iterator[Finding]:
    """sanoid's timer is not active."""
    if facts.sanoid.config is not None and facts.sanoid.scheduled is False:
        yield hint(
            "sanoid.timer",
            "it is not active",
            "sanoid takes snapshots only when it is started by hand",
            "run",
            ("systemctl enable --now sanoid.timer",),
        )


def sanoid_ignores(facts: HostFacts) -> Iterator[Finding]:
    """sanoid ignores a setting, or reads it otherwise than it looks."""
    for complaint in facts.sanoid.config.complaints if facts.sanoid.config else ():
        yield warning(
            _conf(facts),
            complaint,
            "sanoid does something else than the file seems to say",
            "fix the file",
        )


def dataset_missing(facts: HostFacts) -> Iterator[Finding]:
    """A section names a dataset that does not exist."""
    sections = facts.sanoid.config.sections.values() if facts.sanoid.config else ()
    missing = {s.origin for s in sections if s.takes_snapshots and s.path not in facts.datasets}
    for name in sorted(missing):
        yield warning(
            f"[{name}]",
            "the dataset does not exist",
            "sanoid fails to take its snapshots, at every start",
            f"correct or remove the section in {_conf(facts)}",
        )


def hook_deadline(facts: HostFacts) -> Iterator[Finding]:
    """The guests of one call of the pre hook cannot all be frozen within their deadlines."""
    for path, guests in _guests_by_call(facts).items():
        estimates = {each.name: each.estimate for each in guests if each.estimate is not None}
        conflict = find_conflict(estimates, facts.jobs)
        if conflict is None:
            continue
        level = next(each.on_unavailable for each in guests if each.name == conflict.guest)
        yields_to_other_program = estimates[conflict.guest].yields_to_other_program
        fails = level == "fail" and not yields_to_other_program
        result = f"its snapshots have the level {level}"
        if yields_to_other_program:
            result = "it is held on overlays, and snapshots that other programs take may be torn"
        yield Finding(
            Severity.ERROR if fails else Severity.WARNING,
            conflict.guest,
            f"it cannot be frozen together with the others on {path}: {conflict.reason}",
            "the pre hook fails, and freezes none of them" if fails else result,
            conflict.step,
        )


def _guests_by_call(facts: HostFacts) -> dict[str, list[GuestFacts]]:
    """Dataset of a hook call → guests on it or, with ``recursive = zfs``, below it."""
    found: dict[str, list[GuestFacts]] = {}
    for guest in facts.guests:
        sections = map(facts.sanoid.config.covering, guest.datasets) if facts.sanoid.config else ()
        hooked = (each for each in sections if each and each.settings.get("pre_snapshot_script"))
        for path in {section.path for section in hooked}:
            found.setdefault(path, []).append(guest)
    return found
