"""What is looked at in the sections of ``sanoid.conf`` that cover guests."""

from __future__ import annotations

from collections.abc import Iterator

from snaporch.check.coverage import Covering
from snaporch.check.facts import HostFacts
from snaporch.check.findings import Finding, Severity
from snaporch.sanoid.config.hook_command import SETTINGS, HookCommand, parse_hook
from snaporch.sanoid.config.resolve import truth


def section_findings(facts: HostFacts, covering: Covering) -> Iterator[Finding]:
    """All about one section."""
    if covering.settings is None:
        yield _path_section(facts, covering)
        return
    hooks = {key: covering.setting(key) for key in SETTINGS if covering.setting(key).strip()}
    calls = {key: parse_hook(text) for key, text in hooks.items()}
    yield from _pre_and_post(facts, covering, calls)
    for key, call in calls.items():
        yield from _call(facts, covering, key, call)
    if calls.get("pre_snapshot_script") or calls.get("post_snapshot_script"):
        yield from _options(facts, covering)
    if "pruning_script" not in calls and truth(covering.setting("autoprune")):
        yield _no_pruning(facts, covering)


def _hook(facts: HostFacts, key: str) -> str:
    return f"{key} = {facts.command} hook sanoid {SETTINGS[key]}"


def _in(facts: HostFacts, covering: Covering) -> str:
    return f"in [{covering.name}] of {facts.sanoid.directory / 'sanoid.conf'} write"


def _path_section(facts: HostFacts, covering: Covering) -> Finding:
    section = covering.section
    return Finding(
        "path-section",
        Severity.ERROR,
        f"[{section.name}]",
        f"it takes the snapshots of {section.path} by a path setting",
        f"sanoid runs no snapshot hooks for such a section: {covering.of_guests} is not frozen",
        f"in {facts.sanoid.directory / 'sanoid.conf'} name the section after the dataset, and "
        "remove its path line",
        (f"[{section.path}]",),
    )


def _pre_and_post(
    facts: HostFacts, covering: Covering, calls: dict[str, HookCommand]
) -> Iterator[Finding]:
    pre, post = ("pre_snapshot_script" in calls, "post_snapshot_script" in calls)
    lines = tuple(
        _hook(facts, key)
        for key in ("pre_snapshot_script", "post_snapshot_script")
        if key not in calls
    )
    if pre and post:
        return
    if pre or post:
        there, missing = ("pre", "post") if pre else ("post", "pre")
        why = (
            "the guest stays on its overlays, or paused, until the deadline strikes"
            if pre
            else "nothing is frozen, and post has nothing to end"
        )
        what = f"it has a {there} hook, but no {missing} hook"
        code, severity = f"{missing}-missing", Severity.ERROR
    else:
        only_crash = all(guest.level == "crash" for guest in covering.guests)
        what = f"it takes snapshots of {covering.of_guests} without a hook"
        why = "they are what pulling the plug leaves, RAM is in none of them"
        code, severity = "hooks-missing", Severity.HINT if only_crash else Severity.ERROR
    subject = f"[{covering.name}]"
    yield Finding(code, severity, subject, what, why, _in(facts, covering), lines)


def _call(facts: HostFacts, covering: Covering, key: str, call: HookCommand) -> Iterator[Finding]:
    """One hook setting; of several faults the first, the others cannot be told behind it."""
    program = facts.sanoid.programs.get(call.program)
    if not call.program or program is None or not program.executable:
        yield _cannot_be_called(facts, covering, key, call)
        return
    where = _in(facts, covering)
    subject = f"[{covering.name}]"
    right = (_hook(facts, key),)
    if not call.phase:
        what = f"{key} calls {call.program}, not snaporch"
        why = f"unless it calls snaporch in its turn, {covering.of_guests} is not looked after"
        yield Finding("hook-foreign", Severity.WARNING, subject, what, why, where, right)
    elif call.phase != SETTINGS[key]:
        what = f"{key} calls snaporch's hook for {call.phase}"
        why = "each setting has a phase of its own"
        yield Finding("hook-phase", Severity.ERROR, subject, what, why, where, right)
    elif program.version not in ("", facts.version):
        what = f"{key} calls {call.program} of version {program.version}"
        why = f"this is {facts.version}: of two installations only one was upgraded"
        mend = f"remove the older one, or {where}"
        yield Finding("hook-version", Severity.WARNING, subject, what, why, mend, right)


def _cannot_be_called(facts: HostFacts, covering: Covering, key: str, call: HookCommand) -> Finding:
    program = facts.sanoid.programs.get(call.program)
    if not call.program:
        what = f"the text of {key} is no command: its quotes do not match"
    elif program is None or not program.exists:
        what = f"{key} calls {call.program}, which is not there"
    else:
        what = f"{key} calls {call.program}, which is not executable"
    why = "sanoid only warns when a hook fails"
    if SETTINGS[key] == "pre" and not truth(covering.setting("no_inconsistent_snapshot")):
        why += ", and takes the snapshot all the same"
    where, right = _in(facts, covering), (_hook(facts, key),)
    return Finding("hook-program", Severity.ERROR, f"[{covering.name}]", what, why, where, right)


def _options(facts: HostFacts, covering: Covering) -> Iterator[Finding]:
    subject, where = f"[{covering.name}]", _in(facts, covering)
    seconds = covering.section.timeout
    if seconds:
        yield Finding(
            "script-timeout",
            Severity.ERROR,
            subject,
            f"script_timeout is {seconds} s, and must be 0",
            "a hook that takes longer kills sanoid itself (SIGALRM): no snapshot, no post hook, "
            "no other dataset",
            where,
            ("script_timeout = 0",),
        )
    if not truth(covering.setting("no_inconsistent_snapshot")):
        yield Finding(
            "inconsistent-snapshot",
            Severity.WARNING,
            subject,
            "no_inconsistent_snapshot is not set",
            "when a guest cannot be frozen, sanoid takes the snapshot all the same",
            where,
            ("no_inconsistent_snapshot = yes",),
        )


def _no_pruning(facts: HostFacts, covering: Covering) -> Finding:
    return Finding(
        "pruning-missing",
        Severity.WARNING,
        f"[{covering.name}]",
        "it prunes snapshots, but has no pruning_script",
        "bundles of snapshots that sanoid has destroyed stay until `snaporch prune` is run",
        _in(facts, covering),
        (_hook(facts, "pruning_script"),),
    )
