"""Rules about the host: versions, libvirt's hook, runs, RAM streaming, replicas, configuration.

Overlays, the bundle store and RAM in pages are judged by :mod:`.storage`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence

from snaporch.check.facts import HostFacts
from snaporch.check.findings import Finding, Severity, error, hint, listed, warning
from snaporch.known_faults import known_faults, parse_release


def unfinished_run(facts: HostFacts) -> Iterator[Finding]:
    """A run was interrupted, and its journal is still there."""
    for run in facts.runs:
        if not run.alive:
            is_snapshot = run.kind == "snapshot"
            yield error(
                run.domain,
                f"the {'run' if is_snapshot else run.kind} {run.run} was interrupted",
                "the guest may still be on its overlays"
                if is_snapshot
                else "the guest may be off, or its disks may be of two instants",
                "run",
                ("snaporch recover",),
            )


def unreadable_journal(facts: HostFacts) -> Iterator[Finding]:
    """The journal of a run cannot be read."""
    for journal in facts.unreadable_journals:
        yield error(
            str(journal.path),
            journal.reason,
            "whether its run has ended is not known, and its guest may be on overlays",
            journal.step,
        )


def replica_unreachable(facts: HostFacts) -> Iterator[Finding]:
    """A replica that a policy names cannot be reached."""
    for name, reason in facts.replicas.items():
        if reason:
            yield warning(
                f"replica {name}",
                reason,
                "policies name it, and nothing can be copied to it",
                "see docs/how-to/object-storage.md, 'Set it up'"
                if name in facts.repositories
                else "see docs/how-to/replication.md, 'Set up a replica'",
            )


def ram_in_clear(facts: HostFacts) -> Iterator[Finding]:
    """Bundles on a replica are in clear, of guests whose disks are, too."""
    for name, privacy in facts.bundle_privacy.items():
        guests = [
            guest.name
            for guest in facts.guests
            if name in guest.replicas
            and guest.has_ram
            and not facts.encrypted & {*guest.datasets, *guest.left_out}
        ]
        if guests and privacy.is_clear:
            yield hint(
                f"replica {name}",
                f"the RAM of {listed(guests)} is there in clear, as the disks are",
                "who reads its files reads what the guests had in memory, such as keys",
                f"set encrypt_to in [replica.{name}]: see docs/how-to/replication.md",
            )


def replica_weak(facts: HostFacts) -> Iterator[Finding]:
    """ZFS itself would let the receiving user of an append-only replica change copies."""
    for name, reason in facts.weak_replicas.items():
        yield hint(
            f"replica {name}",
            reason,
            "only snaporch receive protects the copies there, and not ZFS, too",
            "see docs/how-to/replication.md, append-only copies",
        )


def rate_unlimited(facts: HostFacts) -> Iterator[Finding]:
    """A replica has a rate, and mbuffer is missing."""
    for name in facts.unlimited:
        yield warning(
            f"replica {name}",
            "mbuffer is not installed",
            "nothing limits zfs send to its rate, and rate_outside counts as not set",
            "apt install mbuffer",
        )


def no_streaming(facts: HostFacts) -> Iterator[Finding]:
    """RAM cannot be streamed, though the configuration allows or demands it."""
    mode = facts.capture
    if mode is None or mode.streams or mode.wanted == "file":
        return
    demanded = mode.wanted == "stream"
    yield Finding(
        Severity.ERROR if demanded else Severity.WARNING,
        "RAM",
        f"it cannot be streamed ({mode.reason})",
        "no RAM can be saved, since ram_capture is stream"
        if demanded
        else "it is written to a raw file: guests pause for longer the more memory they have",
        "fix the reason; paths.runtime and compression are settings of snaporch.toml",
    )


def version_unknown(facts: HostFacts) -> Iterator[Finding]:
    """The version of a component cannot be read."""
    for component, version in facts.releases.items():
        if parse_release(version) is None:
            yield hint(
                component,
                f"its version ({version or 'none'}) cannot be read",
                "it was not compared with the versions of known faults",
                "compare it with docs/reference/hosts.md, Known faults",
            )


def known_fault(facts: HostFacts) -> Iterator[Finding]:
    """A component has a known fault that matters here; the fault's code is the finding's."""
    for component, version in facts.releases.items():
        for fault in known_faults(component, version):
            if fault.need in facts.needs:
                names = facts.needs[fault.need]
                guests = listed(names)
                yield Finding(
                    Severity.WARNING if fault.harmful else Severity.HINT,
                    f"{component} {version}",
                    fault.what,
                    f"{fault.need}{f' ({guests})' if guests else ''}; snaporch {fault.meanwhile}",
                    fault.fix,
                    _settings(facts, names, fault.setting),
                    code=fault.code,
                )


def _settings(facts: HostFacts, names: Sequence[str], setting: str) -> tuple[str, ...]:
    """The lines of ``snaporch.toml`` that give each of these guests a setting.

    TOML allows a section only once: for one that exists a comment says where the line belongs.
    """
    if not setting:
        return ()
    sections = {name: f"[domain.{json.dumps(name, ensure_ascii=False)}]" for name in names}
    return tuple(
        line
        for name, section in sections.items()
        for line in (f"# in {section}:" if name in facts.domain_sections else section, setting)
    )


def policies_wait(facts: HostFacts) -> Iterator[Finding]:
    """Policies take snapshots, but no unit of this host carries them out, and none ever did."""
    if facts.policies and facts.policies_wait:
        yield warning(
            "policies",
            "neither snaporch-run-due.timer nor snaporch.service is active",
            "no snapshot of a policy is taken, unless a crontab runs snaporch run-due",
            "run",
            ("systemctl enable --now snaporch-run-due.timer",),
        )


def other_configuration(facts: HostFacts) -> Iterator[Finding]:
    """Units use another configuration file than the one that is checked."""
    for file, units in facts.other_configurations.items():
        yield warning(
            listed(units),
            f"it uses the configuration {file}",
            "this check was of another configuration",
            "check the one that the units use; or install units for this one: snaporch install",
            (shlex.join(["snaporch", "--config", str(file), "check"]),),
        )


def unguarded_start(facts: HostFacts) -> Iterator[Finding]:
    """libvirt's hook does not keep guests from being started on overlays.

    What is wrong with it is found by :mod:`snaporch.hypervisor.start_hook_check`.
    """
    if facts.start_hook_problem is not None:
        yield warning(
            "libvirt",
            facts.start_hook_problem.reason,
            "after a power loss during a run libvirt may start a guest on overlays that are not "
            "committed yet, or that are older than their bases",
            "run",
            (facts.start_hook_problem.step,),
        )


def late_fences(facts: HostFacts) -> Iterator[Finding]:
    """The dataset of the fences may be mounted after libvirt has started guests."""
    if facts.late_fences:
        yield hint(
            facts.late_fences,
            "has the fences of guests, and libvirt may start before it is mounted",
            "libvirt's hook then finds no fence, and starts a fenced guest with autostart",
            "keep fences on the file system of the hook: see docs/how-to/check.md#late-fences",
        )


def stray_fence(facts: HostFacts) -> Iterator[Finding]:
    """A fence holds no guest of this host: the guest is gone, or is defined with another UUID."""
    for each in facts.stray_fences:
        remove = shlex.join(["snaporch", "fence", "--remove", each.uuid])
        if each.namesake:
            yield warning(
                each.domain,
                f"is defined with another UUID than the guest of this name that is fenced "
                f"({each.uuid})",
                "the fence does not hold it: if it is the same guest, it may run on two hosts",
                "if its copy runs elsewhere, fence this one, too",
                (shlex.join(["snaporch", "fence", each.namesake]),),
            )
        else:
            yield hint(
                each.domain,
                f"is fenced, and not defined here any more ({each.uuid})",
                "the fence prevents that a rebuild brings back an older state of it",
                "if it never comes back",
                (remove,),
            )


def unknown_name(facts: HostFacts) -> Iterator[Finding]:
    """A name in the configuration matches no guest."""
    for where, names in facts.unknown_names.items():
        patterns = all(set("*?[") & set(name) for name in names)
        yield Finding(
            Severity.HINT if patterns else Severity.WARNING,
            where,
            f"no guest has {listed([repr(name) for name in names])}",
            "the setting has no effect: the name is misspelt, or the guest was renamed",
            "correct it in snaporch.toml",
        )
