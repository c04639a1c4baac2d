"""Find the snapshot that the user names: by its name, by a time, or with a bundle's directory."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from snaporch.bundle.manifest import Manifest
from snaporch.bundle.store import state_of
from snaporch.catalog.records import all_records, one_per_dataset, run_members
from snaporch.catalog.torn import is_torn
from snaporch.config.duration import parse_duration
from snaporch.context import Context
from snaporch.errors import NotFoundError, RefusedError, UsageError
from snaporch.model import BundleState, Level, PoolSnapshot, SnapshotRecord, iso
from snaporch.restore.disk_checks import as_named_here
from snaporch.snapshot.snapshot_name import check_snapshot_name

_NAMED = 3
"""Snapshots that an error names."""
Found = tuple[SnapshotRecord, Manifest | None, tuple[PoolSnapshot, ...]]
"""A snapshot, its manifest if there is one, and the ZFS snapshots that it is made of."""


def split_name(text: str) -> tuple[str, str]:
    """Split ``DOMAIN@SNAPSHOT``. A domain's name may have an ``@``, a snapshot's cannot.

    Raises:
        UsageError: the text does not have that form.
    """
    domain, _, snapshot = text.rpartition("@")
    if not domain or not snapshot:
        raise UsageError(repr(text), "is not DOMAIN@SNAPSHOT", "see `snaporch list`")
    check_snapshot_name(snapshot)
    return domain, snapshot


def parse_moment(text: str) -> datetime:
    """Parse an ISO 8601 time; without an offset it is local time.

    Raises:
        UsageError: the text is no such time.
    """
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError, OSError) as error:
        raise UsageError(
            f"time {text!r}", "is not understood", "write it as 2026-11-21T10:00 or with +01:00"
        ) from error


def parse_since(text: str, now: datetime) -> datetime:
    """Parse the beginning of a time: a duration before ``now``, or as :func:`parse_moment`.

    Raises:
        UsageError: the text is neither.
    """
    with suppress(ValueError):
        return now - parse_duration(text)
    try:
        return parse_moment(text)
    except UsageError as error:
        raise UsageError(error.thing, error.reason, f"{error.step}, or as 7d, 36h") from error


def newest_until(context: Context, domain: str, moment: datetime) -> SnapshotRecord:
    """Return the newest snapshot of a domain that was not taken after ``moment``.

    Raises:
        NotFoundError: the domain has no snapshot, or only later ones.
    """
    of_domain = _records(context, context.pool.snapshots(), domain)
    whole = [record for record in of_domain if record.level is not Level.TORN]
    found = [record for record in whole if record.created <= moment]
    if found:
        return found[-1]
    if not of_domain:
        raise NotFoundError(domain, "snaporch has no snapshot of it", "see `snaporch list`")
    first = of_domain[0]
    raise NotFoundError(
        domain,
        f"its oldest snapshot, {first.snapshot}, was taken after that, at {iso(first.created)}",
        f"see `snaporch list {shlex.quote(domain)}`",
    )


def others_of_group(context: Context, record: SnapshotRecord) -> str | None:
    """Return a line about the other domains of the snapshot's group; ``None`` without a group."""
    if record.group is None:
        return None
    records = all_records(context.store, context.pool.snapshots())
    others = sorted(
        f"{other.domain}@{other.snapshot}"
        for other in records
        if other.group_run == record.group_run and other.uuid != record.uuid
    )
    if not others:
        return f"of the group {record.group}; the others have no snapshots of that instant any more"
    return (
        f"of the group {record.group}: {', '.join(others)} would be of the same instant, and "
        f"{'is' if len(others) == 1 else 'are'} not restored with it"
    )


def records_of(
    context: Context, snapshots: list[PoolSnapshot], domain: str, name: str
) -> list[SnapshotRecord]:
    """Return the records of one run, oldest first.

    A name may stand for several instants: a guest that was moved to other datasets leaves its
    snapshots behind, and on the new datasets the name is free again. snaporch does not guess.

    Args:
        name: of a snapshot, or of the run that took it.

    Raises:
        NotFoundError: the domain has no such snapshot.
        RefusedError: snapshots of several runs have the name; the error names each run.
    """
    records = all_records(context.store, snapshots, renamed_too=True)
    return _named(records, domain, name)


def select_records(records: Sequence[SnapshotRecord], text: str) -> list[SnapshotRecord]:
    """Choose from all records those of ``DOMAIN@SNAPSHOT`` or ``DOMAIN@RUN``; all of one run.

    Raises:
        UsageError: the text has another form.
        NotFoundError, RefusedError: as :func:`records_of`.
    """
    return _named(records, *split_name(text))


