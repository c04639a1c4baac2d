"""``snaporch send``: answers a pulling machine's request by :mod:`snaporch.pull.sender`."""

from __future__ import annotations

from typing import Annotated

import typer

from snaporch.cli.options import ConfigOption


def send_command(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Option(
            "--as",
            metavar="NAME",
            help="The machine that the key belongs to; its bookmarks have this name.",
            show_default=False,
        ),
    ],
    domains: Annotated[
        list[str] | None,
        typer.Option(
            "--domain",
            metavar="DOMAIN",
            help="A guest that may be copied, by name or UUID; repeat it for more.",
            show_default=False,
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All guests may be copied.")] = False,
    config: ConfigOption = None,
) -> int:
    """Send what another machine pulls; not called by hand.

    The forced command of a key in authorized_keys: it carries out the one request that
    SSH_ORIGINAL_COMMAND contains, and refuses everything else. It only reads, apart from a bookmark
    for each dataset. See docs/how-to/pull.md.
    """
    import os
    import re
    import sys

    from snaporch.cli.session import session
    from snaporch.errors import RefusedError, UsageError
    from snaporch.private_files import private_directory, store_errors
    from snaporch.pull.open_sender import open_sender
    from snaporch.pull.send_request import parse_request
    from snaporch.pull.slow_reader_limit import LimitedOutput
    from snaporch.replication.receive_limits import limited_requests

    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,31}", name):
        raise UsageError("--as", f"{name!r} has other characters than a-z, 0-9 and hyphens")
    if bool(domains) == everything:
        raise UsageError("--domain", "expected --domain DOMAIN, or --all")
    if os.geteuid() != 0:
        step = "put its key into /root/.ssh/authorized_keys: see docs/how-to/pull.md"
        raise RefusedError("snaporch send", "only root can read bundles", step)
    request = parse_request(os.environ.get("SSH_ORIGINAL_COMMAND"))
    with session(context, config, quiet=True, read_only=True) as opened:
        runtime = opened.config.paths.runtime
        with store_errors(runtime):
            private_directory(runtime)
        with limited_requests(runtime, file=f"send-{name}.lock"):
            output = LimitedOutput(sys.stdout.buffer, lambda: opened.interrupt.check("send"))
            open_sender(opened, name, None if everything else domains or [], output).answer(request)
    return 0
