"""``snaporch recover``."""

from __future__ import annotations

from typing import Annotated

import typer

from snaporch.cli.options import ConfigOption, JsonOption, QuietOption, WaitOption, config_path
from snaporch.errors import SnaporchError, UsageError
from snaporch.recovery.decision import UserDecision


def recover_command(
    context: typer.Context,
    domain: Annotated[
        str | None,
        typer.Argument(
            metavar="[DOMAIN]", help="Only this domain, by name or UUID.", show_default=False
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")
    ] = False,
    take: Annotated[
        UserDecision | None,
        typer.Option(
            "--take",
            help="Of disks of which nobody can tell whether the overlay or the base is the newer: "
            "commit the overlay, or set it aside. Needs DOMAIN.",
            show_default=False,
        ),
    ] = None,
    autostart: Annotated[
        bool,
        typer.Option(
            "--autostart", help="Then start the guests of these that libvirt starts at boot."
        ),
    ] = False,
    notify: Annotated[
        bool,
        typer.Option("--notify", help="Tell those whom [notify] names what could not be settled."),
    ] = False,
    wait: WaitOption = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    config: ConfigOption = None,
) -> int:
    """Bring guests back to their base images after a run that was killed.

    Without a domain, also removes what clones and verifications that were killed have left.

    Every command that changes something does this for its own domain first. A restore that was cut
    short is finished, or undone if the guest had not been stopped yet.
    """
    if take is not None and domain is None:
        raise UsageError("--take", "is decided for one domain", "name it: snaporch list")
    from snaporch.cli.recovering import RecoverRequest, recover_all
    from snaporch.cli.session import session
    from snaporch.cli.watching import watchers

    with (
        session(config_path(context, config), quiet=quiet or json) as opened,
        watchers(opened) as watching,
    ):

        def told(error: SnaporchError) -> None:
            if notify:
                watching.failed(opened.config, error)

        wish = RecoverRequest(wait=wait, dry_run=dry_run, autostart=autostart, take=take)
        return recover_all(opened, domain, wish, told=told, json=json)
