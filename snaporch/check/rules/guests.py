"""What is looked at in each guest."""

from __future__ import annotations

from collections.abc import Iterator

from snaporch.check.facts import GuestFacts, HostFacts
from snaporch.check.findings import Finding, Severity, listed
from snaporch.sanoid.config.render import fitting_parent
from snaporch.sanoid.config.resolve import SanoidConfig, Section, hook_settings
from snaporch.sanoid.config.unhooked import has_hook


def guest_findings(facts: HostFacts, guest: GuestFacts) -> Iterator[Finding]:
    """All about one guest."""
    yield from _plan(guest)
    yield from _off_zfs(guest)
    yield from _excluded(guest)
    yield from _stranger(facts, guest)
    yield from _shared(guest)
    config = facts.sanoid.config
    if config is not None and guest.datasets:
        covered = {dataset: config.covering(dataset) for dataset in guest.datasets}
        yield from _coverage(facts, guest, covered)
        yield from _apart(facts, guest, config)


def _plan(guest: GuestFacts) -> Iterator[Finding]:
    if guest.busy:
        yield Finding(
            "busy",
            Severity.HINT,
            guest.name,
            f"busy: {guest.busy}",
            "whether it can be snapshotted was not looked at",
            "check again when that has ended",
        )
    if guest.refusal is not None:
        reason, step = guest.refusal
        nowhere = not guest.datasets
        yield Finding(
            "not-on-zfs" if nowhere else "no-snapshot",
            Severity.HINT if nowhere else Severity.ERROR,
            guest.name,
            reason,
            "no snapshot of it can be taken"
            + ("" if nowhere else ": its pre hook fails, and so does `snaporch snapshot`"),
            step or "see `snaporch snapshot --dry-run`",
        )
    elif guest.downgrade:
        yield Finding(
            "downgrade",
            Severity.WARNING,
            guest.name,
            guest.downgrade,
            "its snapshots are of a lower level than what is asked for",
            "mend the reason, or ask for the lower level in snaporch.toml",
        )


def _off_zfs(guest: GuestFacts) -> Iterator[Finding]:
    if guest.off_zfs and guest.datasets:
        yield Finding(
            "disk-left-out",
            Severity.WARNING,
            guest.name,
            f"not in its snapshots: {listed(guest.off_zfs)}",
            "after a restore that disk is of another time than the others and RAM",
            "move it to ZFS; or leave it out knowingly, by exclude_disks in snaporch.toml",
        )


def _excluded(guest: GuestFacts) -> Iterator[Finding]:
    if guest.excluded:
        yield Finding(
            "excluded-disk",
            Severity.WARNING,
            guest.name,
            f"excluded, and in a dataset that is snapshotted: {listed(guest.excluded)}",
            "a rollback takes it back with the dataset, so a restore refuses that",
            "give it a dataset of its own",
        )


def _stranger(facts: HostFacts, guest: GuestFacts) -> Iterator[Finding]:
    """Where it makes no difference nothing is said: all in one pool, and no hook that waits."""
    if not guest.stranger:
        return
    if guest.overlays:
        yield Finding(
            "stranger",
            Severity.WARNING,
            guest.name,
            f"somebody else snapshots its datasets: {guest.stranger}",
            "a snapshot that is taken while its overlays are committed is torn: of no instant, and "
            "good for nothing",
            'set ram_strategy = "manual" in snaporch.toml, which has no overlays; or have snaporch '
            "alone snapshot these datasets, by itself or by its hooks",
        )
        return
    pools = {dataset.partition("/")[0] for dataset in guest.datasets}
    if len(pools) > 1 or _waits(facts, guest):
        yield Finding(
            "stranger",
            Severity.HINT,
            guest.name,
            f"no overlays are used, for somebody else snapshots its datasets: {guest.stranger}",
            "what is snapshotted while overlays are committed is torn; without them the guest is "
            "paused until all its ZFS snapshots are there",
            "have snaporch alone snapshot these datasets, by itself or by its hooks",
        )


def _waits(facts: HostFacts, guest: GuestFacts) -> bool:
    """Whether a hook of ours holds the guest while sanoid takes its time."""
    config = facts.sanoid.config
    sections = [config.covering(dataset) for dataset in guest.datasets] if config else []
    settings = [hook_settings(config, each) for each in sections if config and each]
    return any(has_hook(each or {}) for each in settings)


def _shared(guest: GuestFacts) -> Iterator[Finding]:
    if guest.shared:
        yield Finding(
            "shared-dataset",
            Severity.HINT,
            guest.name,
            f"not only the guest is in {listed(guest.shared)}",
            "a restore refuses to take back what others have written there since the snapshot",
            "give the guest a dataset of its own",
        )


def _coverage(
    facts: HostFacts, guest: GuestFacts, covered: dict[str, Section | None]
) -> Iterator[Finding]:
    bare = [dataset for dataset, section in covered.items() if section is None]
    if not bare or guest.policies or guest.opted_out:  # sanoid's would be double, or not wanted
        return
    all_of_it = len(bare) == len(covered)
    yield Finding(
        "uncovered" if all_of_it else "partly-covered",
        Severity.WARNING if all_of_it else Severity.ERROR,
        guest.name,
        f"sanoid takes no snapshots of {listed(bare)}, and it has no policy",
        "there is no way back for it"
        if all_of_it
        else "a snapshot of some of its disks is no way back to a guest that runs",
        f"give it a policy (docs/schedule.md), or add to "
        f"{facts.sanoid.directory / 'sanoid.conf'} what this prints",
        (f"snaporch render sanoid {_word(guest.name)}",),
    )


def _word(name: str) -> str:
    return name if name.replace("-", "").replace("_", "").isalnum() else f"'{name}'"


def _apart(facts: HostFacts, guest: GuestFacts, config: SanoidConfig) -> Iterator[Finding]:
    """Datasets of one guest that sanoid snapshots one after the other."""
    covering = [config.covering(dataset) for dataset in guest.datasets]
    sections = [section for section in covering if section is not None]
    calls = {section.path for section in sections}
    if len(calls) < 2:  # noqa: PLR2004 - one call is one instant
        return
    what = f"sanoid takes its {len(calls)} datasets one after the other: {listed(sorted(calls))}"
    why = "snaporch keeps the guest's disks still meanwhile, but only until its deadline"
    parent = fitting_parent(guest.datasets, facts.datasets)
    if parent is None:
        mend = "nothing must be done; datasets of its own under one parent would make it one call"
        yield Finding("taken-apart", Severity.HINT, guest.name, what, why, mend)
        return
    where, lines = _as_one_call(parent, sorted({section.origin for section in sections}))
    mend = f"in {facts.sanoid.directory / 'sanoid.conf'} write {where}"
    yield Finding("taken-apart", Severity.WARNING, guest.name, what, why, mend, lines)


def _as_one_call(parent: str, origins: list[str]) -> tuple[str, tuple[str, ...]]:
    """Where to write what, so that the hooks of the sections there are now stay in force."""
    if origins == [parent]:
        return f"in [{parent}], in place of its recursive line", ("recursive = zfs",)
    lines = (f"[{parent}]", "recursive = zfs")
    if len(origins) == 1 and parent.startswith(f"{origins[0]}/"):
        return f"somewhere below [{origins[0]}]", lines
    named = listed([f"[{origin}]" for origin in origins])
    return f"in place of {named}, with the settings of these", lines