def choose_records(
    context: Context, snapshots: Sequence[PoolSnapshot], names: Sequence[str], *, group: bool
) -> list[SnapshotRecord]:
    """Return the records of several names, each once.

    Args:
        context: has the store.
        snapshots: all ZFS snapshots that exist.
        names: ``DOMAIN@SNAPSHOT`` or ``DOMAIN@RUN``, each.
        group: also the records that a group took at the same instants.

    Raises:
        UsageError, NotFoundError, RefusedError: as :func:`select_records`.
    """
    records = all_records(context.store, snapshots, renamed_too=True)
    chosen = [record for name in names for record in select_records(records, name)]
    return list(dict.fromkeys([*chosen, *(of_group(records, chosen) if group else ())]))


def of_group(
    records: Sequence[SnapshotRecord], chosen: Sequence[SnapshotRecord]
) -> list[SnapshotRecord]:
    """Return the records that a group took together with chosen ones, without these."""
    runs = {record.group_run for record in chosen} - {None}
    return [each for each in records if each.group_run in runs and each not in chosen]


def _named(records: Sequence[SnapshotRecord], domain: str, name: str) -> list[SnapshotRecord]:
    of_domain = [record for record in records if domain in (record.domain, record.uuid)]
    found = [record for record in of_domain if record.run == name]
    found = found or [record for record in of_domain if record.snapshot == name]
    if not found:
        step = f"see `snaporch list {shlex.quote(domain)}`"
        if not of_domain:  # it may have been renamed since
            alike = dict.fromkeys(e.full_name for e in records if name in (e.snapshot, e.run))
            step = f"{_alike(list(alike))}see `snaporch list`"
        raise NotFoundError(f"{domain}@{name}", "snaporch has no such snapshot", step)
    if len({record.run for record in found}) > 1:
        each = [f"{one.domain}@{one.run} on {', '.join(one.datasets)}" for one in found]
        raise RefusedError(
            f"{domain}@{name}", "stands for several instants", f"name the run: {'; '.join(each)}"
        )
    return found


def _alike(names: Sequence[str]) -> str:
    """Return what the snapshots of other domains are called, for a name that no domain has."""
    if not names:
        return ""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"other domains have {', '.join(names[:_NAMED])}{more}; "


def find_inside(context: Context, domain: str, snapshot: str) -> Found:
    """Find a snapshot by the properties of its ZFS snapshots, with its bundle in the store.

    Raises:
        NotFoundError, RefusedError: as :func:`records_of`.
    """
    everything = context.pool.snapshots()
    record = records_of(context, everything, domain, snapshot)[-1]
    _, manifest = context.store.state(f"{record.uuid}/{record.run}")
    if manifest is not None:
        manifest = as_named_here(context, record.full_name, manifest, everything)
    own = run_members(manifest, record.run, everything)
    return record, manifest, tuple(one_per_dataset(manifest, own, record.snapshot, newest=True))


def find_outside(context: Context, domain: str, snapshot: str, bundle: Path) -> Found:
    """Find a snapshot by the GUIDs in the manifest of a bundle outside the store.

    Raises:
        NotFoundError: the directory has no bundle.
        RefusedError: the manifest cannot be read, or belongs to another snapshot.
    """
    directory = bundle.absolute()
    state, manifest = state_of(directory)
    if state is BundleState.MISSING:
        raise NotFoundError(str(bundle), "is not the directory of a bundle")
    if manifest is None:
        raise RefusedError(str(bundle), "its manifest cannot be read")
    names = {entry.name for entry in manifest.snapshots}
    if domain not in (manifest.domain, manifest.uuid) or snapshot not in names:
        raise RefusedError(
            str(bundle), f"is the bundle of {manifest.domain}@{manifest.snapshot}", "name that"
        )
    everything = context.pool.snapshots()
    manifest = as_named_here(context, f"{manifest.domain}@{snapshot}", manifest, everything)
    guids = {(entry.dataset, entry.guid) for entry in manifest.snapshots}
    own = [each for each in everything if (each.dataset, each.guid) in guids]
    members = tuple(one_per_dataset(manifest, own, snapshot, newest=True))
    record = _record(manifest, snapshot, directory, state)
    if any(map(is_torn, members)):
        record = replace(record, level=Level.TORN)
    return record, manifest, members


def _records(context: Context, snapshots: list[PoolSnapshot], domain: str) -> list[SnapshotRecord]:
    return [
        record
        for record in all_records(context.store, snapshots, renamed_too=True)
        if domain in (record.domain, record.uuid)
    ]


def _record(
    manifest: Manifest, snapshot: str, directory: Path, state: BundleState
) -> SnapshotRecord:
    return SnapshotRecord(
        domain=manifest.domain,
        uuid=manifest.uuid,
        snapshot=snapshot,
        run=manifest.run,
        level=manifest.level,
        datasets=tuple(sorted({entry.dataset for entry in manifest.snapshots})),
        created=manifest.created,
        ram_bytes=manifest.ram_bytes,
        stored_bytes=manifest.stored_bytes,
        pause_ms=manifest.pause_ms,
        pause_parts=manifest.pause,
        bundle=str(directory),
        state=state,
        group=manifest.group.name if manifest.group else None,
        group_run=manifest.group.run if manifest.group else None,
    )
