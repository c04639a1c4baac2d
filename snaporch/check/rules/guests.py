"""Rules about each guest: its plan, its disks, and how its snapshots are taken.

A guest whose datasets no section of ``sanoid.conf`` covers is found here; what is wrong in a
section is found by :mod:`.sanoid_sections`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from snaporch.check.facts import BundlePrivacy, GuestFacts, HostFacts
from snaporch.check.findings import Finding, Severity, error, hint, listed, warning
from snaporch.sanoid.config.frozen_datasets import has_hook
from snaporch.sanoid.config.render import fitting_parent
from snaporch.sanoid.config.resolve import hook_settings

_MANY_OVERLAYS = 2


def busy(_facts: HostFacts, guest: GuestFacts) -> Iterator[Finding]:
    """A run or a libvirt job on the guest keeps it from being planned."""
    if guest.busy:
        yield hint(
            guest.name,
            f"busy: {guest.busy}",
            "whether it can be snapshotted was not checked",
            "check again when that has ended",
        )


def not_on_zfs(_facts: HostFacts, guest: GuestFacts) -> Iterator[Finding]:
    """The guest has no disk on ZFS."""
    if guest.refusal is not None and not guest.datasets:
        reason, step = guest.refusal
        yield hint(
            guest.name,
            reason,
            "no snapshot of it can be taken",
            step or "see `snaporch snapshot --dry-run`",
        )


def no_snapshot(facts: HostFacts, guest: GuestFacts) -> Iterator[Finding]:
    """The plan of a snapshot is refused."""
    if guest.refusal is not None and guest.datasets:
        reason, step = guest.refusal
        hooked = _has_hook(facts, guest)
        yield Finding(
            Severity.HINT if guest.opted_out and not hooked else Severity.ERROR,
            guest.name,
            reason,
            "no snapshot of it can be taken: `snaporch snapshot` and the pre hook fail",
            step or "see `snaporch snapshot --dry-run`",
        )


def downgrade(_facts: HostFacts, guest: GuestFacts) -> Iterator[Finding]:
    """The plan of a snapshot has a lower level than the configured one."""
    if guest.downgrade and guest.refusal is None:
        yield warning(
            guest.name,
            guest.downgrade,
            "its snapshots have a lower level than the configured one",
            "fix the reason, or set the lower level in snaporch.toml",
        )


def disk_left_out(_facts: HostFacts, guest: GuestFacts) -> Iterator[Finding]:
    """A writable disk is not on ZFS."""
    if guest.off_zfs and guest.datasets:
        yield warning(
            guest.name,
            f"not in its snapshots: {listed(guest.off_zfs)}",
            "a restore does not take that disk back with the others and RAM",
            "move it to ZFS, or leave it out on purpose by exclude_disks in snaporch.toml",
        )


def excluded_disk(_facts: HostFacts, guest: GuestFacts) -> Iterator[Finding]:
    """A disk of ``exclude_disks`` lies in a dataset of another disk of the guest."""
    if guest.excluded:
        yield warning(
            guest.name,
            f"excluded, but in a dataset that is snapshotted: {listed(guest.excluded)}",
            "a rollback of the dataset takes that disk back too, so a restore refuses it",
            "move the disk to a dataset of its own",
        )


def other_snapshots(facts: HostFacts, guest: GuestFacts) -> Iterator[Finding]:
    """Another program snapshots the guest's datasets without freezing it.

    No finding where that changes nothing: without a hook that waits, ``auto`` takes ``manual``
    anyway.
    """
    if not guest.other_program:
        return
    if guest.overlays:
        yield warning(
            guest.name,
            f"another program snapshots its datasets: {guest.other_program}",
            "a snapshot that is taken while its overlays are committed is torn, and useless",
            'set ram_strategy = "manual" in snaporch.toml, which has no overlays; or have snaporch '
            "alone snapshot these datasets, by policies or by its hooks",
        )
        return
    if _has_hook(facts, guest):
        yield hint(
            guest.name,
            f"no overlays are used, since another program snapshots its datasets: "
            f"{guest.other_program}",
            "a snapshot that is taken while overlays are committed is torn; without overlays the "
            "guest is paused until all its ZFS snapshots exist",
            "have snaporch alone snapshot these datasets, by policies or by its hooks",
        )


def confined_overlays(facts: HostFacts, guest: GuestFacts) -> Iterator[Finding]:
    """sanoid's hooks switch several disks of a guest to overlays, and AppArmor confines it.

    No finding where ``ram_strategy`` asks for overlays, or for one disk: that is a short pause.
    """
    if guest.confined_overlays < _MANY_OVERLAYS or guest.overlays or not _has_hook(facts, guest):
        return
    yield hint(
        guest.name,
        f"sanoid's hooks switch its {guest.confined_overlays} disks to overlays, and AppArmor "
        "confines it",
        "libvirt compiles its profile again for each disk while the guest is paused; by a policy "
        "of snaporch it is paused for less time, and has no overlays",
        "let a policy take its snapshots in place of sanoid: docs/how-to/schedule.md",
    )


def _has_hook(facts: HostFacts, guest: GuestFacts) -> bool:
    """Whether snaporch's pre hook freezes the guest for sanoid."""
    config = facts.sanoid.config
    sections = [config.covering(dataset) for dataset in guest.datasets] if config else []
    return any(has_hook(hook_settings(config, each) or {}) for each in sections if config and each)


