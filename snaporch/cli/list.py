"""``snaporch list``."""

from __future__ import annotations

from typing import Annotated

import typer

from snaporch.cli.options import ConfigOption, JsonOption, config_path


def list_command(
    context: typer.Context,
    domain: Annotated[
        str | None,
        typer.Argument(metavar="[DOMAIN]", help="Only this domain's.", show_default=False),
    ] = None,
    json: JsonOption = False,
    config: ConfigOption = None,
) -> int:
    """List snapshots, as ZFS and the bundle store have them now."""
    import json as json_format

    from snaporch.bundle.store import BundleStore
    from snaporch.config import load_config
    from snaporch.pool import open_pool
    from snaporch.report.tables import print_records
    from snaporch.report.terminal import print_error, print_result
    from snaporch.run.records import all_records

    settings = load_config(config_path(context, config))
    everything = open_pool(to_look=True).snapshots()
    records = all_records(BundleStore(settings.paths.bundles), everything, renamed_too=True)
    if domain is not None:
        records = [record for record in records if domain in (record.domain, record.uuid)]
        if not records:
            from snaporch.hypervisor import open_hypervisor

            open_hypervisor(settings.libvirt_uri).domain(domain)  # a misspelt name is an error
    if json:
        print_result(
            json_format.dumps([r.as_json() for r in records], indent=2, ensure_ascii=False)
        )
    elif records:
        print_records(records)
    else:
        print_error(
            f"no snapshots{f' of {domain}' if domain else ''}; take one: snaporch snapshot DOMAIN"
        )
    return 0
