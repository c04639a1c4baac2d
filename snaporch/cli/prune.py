"""``snaporch prune``."""

from __future__ import annotations

from typing import Annotated

import typer

from snaporch.cli.options import ConfigOption, JsonOption, config_path


def prune_command(
    context: typer.Context,
    domain: Annotated[
        str | None,
        typer.Argument(
            metavar="[DOMAIN]", help="Only this domain's, by name or UUID.", show_default=False
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Name everything that stays, too.")
    ] = False,
    json: JsonOption = False,
    config: ConfigOption = None,
) -> int:
    """Drop bundles whose snapshots are gone, and old safety copies.

    A bundle goes to the trash when the last of its ZFS snapshots is gone, and is deleted some days
    later. Nothing goes while a pool it belongs to is not imported. Of ZFS snapshots it destroys
    only those of RAM in pages that no bundle names any more.
    """
    from snaporch.cli.pruning import prune_and_tell

    path = config_path(context, config)
    return prune_and_tell(path, domain, dry_run=dry_run, verbose=verbose, json=json)