def shared_dataset(_facts: HostFacts, guest: GuestFacts) -> Iterator[Finding]:
    """A dataset of the guest holds files of others."""
    if guest.shared:
        yield hint(
            guest.name,
            f"other files lie in its datasets: {listed(guest.shared)}",
            "a restore refuses to roll back files of others that were written since the snapshot",
            "move the guest to a dataset of its own",
        )


def policy_level(_facts: HostFacts, guest: GuestFacts) -> Iterator[Finding]:
    """The guest cannot have the level of one of its policies."""
    for unmet in guest.unmet:
        yield Finding(
            Severity.ERROR if unmet.fails else Severity.WARNING,
            guest.name,
            f"policy {unmet.policy}: {unmet.reason}",
            "its snapshots fail"
            if unmet.fails
            else "its snapshots have a lower level than the policy demands",
            unmet.step or f"fix the reason, or set another level in [policy.{unmet.policy}]",
        )


def replica_nested(_facts: HostFacts, guest: GuestFacts) -> Iterator[Finding]:
    """A replica of one of the guest's policies is inside a dataset of its, or around it."""
    for name, reason in guest.nested.items():
        yield error(
            guest.name,
            f"replica {name}: {reason}",
            "its snapshots are not copied there",
            f"give [replica.{name}] another dataset, best in another pool",
        )


def ram_not_replicated(facts: HostFacts, guest: GuestFacts) -> Iterator[Finding]:
    """The guest's disks are encrypted on a replica, and its RAM would be there in clear.

    So would the state of its firmware, which is in a bundle without RAM, too.
    """
    secrets = [*(["RAM"] if guest.has_ram else []), *guest.firmware]
    locked = sorted(facts.encrypted & {*guest.datasets, *guest.left_out})
    for name in guest.replicas:
        privacy = facts.bundle_privacy.get(name)
        if secrets and locked and privacy is not None and privacy.is_clear:
            other = ", or have its bundles on an encrypted dataset"
            other = other if privacy is BundlePrivacy.CLEAR else ""
            yield error(
                guest.name,
                f"its bundles are not sent to replica {name}: {listed(locked)} is encrypted, and "
                f"its {' and '.join(secrets)} would be there in clear",
                "its snapshots have no complete copy there",
                f"set encrypt_to in [replica.{name}]{other}: see docs/how-to/replication.md",
            )
        pages = facts.pages
        in_clear = pages is not None and guest.name in pages.guests and not pages.encrypted
        refuses = privacy is BundlePrivacy.ENCRYPTED
        if (
            guest.has_ram
            and in_clear
            and (refuses or (locked and privacy is BundlePrivacy.ENCRYPTED_DATASET))
        ):
            yield error(
                guest.name,
                f"its pages of RAM are not sent to replica {name}: they would be there in clear",
                "its snapshots have no complete copy there",
                "set ram_pages.dataset to one below an encrypted dataset, or ram_store to image",
            )


