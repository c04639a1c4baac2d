"""``snaporch list``."""

from __future__ import annotations

from typing import Annotated

import typer

from snaporch.cli.options import ConfigOption, JsonOption, config_path


def list_command(
    context: typer.Context,
    domain: Annotated[
        str | None,
        typer.Argument(metavar="[DOMAIN]", help="Only this domain.", show_default=False),
    ] = None,
    json: JsonOption = False,
    config: ConfigOption = None,
) -> int:
    """List snapshots, as ZFS and the bundle store have them now."""
    import shlex

    from snaporch.bundle.store import BundleStore
    from snaporch.catalog.records import all_records
    from snaporch.config import load_config
    from snaporch.output.tables import print_records
    from snaporch.output.terminal import print_error, print_json
    from snaporch.restore.safety_catalog import safety_copies
    from snaporch.zfs import open_pool

    settings = load_config(config_path(context, config))
    everything = open_pool(read_only=True).snapshots()
    store = BundleStore(settings.paths.bundles)
    records = all_records(store, everything, renamed_too=True)
    if domain is not None:
        uuids = {record.uuid for record in records if domain in (record.domain, record.uuid)}
        if not uuids:
            from snaporch.hypervisor import open_hypervisor

            # A renamed domain has its snapshots under its old name; a misspelt name is an error.
            uuids = {open_hypervisor(settings.libvirt_uri).domain(domain).uuid}
        records = [record for record in records if record.uuid in uuids]
    if json:
        print_json([record.as_json() for record in records])
    elif records:
        print_records(records)
        copies = [each for each in safety_copies(store, domain) if not each.record.half_way]
        for copy in {each.manifest.uuid: each for each in copies}.values():
            name = copy.manifest.domain
            print_error(f"{copy.thing} can be undone: {shlex.join(['snaporch', 'undo', name])}")
    else:
        of_domain = f" of {domain}" if domain else ""
        print_error(f"no snapshots{of_domain}; take one: snaporch snapshot DOMAIN")
    return 0
