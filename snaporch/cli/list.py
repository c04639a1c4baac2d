"""``snaporch list``: prints the snapshots that :mod:`snaporch.catalog.records` finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from snaporch.catalog.filter import SortKey
from snaporch.cli.command_host import CommandHost
from snaporch.cli.options import ConfigOption, JsonOption, config_path
from snaporch.model import BundleState, Level, PoolSnapshot, SnapshotRecord

if TYPE_CHECKING:
    from snaporch.bundle.store import BundleStore
    from snaporch.fence import Fences


def list_command(
    context: typer.Context,
    domain: Annotated[
        str | None,
        typer.Argument(metavar="[DOMAIN]", help="Only this domain.", show_default=False),
    ] = None,
    level: Annotated[
        Level | None,
        typer.Option("--level", metavar="LEVEL", help=f"Only of this level: {', '.join(Level)}."),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="TIME",
            help="Only those taken since, such as 7d, 36h, 2026-11-21 or 2026-11-21T10:00.",
            show_default=False,
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            metavar="NAME",
            help="Only those of this policy; '' for those of none.",
            show_default=False,
        ),
    ] = None,
    sort: Annotated[
        SortKey,
        typer.Option("--sort", help="By time (oldest first), name, or stored (largest first)."),
    ] = SortKey.TIME,
    wide: Annotated[
        bool,
        typer.Option(
            "--wide", "-w", help="All columns, also USED (bytes in the pools), POLICY and REPLICAS."
        ),
    ] = False,
    json: JsonOption = False,
    config: ConfigOption = None,
) -> int:
    """List snapshots, as ZFS and the bundle store have them now.

    A terminal shows the columns that it has room for; --wide shows all.
    """
    from datetime import UTC, datetime

    from snaporch.bundle.store import BundleStore
    from snaporch.catalog.filter import RecordFilter
    from snaporch.catalog.local_replicas import without_replicas_here
    from snaporch.catalog.records import all_records, used_bytes
    from snaporch.cli.session import naming_replicas
    from snaporch.output.terminal import print_error, print_json
    from snaporch.restore.select import parse_since

    earliest = None if since is None else parse_since(since, datetime.now(UTC))
    host: CommandHost = context.obj
    settings = host.load_config(config_path(context, config))
    pool = host.open_pool(read_only=True)
    everything = without_replicas_here(settings, pool.snapshots())
    store = BundleStore(settings.paths.bundles)
    records = all_records(store, everything, renamed_too=True)
    if domain is not None:
        uuids = {record.uuid for record in records if domain in (record.domain, record.uuid)}
        if not uuids:
            # A renamed domain has its snapshots under its old name; a misspelt name is an error.
            with naming_replicas(settings):
                uuids = {host.open_hypervisor(settings.libvirt_uri).domain(domain).uuid}
        records = [record for record in records if record.uuid in uuids]
    chosen = RecordFilter(level, earliest, policy, sort).apply(records)
    if json:
        print_json([record.as_json() for record in chosen])
    elif chosen:
        _print_table(chosen, used_bytes(pool, everything, chosen) if wide else {}, wide=wide)
        _print_missing(chosen)
        _print_fences(host.fences(), chosen)
        _print_undo(store, domain, everything)
    elif records:
        print_error(f"no snapshots match; without options there are {len(records)}")
    else:
        of_domain = f" of {domain}" if domain else ""
        print_error(f"no snapshots{of_domain}; take one: snaporch snapshot DOMAIN")
    return 0


def _print_table(
    records: Sequence[SnapshotRecord], used: Mapping[SnapshotRecord, int], *, wide: bool
) -> None:
    from snaporch.output.tables import ListedRecord, print_records

    print_records([ListedRecord(each, used.get(each)) for each in records], wide=wide)


def _print_missing(records: Sequence[SnapshotRecord]) -> None:
    """Print how a bundle comes back, if snapshots are here without theirs, as after a rebuild."""
    from snaporch.output.terminal import print_error

    count = sum(each.state is BundleState.MISSING for each in records)
    if count:
        step = "to put a bundle back from a replica: see docs/how-to/verify.md"
        print_error(f"{count} of these snapshots have no bundle on this host; {step}")


def _print_fences(fences: Fences, records: Sequence[SnapshotRecord]) -> None:
    """Print which of these guests do not start here, and why."""
    from snaporch.output.terminal import print_error

    for uuid, name in {each.uuid: each.domain for each in records}.items():
        if (fence := fences.find(uuid)) is not None:
            print_error(f"{name} {fence.reason}")


def _print_undo(store: BundleStore, domain: str | None, present: Sequence[PoolSnapshot]) -> None:
    """Print the command that undoes the last restore of each domain, if it can be undone at all.

    It names the safety copy, whose name is a time: after an undo it is that of another restore.
    Which options it needs depends on the guest and its files, which a list does not read.
    """
    import shlex

    from snaporch.output.terminal import print_error
    from snaporch.restore.safety_catalog import NAMES_OPTIONS, safety_copies

    copies = [each for each in safety_copies(store, domain) if each.is_offered]
    for copy in {each.manifest.uuid: each for each in copies}.values():
        if copy.has_bases(present):
            command = shlex.join(["snaporch", "undo", copy.manifest.domain, "--copy", copy.name])
            print_error(f"{copy.thing} can be undone: {command} {NAMES_OPTIONS}")