def unscheduled(facts: HostFacts, guest: GuestFacts) -> Iterator[Finding]:
    """Neither a policy nor sanoid takes snapshots of the guest."""
    if guest.policies or guest.opted_out or not guest.datasets:
        return
    if facts.sanoid.config is not None:
        if _uncovered_datasets(facts, guest) == list(guest.datasets):
            yield _not_by_sanoid(facts, guest, Severity.WARNING, "no snapshot can be restored")
    elif not facts.sanoid.refusal:
        yield Finding(
            Severity.WARNING if facts.policies else Severity.HINT,
            guest.name,
            "it has no policy, and sanoid takes no snapshots here",
            "only snapshots that are taken by hand can be restored",
            "give it a policy: docs/how-to/schedule.md; or, if it needs none, "
            "write in snaporch.toml",
            (f'[domain."{guest.name}"]', "policies = []"),
        )


def partly_scheduled(facts: HostFacts, guest: GuestFacts) -> Iterator[Finding]:
    """sanoid takes snapshots of only some of the guest's datasets, and no policy of any."""
    if guest.policies or guest.opted_out:
        return
    if 0 < len(_uncovered_datasets(facts, guest)) < len(guest.datasets):
        why = "a snapshot of some of its disks cannot be restored to a running guest"
        yield _not_by_sanoid(facts, guest, Severity.ERROR, why)


def _uncovered_datasets(facts: HostFacts, guest: GuestFacts) -> list[str]:
    config = facts.sanoid.config
    return [each for each in guest.datasets if config and config.covering(each) is None]


def _not_by_sanoid(facts: HostFacts, guest: GuestFacts, severity: Severity, why: str) -> Finding:
    datasets = listed(_uncovered_datasets(facts, guest))
    return Finding(
        severity,
        guest.name,
        f"sanoid takes no snapshots of {datasets}, and it has no policy",
        why,
        "give it a policy (docs/how-to/schedule.md), or add to "
        f"{facts.sanoid.directory / 'sanoid.conf'} the output of",
        (f"snaporch render sanoid {shlex.quote(guest.name)}",),
    )


def not_atomic(facts: HostFacts, guest: GuestFacts) -> Iterator[Finding]:
    """sanoid snapshots the guest's datasets one after the other."""
    config = facts.sanoid.config
    covering = [config.covering(dataset) for dataset in guest.datasets] if config else []
    sections = [section for section in covering if section is not None]
    calls = sorted({section.path for section in sections})
    if len(calls) < 2:  # noqa: PLR2004 - one call is one instant
        return
    what = f"sanoid snapshots its {len(calls)} datasets one after the other: {listed(calls)}"
    why = "snaporch keeps the guest frozen in between, but only until its deadline"
    parent = fitting_parent(guest.datasets, facts.datasets)
    if parent is None:
        fix = "nothing to do; with all its datasets below a parent of its own, one call would do"
        yield hint(guest.name, what, why, fix)
        return
    where, lines = _as_one_call(parent, sorted({section.origin for section in sections}))
    fix = f"in {facts.sanoid.directory / 'sanoid.conf'} write {where}"
    yield warning(guest.name, what, why, fix, lines)


def _as_one_call(parent: str, origins: list[str]) -> tuple[str, tuple[str, ...]]:
    """Where to write which lines, so that the hooks of the present sections stay in force."""
    if origins == [parent]:
        return f"in [{parent}], in place of its recursive line", ("recursive = zfs",)
    lines = (f"[{parent}]", "recursive = zfs")
    if len(origins) == 1 and parent.startswith(f"{origins[0]}/"):
        return f"somewhere below [{origins[0]}]", lines
    named = listed([f"[{origin}]" for origin in origins])
    return f"in place of {named}, with the settings of these", lines
