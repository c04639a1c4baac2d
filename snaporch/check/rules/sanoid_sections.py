"""Rules about the sections of ``sanoid.conf`` that cover guests.

A dataset that no section covers is found by ``unscheduled`` and ``partly_scheduled`` in
:mod:`.guests`; sanoid as a whole is in :mod:`.sanoid`.
"""

from __future__ import annotations

from collections.abc import Iterator

from snaporch.check.facts import HookProgram, HostFacts
from snaporch.check.findings import Finding, Severity, error, warning
from snaporch.check.sections_of_guests import CoveredSection
from snaporch.sanoid.config.hook_command import SETTINGS, HookCommand
from snaporch.sanoid.config.resolve import truth

_PRE, _POST, _PRUNE = "pre_snapshot_script", "post_snapshot_script", "pruning_script"


def _has(section: CoveredSection, key: str) -> bool:
    return bool(section.setting(key).strip())


def _hook_line(facts: HostFacts, key: str) -> str:
    return f"{key} = {facts.command} hook sanoid {SETTINGS[key]}"


def _where(facts: HostFacts, section: CoveredSection) -> str:
    return f"in {section.subject} of {facts.sanoid.directory / 'sanoid.conf'} write"


def path_section(facts: HostFacts, section: CoveredSection) -> Iterator[Finding]:
    """A section with a ``path`` setting runs no snapshot hooks."""
    if section.settings is None:
        path = section.section.path
        yield Finding(
            section.severity(Severity.ERROR),
            f"[{section.section.name}]",
            f"it takes the snapshots of {path} by a path setting",
            f"sanoid runs no snapshot hooks for such a section: {section.guest_names} is not "
            "frozen",
            f"in {facts.sanoid.directory / 'sanoid.conf'} name the section after the dataset, and "
            "remove its path line",
            (f"[{path}]",),
        )


def hooks_missing(facts: HostFacts, section: CoveredSection) -> Iterator[Finding]:
    """A section takes snapshots of guests without hooks."""
    if section.settings is None or _has(section, _PRE) or _has(section, _POST):
        return
    only_crash = all(guest.level == "crash" for guest in section.guests)
    yield Finding(
        Severity.HINT if only_crash else section.severity(Severity.ERROR),
        section.subject,
        f"it takes snapshots of {section.guest_names} without a hook",
        "such a snapshot is like a power loss: crash-consistent at best, and without RAM",
        _where(facts, section),
        (_hook_line(facts, _PRE), _hook_line(facts, _POST)),
    )


def pre_missing(facts: HostFacts, section: CoveredSection) -> Iterator[Finding]:
    """A section has a post hook without a pre hook."""
    if _has(section, _POST) and not _has(section, _PRE):
        yield Finding(
            section.severity(Severity.ERROR),
            section.subject,
            "it has a post hook, but no pre hook",
            "no guest is frozen, so the post hook has none to release",
            _where(facts, section),
            (_hook_line(facts, _PRE),),
        )


def post_missing(facts: HostFacts, section: CoveredSection) -> Iterator[Finding]:
    """A section has a pre hook without a post hook."""
    if _has(section, _PRE) and not _has(section, _POST):
        yield Finding(
            section.severity(Severity.ERROR),
            section.subject,
            "it has a pre hook, but no post hook",
            "the guest stays on its overlays, or paused, until the deadline",
            _where(facts, section),
            (_hook_line(facts, _POST),),
        )


def hook_program(facts: HostFacts, section: CoveredSection) -> Iterator[Finding]:
    """A hook setting names no program that can be executed."""
    for key, command, program in section.hooks(facts):
        if _can_run(command, program):
            continue
        if not command.program:
            what = f"the quotes in {key} do not match"
        elif program is None or not program.exists:
            what = f"{key} calls {command.program}, which does not exist"
        else:
            what = f"{key} calls {command.program}, which is not executable"
        why = "sanoid only warns when a hook fails"
        if key == _PRE and not truth(section.setting("no_inconsistent_snapshot")):
            why += ", and still takes the snapshot"
        line = (_hook_line(facts, key),)
        where = _where(facts, section)
        grave = section.severity(Severity.ERROR)
        yield Finding(grave, section.subject, what, why, where, line)


def _can_run(command: HookCommand, program: HookProgram | None) -> bool:
    return bool(command.program) and program is not None and program.executable


def hook_not_snaporch(facts: HostFacts, section: CoveredSection) -> Iterator[Finding]:
    """A hook setting calls a program other than snaporch."""
    for key, command, program in section.hooks(facts):
        if _can_run(command, program) and not command.phase:
            yield Finding(
                section.severity(Severity.WARNING),
                section.subject,
                f"{key} calls {command.program}, not snaporch",
                f"unless that program calls snaporch, {section.guest_names} is not frozen",
                _where(facts, section),
                (_hook_line(facts, key),),
            )


def hook_phase(facts: HostFacts, section: CoveredSection) -> Iterator[Finding]:
    """A hook setting calls snaporch's hook for another phase."""
    for key, command, program in section.hooks(facts):
        if _can_run(command, program) and command.phase not in ("", SETTINGS[key]):
            yield error(
                section.subject,
                f"{key} calls snaporch's hook for {command.phase}",
                f"this setting needs the hook for {SETTINGS[key]}",
                _where(facts, section),
                (_hook_line(facts, key),),
            )


def hook_version(facts: HostFacts, section: CoveredSection) -> Iterator[Finding]:
    """A hook setting calls a snaporch of another version."""
    for key, command, program in section.hooks(facts):
        if program is None or not program.executable or command.phase != SETTINGS[key]:
            continue
        if program.version not in ("", facts.version):
            yield warning(
                section.subject,
                f"{key} calls {command.program} of version {program.version}",
                f"this is {facts.version}: of two installations only one was upgraded",
                f"remove the older one, or {_where(facts, section)}",
                (_hook_line(facts, key),),
            )


def script_timeout(facts: HostFacts, section: CoveredSection) -> Iterator[Finding]:
    """sanoid's time limit for hooks is not 0."""
    if section.section.timeout and (_has(section, _PRE) or _has(section, _POST)):
        yield Finding(
            section.severity(Severity.ERROR),
            section.subject,
            f"script_timeout is {section.section.timeout} s, and must be 0",
            "if a hook takes longer, sanoid itself is killed (SIGALRM): no snapshot, no post hook, "
            "no other dataset",
            _where(facts, section),
            ("script_timeout = 0",),
        )


def inconsistent_snapshot(facts: HostFacts, section: CoveredSection) -> Iterator[Finding]:
    """sanoid takes a snapshot even if the pre hook fails."""
    allowed = not truth(section.setting("no_inconsistent_snapshot"))
    if allowed and (_has(section, _PRE) or _has(section, _POST)):
        yield Finding(
            section.severity(Severity.WARNING),
            section.subject,
            "no_inconsistent_snapshot is not set",
            "sanoid takes a snapshot even if a guest could not be frozen",
            _where(facts, section),
            ("no_inconsistent_snapshot = yes",),
        )


def pruning_missing(facts: HostFacts, section: CoveredSection) -> Iterator[Finding]:
    """A section destroys snapshots without a pruning hook."""
    if truth(section.setting("autoprune")) and not _has(section, _PRUNE):
        yield Finding(
            section.severity(Severity.WARNING),
            section.subject,
            "it prunes snapshots, but has no pruning_script",
            "bundles of snapshots that sanoid has destroyed stay until `snaporch prune` is run",
            _where(facts, section),
            (_hook_line(facts, _PRUNE),),
        )
