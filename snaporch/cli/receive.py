"""``snaporch receive``: answers a host's request by :mod:`snaporch.replication.receiver`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer


def receive_command(
    dataset: Annotated[
        str,
        typer.Option(
            metavar="DATASET", help="The copies are directly below it.", show_default=False
        ),
    ],
    bundles: Annotated[
        Path, typer.Option(metavar="DIRECTORY", help="For the bundles.", show_default=False)
    ],
) -> int:
    """Accept append-only copies of one host; not called by hand.

    The forced command of a key in authorized_keys: it carries out the one request that
    SSH_ORIGINAL_COMMAND contains, and refuses everything else. It needs no root, runs no shell,
    and never deletes or replaces what has arrived. See docs/how-to/replication.md.
    """
    import json

    from snaporch.errors import UsageError
    from snaporch.output.terminal import print_result
    from snaporch.replication.receive_limits import LimitedStream, limited_requests
    from snaporch.replication.receive_request import parse_request
    from snaporch.replication.received_bundles import ReceivedBundles
    from snaporch.replication.receiver import Receiver
    from snaporch.zfs.received import ReceivedZfs
    from snaporch.zfs_names import is_dataset

    if not is_dataset(dataset):
        raise UsageError("--dataset", f"{dataset!r} cannot be the name of a dataset")
    request = parse_request(os.environ.get("SSH_ORIGINAL_COMMAND"))
    stream = LimitedStream(sys.stdin.buffer)
    receiver = Receiver(dataset, ReceivedBundles(bundles, dataset), ReceivedZfs.open(), stream)
    with limited_requests(bundles):
        print_result(json.dumps(receiver.answer(request)))
    return 0
